"""What the study of a mixed recipe has measured: bits, predicted time and perplexity of mixes of formats.

A recipe that follows from a study of sensitivity carries these figures in its table `study`, so that the report of a
build can show the recipe among the mixes that it was chosen from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qcompile.errors import UsageError, shown

_COLUMNS = ("bits", "predicted_us", "perplexity")
_MOST = 1000
"""Number of mixes that a recipe may carry; studies measure about ten."""


@dataclass(frozen=True)
class StudiedMixes:
    """Mixes in one order: `names`, `bits` per weight, `predicted_us` per token of their linears, and `perplexity`.

    `exact` is the perplexity of the model in float32 on the same text, of `tokens` tokens.
    """

    names: tuple[str, ...]
    bits: tuple[float, ...]
    predicted_us: tuple[float, ...]
    perplexity: tuple[float, ...]
    exact: float
    tokens: int

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> StudiedMixes:
        """The mixes of a study's JSON document, checked before (passes/sensitivity)."""
        mixes = facts["mixes"]
        columns = {key: tuple(float(mix[key]) for mix in mixes) for key in _COLUMNS}
        tokens = facts["samples"] * facts["length"]
        return cls(tuple(mix["name"] for mix in mixes), **columns, exact=float(facts["perplexity"]), tokens=tokens)

    @property
    def table(self) -> dict[str, Any]:
        """The mixes as `mixes_of` reads them."""
        lists = {key: list(getattr(self, key)) for key in ("names", *_COLUMNS)}
        return lists | {"exact": self.exact, "tokens": self.tokens}


def mixes_of(table: object) -> StudiedMixes:
    """The mixes in a recipe's table `study`. Raises UsageError naming what is wrong."""
    keys = ("names", *_COLUMNS, "exact", "tokens")
    if not isinstance(table, Mapping) or set(table) != set(keys):
        raise UsageError(f"study must be a table with {', '.join(keys)}, as qcompile sensitivity writes it")
    names = table["names"]
    if not _is_list(names, len(names) if isinstance(names, list) else 0, str):
        raise UsageError(f"study: names must be a list of texts, not {shown(names)}")
    if not all(name.isprintable() for name in names):
        raise UsageError("study: names must be texts of one line")
    for key in _COLUMNS:
        if not _is_list(table[key], len(names), float):
            raise UsageError(f"study: {key} must be a list of {len(names)} positive numbers, one for each name")
    for key in ("exact", "tokens"):
        if not _is_positive(table[key]):
            raise UsageError(f"study: {key} must be a positive number, not {shown(table[key])}")
    columns = {key: tuple(map(float, table[key])) for key in _COLUMNS}
    return StudiedMixes(tuple(names), **columns, exact=float(table["exact"]), tokens=int(table["tokens"]))


def front(sizes: Sequence[float], losses: Sequence[float]) -> list[int]:
    """The places of the mixes than which no other is both smaller, or as small, and loses less; by size."""
    best: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda place: (sizes[place], losses[place])):
        if not best or losses[place] < losses[best[-1]]:
            best.append(place)
    return best


def _is_list(given: object, length: int, kind: type) -> bool:
    """Whether `given` is a list of `length` texts, or positive numbers if `kind` is float."""
    if not isinstance(given, list) or len(given) != length or length > _MOST:
        return False
    return all(isinstance(one, str) if kind is str else _is_positive(one) for one in given)


def _is_positive(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given) and given > 0
