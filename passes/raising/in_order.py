"""Rows of pairs of token and slot, sorted by expert: known by the values of the pairs in their own order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qcompile.passes.raising.facts import Facts, Known, Opaque
from qcompile.passes.raising.nodes import POINTWISE, Arguments, operator_name
from qcompile.passes.raising.slots import PAIRS
from qcompile.passes.raising.values import Value

SAME_ROWS = POINTWISE | {"chunk", "split", "unsqueeze", "to", "_to_copy", "type_as", "clone", "contiguous", "dropout"}
"""Operators that compute each row of a result from those in its place."""


@dataclass(frozen=True)
class InOrder(Opaque):
    """Rows of pairs, sorted by the expert of `choice`; with `expert`, only the rows of this expert.

    `value` has the rows in the pairs' own order; its first dimension is PAIRS.
    """

    understood: ClassVar[bool] = True
    value: Value
    choice: fx.Node
    expert: int = -1


def lifted(facts: Facts, node: fx.Node, replaced: Callable[[dict[fx.Node, Value]], Known]) -> Known:
    """What the rules make of an operator on sorted rows, applied to the rows of pairs; None if it does not apply."""
    given = {source: known for source in node.all_input_nodes if isinstance(known := facts.known.get(source), InOrder)}
    if not given or operator_name(node) not in SAME_ROWS:
        return None
    first = next(iter(given.values()))
    others = [source for source in node.all_input_nodes if source not in given and facts.number(source) is None]
    alike = all(one.expert < 0 and one.choice is first.choice for one in given.values())
    along_pairs = getattr(Arguments(node), "dim", None) in (0, -len(first.value.dims))
    if (others and operator_name(node) != "type_as") or not alike or along_pairs:
        return None
    results = replaced({source: one.value for source, one in given.items()})
    several = isinstance(results, (list, tuple))
    values = list(results) if isinstance(results, (list, tuple)) else [results]
    if not all(isinstance(value, Value) and value.dims[:1] == (PAIRS,) for value in values):
        return None
    made: list[Known] = [InOrder(node, value, first.choice) for value in values if isinstance(value, Value)]
    return made if several else made[0]
