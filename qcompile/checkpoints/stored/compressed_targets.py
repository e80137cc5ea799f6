"""Which of several config_groups of compressed-tensors a module belongs to.

As in vllm-project/compressed-tensors, utils/match.py: a group has `targets`, which are names of modules, patterns that
match the beginning of a name (`re:PATTERN`), and classes of modules. For a module, names come before patterns, and
patterns before classes. Programs try patterns in different orders, so two that match have to mean the same. Modules
with codes are linears, so the class `Linear` means all of them. A name has a dot, or begins with a small letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from qcompile.checkpoints.stored.patterns import NamePattern, NamePatterns
from qcompile.errors import UnsupportedError, UsageError, shown

PATTERN, LINEAR = "re:", "Linear"
Scheme = TypeVar("Scheme")


@dataclass(frozen=True)
class ModuleSchemes(Generic[Scheme]):
    """How modules are stored: by name, by pattern, or as `usual` (None: no group says)."""

    names: dict[str, Scheme]
    patterns: tuple[tuple[NamePattern, Scheme], ...]
    usual: Scheme | None

    def scheme(self, module: str) -> Scheme:
        """The scheme of a module that stores codes. Raises UsageError if it belongs to no group."""
        if module in self.names:
            return self.names[module]
        matching = [(pattern, scheme) for pattern, scheme in self.patterns if pattern.matches(module)]
        for pattern, scheme in matching:
            if scheme != matching[0][1]:
                both = f"{matching[0][0].text} and {pattern.text}"
                raise UsageError(f"config_groups: {both} match module {module}, and their groups differ")
        if matching:
            return matching[0][1]
        if self.usual is None:
            raise UsageError(f"module {module} has codes, and no targets of config_groups name it")
        return self.usual


def module_schemes(groups: Sequence[tuple[str, Any, Scheme]]) -> ModuleSchemes[Scheme]:
    """The schemes of groups (name, targets, scheme); targets have no effect if all schemes are alike.

    Raises UsageError, UnsupportedError for targets that are not read.
    """
    if all(scheme == groups[0][2] for _, _, scheme in groups):
        return ModuleSchemes({}, (), groups[0][2])
    names: dict[str, Scheme] = {}
    patterns: list[tuple[NamePattern, Scheme]] = []
    usual, read = None, NamePatterns()
    for group, targets, scheme in groups:
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise UsageError(f"config_groups: targets of {group} are {shown(targets)}; a list of texts belongs there")
        for target in targets:
            if target.startswith(PATTERN):
                patterns.append((read.read(f"targets of {group}", target.removeprefix(PATTERN)), scheme))
            elif target == LINEAR:
                usual = scheme if usual is None else usual
            elif "." in target or target[:1].islower():  # classes have capitals
                names.setdefault(target, scheme)
            else:
                raise UnsupportedError(f"config_groups that differ are not read for class {shown(target)} ({group})")
    return ModuleSchemes(names, tuple(patterns), usual)
