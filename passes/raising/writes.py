"""Writes into a part of a tensor: tables assembled in place, as interleaved angles are, and features changed in place.

The walk meets a write after the tensor, and before all that reads it later. So the meaning of the tensor changes at the
write, and with it the meaning of every view of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.aliasing import shared, writes_alone
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.concatenation import concatenated
from qcompile.passes.raising.facts import LENGTHS, Facts, Known
from qcompile.passes.raising.nodes import Arguments, is_in_place, operator_name, strip
from qcompile.passes.raising.values import TERM, Terms, Value

VIEWS = {
    "view",
    "permute",
    "transpose",
    "t",
    "mT",
    "unsqueeze",
    "squeeze",
    "expand",
    "slice",
    "narrow",
    "select",
    "alias",
}
"""Operators that always return memory of their operand, and never a copy of it."""


def write_part(
    facts: Facts, build: Builder, node: fx.Node, again: Callable[[fx.Node], Known], rules: Callable[[fx.Node], Known]
) -> Known:
    """The meaning of an operator that overwrites a view; gives its memory and all views of it their new meaning.

    `again` gives a node its meaning once more; `rules` gives the meaning that `node` would have if its result were new
    memory. None if the write cannot be followed.
    """
    if not is_in_place(node):
        return None
    target: Any = node.args[0]
    chain = _chain(target)
    family = None if chain is None else _family(chain[-1], node)
    if chain is None or family is None or chain[-1].op != "call_function":
        return None
    table, given = facts.known.get(chain[-1]), _given(facts, node, rules)
    if not isinstance(table, Value) or given is None:
        return None
    if table.base is not None and _is_read_across(chain[-1], node):
        return None
    places = _places(facts, table, chain, again)
    piece = values.expand(given, facts.shape(target), LENGTHS)
    if places is None or piece is None or (piece.dims, piece.sizes) != (places.dims, places.sizes):
        return None
    joined = _with_one_base(build, table, piece)
    if joined is None:
        return None
    table, piece = joined
    facts.known[chain[-1]] = replace(table, terms=_written(table.terms, places.terms["index"][0], piece.terms))
    facts.rewritten.add(chain[-1])
    for view in family:
        facts.known[view] = facts.known[view.args[0]] if is_in_place(view) else again(view)  # type: ignore[index]
    return facts.known[target]


def _given(facts: Facts, node: fx.Node, rules: Callable[[fx.Node], Known]) -> Value | None:
    """What `node` writes to the view that is its first operand."""
    target: Any = node.args[0]
    if operator_name(node) != "copy":
        made = rules(node)
        return made if isinstance(made, Value) else None
    source: Any = node.args[1]
    return facts.value(source) if target.meta["val"].dtype == source.meta["val"].dtype else None


def _chain(target: fx.Node) -> list[fx.Node] | None:
    """`target`, the tensor that it views, and so on to the one that owns the memory; None if one may be a copy."""
    chain = [target]
    while not (is_in_place(chain[-1]) and writes_alone(chain[-1])) and (above := shared(chain[-1])):
        if len(above) > 1 or not _is_view(chain[-1]):
            return None
        chain += above
    return chain


def _is_view(node: fx.Node) -> bool:
    """Whether `node` always returns memory of its first operand, and never a copy of it."""
    if operator_name(node) in ("to", "type_as"):
        same = node.meta["val"].dtype == node.args[0].meta["val"].dtype  # type: ignore[union-attr]
        return same and not getattr(Arguments(node), "copy", False)
    return operator_name(node) in VIEWS


def _family(root: fx.Node, write: fx.Node) -> list[fx.Node] | None:
    """The views of `root` before `write`, in order; None if one may be a copy instead."""
    family = [root]
    for member in family:
        for user in sorted(user for user in member.users if user < write and member in shared(user)):
            if is_in_place(user) and not user.users:
                continue
            if not is_in_place(user) and not _is_view(user):
                return None
            family.append(user)
    return sorted(family[1:])


def _is_read_across(root: fx.Node, write: fx.Node) -> bool:
    """Whether a view of `root`, or an equal view in another node, is read both before `write` and after it.

    Patterns compare nodes: one that read a view before and after the write would take both for the same values.
    """
    before: set[Any] = {strip(write.args[0])}
    after: set[Any] = set()
    family = [root]
    for member in family:
        for user in member.users:
            if member not in shared(user):
                (before if user < write else after).add(strip(member))
            elif user not in family:
                family.append(user)
    return not before.isdisjoint(after)


def _with_one_base(build: Builder, table: Value, piece: Value) -> tuple[Value, Value] | None:
    """Both values over the features of one raised tensor; None if they mix features."""
    if table.base is None and piece.base is None:
        return table, piece
    if not table.is_plain() or not piece.is_plain():
        return None
    flat = [Value(value.base, ("B", "T", "F"), value.terms.reshape(1, -1)) for value in (table, piece)]
    both = concatenated(build, flat, 2)
    if both is None:
        return None
    first, second = both.terms[:, : table.count], both.terms[:, table.count :]
    return (
        replace(table, base=both.base, terms=first.reshape(-1, *table.sizes)),
        replace(piece, base=both.base, terms=second.reshape(-1, *piece.sizes)),
    )


def _places(facts: Facts, table: Value, chain: list[fx.Node], again: Callable[[fx.Node], Known]) -> Value | None:
    """The number of each element of chain[0] within the features of the table chain[-1]."""
    kept = {member: facts.known.get(member) for member in chain}
    count = np.arange(table.count).reshape(table.sizes)
    facts.known[chain[-1]] = Value(None, table.dims, values.make_terms(table.sizes, count))
    for member in reversed(chain[:-1]):
        facts.known[member] = again(member)
    places = facts.known[chain[0]]
    facts.known.update(kept)
    return places if isinstance(places, Value) else None


def _written(terms: Terms, index: np.ndarray, piece: Terms) -> Terms:
    """`terms` with those of the features `index` replaced by those of `piece`."""
    most = max(len(terms), len(piece))
    flat = np.zeros((most, terms[0].size), TERM)
    flat["index"] = -1
    flat[: len(terms)] = terms.reshape(len(terms), -1)
    flat[:, index.ravel()] = 0
    flat["index"][:, index.ravel()] = -1
    flat[: len(piece), index.ravel()] = piece.reshape(len(piece), -1)
    return flat.reshape(most, *terms.shape[1:])
