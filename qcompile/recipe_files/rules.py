"""Rules of a recipe: formats for the linears that a rule selects by role, by layer, or by the names of their weights.

Roles and layers follow from dataflow (passes/roles.py). Names are for users who know their checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qcompile.errors import UsageError, shown, suggestion

ROLES = {
    "query": "the linear that makes queries",
    "key": "the linear that makes keys",
    "value": "the linear that makes values",
    "output": "the linear that reads what attention, or a recurrence, returns",
    "state": "linears that make the inputs of a recurrence",
    "attention_inner": "other linears of an attention or recurrence: into a latent, or of a gate",
    "gate": "of a feed-forward block: the linear before the activation; its activated result multiplies that of `up`",
    "up": "of a feed-forward block: the other linear that reads its input",
    "down": "of a feed-forward block: the linear that leads back",
    "expert_gate": "the same of experts",
    "expert_up": "the same of experts",
    "expert_down": "the same of experts",
    "head": "the linear that makes the logits",
    "other": "linears that are none of these",
}
"""What a linear is for, by name. A linear may have several roles, such as key and value."""

GROUPS = {
    "attention": ("query", "key", "value", "output", "state", "attention_inner"),
    "mlp": ("gate", "up", "down"),
    "experts": ("expert_gate", "expert_up", "expert_down"),
}
"""Names for several roles."""

_SELECTING, _CHOOSING = ("role", "layers", "names"), ("weight", "activation")
_ELSEWHERE = {
    "kv": "the KV cache has one format for all layers: write kv at the top of the recipe",
    "experts": "the experts of a layer share one kernel, and so one format: select them by role and layers",
}
"""Keys that a rule cannot have, and why."""
_PART = re.compile(r"(?P<side>first|last) +(?P<count>[0-9]{1,6})|(?P<start>-?[0-9]{1,6})( *- *(?P<stop>[0-9]{1,6}))?")


@dataclass(frozen=True)
class Rule:
    """Formats for the linears that have one of `roles`, are in `layers`, and read a weight of `names` (globs).

    An empty field selects all linears. `layers` is a text such as "first 2, 7, 10-12, last 1", where -1 is the last.
    `weight` and `activation` are names of formats; an empty one leaves that to the recipe.
    """

    name: str
    roles: tuple[str, ...] = ()
    layers: str = ""
    names: tuple[str, ...] = ()
    weight: str = ""
    activation: str = ""

    def numbers(self, layers: int) -> frozenset[int]:
        """The layers that it selects in a model of `layers` layers. Raises UsageError for one that does not exist."""
        chosen: set[int] = set()
        for part in filter(None, (part.strip() for part in self.layers.split(","))):
            given = _PART.fullmatch(part)
            assert given is not None, part  # rule_of has checked it
            if given["side"]:
                count = int(given["count"])
                chosen |= set(range(count) if given["side"] == "first" else range(layers - count, layers))
            else:
                start = int(given["start"])
                start += layers * (start < 0)
                chosen |= set(range(start, int(given["stop"] or start) + 1))
        wrong = sorted(number for number in chosen if not 0 <= number < layers)
        if wrong:
            raise UsageError(f"rule {self.name}: layers {self.layers} do not all exist: the model has {layers} layers")
        return frozenset(chosen) if self.layers else frozenset(range(layers))

    @property
    def table(self) -> dict[str, Any]:
        """The rule as `rule_of` reads it."""
        given = {"role": _short(self.roles), "layers": self.layers, "names": _short(self.names)}
        given |= {"weight": self.weight, "activation": self.activation}
        return {key: value for key, value in given.items() if value}

    def __str__(self) -> str:
        where = [", ".join(self.roles), f"layers {self.layers}" * bool(self.layers), ", ".join(self.names)]
        what = [self.weight, f"x {self.activation}" * bool(self.activation)]
        return f"{self.name}: {'; '.join(filter(None, where))} -> {' '.join(filter(None, what))}"


def _short(texts: tuple[str, ...]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else list(texts)


def rule_of(name: str, table: object) -> Rule:
    """The rule `name` from a table of TOML. Raises UsageError naming what is wrong."""
    if not isinstance(table, Mapping):
        example = '{role = "down", layers = "first 2", weight = "w8_sym_channel"}'
        raise UsageError(f"rule {name} must be a table, for example {example}, not {shown(table)}")
    keys = (*_SELECTING, *_CHOOSING)
    for key in table:
        if key in _ELSEWHERE:
            raise UsageError(f"rule {name}: {_ELSEWHERE[key]}")
        if key not in keys:
            raise UsageError(f"rule {name}: {key} is unknown; there are {', '.join(keys)}{suggestion(key, keys)}")
    formats = {key: _text(name, key, table[key]) for key in _CHOOSING if key in table}
    if not formats:
        raise UsageError(f"rule {name} chooses nothing: write weight, activation or both")
    if not any(key in table for key in _SELECTING):
        raise UsageError(f"rule {name} selects nothing: write role, layers or names")
    names = _texts(name, "names", table["names"]) if "names" in table else ()
    layers = _layers(name, table["layers"]) if "layers" in table else ""
    return Rule(name, _roles(name, table), layers, names, **formats)


def _roles(rule: str, table: Mapping[str, object]) -> tuple[str, ...]:
    known = (*ROLES, *GROUPS)
    roles = _texts(rule, "role", table["role"]) if "role" in table else ()
    for role in roles:
        if role == "router":
            raise UsageError(f"rule {rule}: routers of experts stay in f32")
        if role not in known:
            hint = suggestion(role, known)
            raise UsageError(f"rule {rule}: role {role} is unknown; there are {', '.join(known)}{hint}")
    return roles


def _layers(rule: str, given: object) -> str:
    """The layers of a rule as a text: numbers and ranges, "first 2" and "last 2"; lists and numbers are written so."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if isinstance(given, list) and given and all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        given = ", ".join(map(str, given))
    parts = given.split(",") if isinstance(given, str) else []
    if not parts or not all(map(_is_part, parts)):
        form = '"first 2, 5, 8-10, last 2", or a list of numbers, where -1 is the last layer'
        raise UsageError(f"rule {rule}: layers = {shown(given)}: write {form}")
    return ", ".join(part.strip() for part in parts)


def _is_part(text: str) -> bool:
    """Whether `text` is one of the parts of a text of layers, and selects any."""
    given = _PART.fullmatch(text.strip())
    if given is None:
        return False
    return int(given["count"]) > 0 if given["side"] else int(given["stop"] or given["start"]) >= int(given["start"])


def _texts(rule: str, key: str, given: object) -> tuple[str, ...]:
    """A text, or a list of texts, that may not be empty."""
    listed = given if isinstance(given, list) else [given]
    if not listed:
        raise UsageError(f"rule {rule}: {key} is an empty list")
    return tuple(_text(rule, key, one) for one in listed)


def _text(rule: str, key: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise UsageError(f"rule {rule}: {key} must be a text, not {shown(given)}")
    return given
