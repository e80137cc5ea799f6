"""Rules of GPTQ checkpoints that store modules in different ways (ModelCloud/GPTQModel, quantization/config.py).

`dynamic` maps patterns of modules' names to settings. The first pattern that matches the beginning of a name decides:
`-:PATTERN` leaves the module as it is, and `+:PATTERN` or PATTERN changes settings of the configuration for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from qcompile.checkpoints.stored.patterns import NamePattern, NamePatterns
from qcompile.errors import UnsupportedError, UsageError, shown

LEFT, CHANGED = "-:", "+:"
STORED = ("bits", "group_size", "sym", "desc_act")
"""Settings of a rule that say how a weight is stored."""
CHOSEN = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware", "mse"),
    *("gptaq", "gptaq_alpha", "v2", "v2_alpha"),
)
"""Settings of a rule that say how codes were chosen: they have no effect on what the codes mean."""
Scheme = TypeVar("Scheme")


@dataclass(frozen=True)
class ModuleRules(Generic[Scheme]):
    """How modules are stored: the scheme of the first of `rules` with a pattern of the name, else `usual`.

    A scheme None means that a module is left as it is.
    """

    usual: Scheme
    rules: tuple[tuple[NamePattern, Scheme | None], ...] = ()

    def scheme(self, module: str) -> Scheme:
        """The scheme of a module that stores codes. Raises UsageError if the rules leave it as it is."""
        for pattern, scheme in self.rules:
            if pattern.matches(module):
                if scheme is None:
                    raise UsageError(f"module {module} has codes, and dynamic leaves it as it is: {pattern.text}")
                return scheme
        return self.usual


def module_rules(quantization: Mapping[str, Any], scheme: Callable[[Mapping[str, Any]], Scheme]) -> ModuleRules[Scheme]:
    """The rules of a `quantization_config`; `scheme` reads a configuration. Raises UnsupportedError, UsageError."""
    dynamic = quantization.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise UsageError(
            f"dynamic of the checkpoint's gptq weights is {shown(dynamic)}; patterns with settings belong there"
        )
    rules: list[tuple[NamePattern, Scheme | None]] = []
    patterns = NamePatterns()
    for text, changes in dynamic.items():
        pattern = patterns.read("dynamic of gptq weights", text.removeprefix(LEFT).removeprefix(CHANGED))
        if text.startswith(LEFT):
            rules.append((pattern, None))
            continue
        if not isinstance(changes, dict):
            raise UsageError(f"dynamic of the checkpoint's gptq weights: {text} has {shown(changes)}, and no settings")
        if others := [key for key in changes if key not in (*STORED, *CHOSEN)]:
            raise UnsupportedError(f"gptq weights with {others[0]} for some modules (dynamic has {text}) are not read")
        rules.append((pattern, scheme({**quantization, **changes})))
    return ModuleRules(scheme(quantization), tuple(rules))
