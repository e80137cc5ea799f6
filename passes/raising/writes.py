"""Writes into a part of a table: a function of the position that is assembled in place, as interleaved angles are.

The walk meets a write after the table, and before all that reads it later. So the meaning of the table changes at the
write, and with it the meaning of every view of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.aliasing import shared
from qcompile.passes.raising.facts import LENGTHS, Facts, Known
from qcompile.passes.raising.nodes import is_in_place, operator_name
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


def write_part(facts: Facts, node: fx.Node, again: Callable[[fx.Node], Known]) -> Known:
    """The meaning of copy_ into a view of a table; gives the table and all views of it their new meaning.

    `again` applies the rules to a node once more. None if `node` is another operator, or the write cannot be followed.
    """
    if not (is_in_place(node) and operator_name(node) == "copy"):
        return None
    target, source = node.args[0], node.args[1]
    chain: list[fx.Node] = [target]  # type: ignore[list-item]
    while above := shared(chain[-1]):
        chain += above[:1]
        if len(above) > 1 or operator_name(chain[-2]) not in VIEWS:
            return None
    root, table, given = chain[-1], facts.known.get(chain[-1]), facts.value(source)
    family = _family(root, node)
    if not (isinstance(table, Value) and table.base is None and given is not None and given.base is None):
        return None
    if family is None or root.op != "call_function" or target.meta["val"].dtype != source.meta["val"].dtype:  # type: ignore[union-attr]
        return None
    places = _places(facts, table, chain, again)
    piece = values.expand(given, facts.shape(target), LENGTHS)  # type: ignore[arg-type]
    if places is None or piece is None or (piece.dims, piece.sizes) != (places.dims, places.sizes):
        return None
    facts.known[root] = replace(table, terms=_written(table.terms, places.terms["index"][0], piece.terms))
    facts.rewritten.add(root)
    for view in family:
        facts.known[view] = again(view)
    return facts.known[target]  # type: ignore[index]


def _family(root: fx.Node, write: fx.Node) -> list[fx.Node] | None:
    """The views of `root` before `write`, in order; None if one may be a copy instead."""
    family = [root]
    for member in family:
        for user in sorted(user for user in member.users if user < write and member in shared(user)):
            if is_in_place(user) and not user.users:
                continue
            if operator_name(user) not in VIEWS:
                return None
            family.append(user)
    return sorted(family[1:])


def _places(facts: Facts, table: Value, chain: list[fx.Node], again: Callable[[fx.Node], Known]) -> Value | None:
    """The number of each element of chain[0] within the features of the table chain[-1]."""
    kept = {member: facts.known.get(member) for member in chain}
    count = np.arange(table.count).reshape(table.sizes)
    facts.known[chain[-1]] = replace(table, terms=values.make_terms(table.sizes, count))
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
