"""The sums over ranks: an all_reduce after each product of which a rank has part of the inputs, as late as possible."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.divisible import SUMMED


def add_sums(graph: Graph, partial: Iterable[fx.Node], ranks: int) -> None:
    """Sum each of the values `partial` over ranks.

    An operator on one sum that is linear in it is computed first, and two sums that are added become one: the fewer
    and the smaller the values that ranks exchange, the better.
    """
    values = list(partial)  # in order, so that nodes have the same names on all ranks
    parts = set(values)
    for value in values:
        _reduce(graph, value, ranks)
    moved = True
    while moved:
        moved = any(_move_down(graph, node, parts, ranks) for node in graph.calls("all_reduce"))
        moved = moved or any(_join(graph, node, parts, ranks) for node in graph.calls("add"))


def _reduce(graph: Graph, partial: fx.Node, ranks: int) -> None:
    """Make the users of `partial` read its sum over ranks."""
    users = list(partial.users)
    with graph.fx.inserting_after(partial):
        total = graph.call("all_reduce", partial, ranks)
    for user in users:
        user.replace_input_with(partial, total)


def _move_down(graph: Graph, total: fx.Node, parts: set[fx.Node], ranks: int) -> bool:
    """Sum after the only user of `total`, if that is linear in it and its result is not larger."""
    if len(total.users) != 1:
        return False
    (user,) = total.users
    if user in parts or not _is_linear(user, total) or _size(user) > _size(total):
        return False
    user.replace_input_with(total, ops.operand(total, "x"))
    graph.fx.erase_node(total)
    parts.add(user)
    _reduce(graph, user, ranks)
    return True


def _is_linear(user: fx.Node, value: fx.Node) -> bool:
    """Whether `user` is linear in `value`, which it reads, and in no other operand's sum."""
    kind = ops.name_of(user.target)
    if kind in SUMMED:
        return ops.operand(user, "y") is value and ops.operand(user, "factor") is not value
    return kind == "scale" or (kind == "mul" and ops.operand(user, "a") is not ops.operand(user, "b"))


def _size(node: fx.Node) -> int:
    return int(node.meta["val"].numel())


def _join(graph: Graph, node: fx.Node, parts: set[fx.Node], ranks: int) -> bool:
    """all_reduce(a) + all_reduce(b), which nothing else reads, becomes all_reduce(a + b)."""
    a, b = ops.operand(node, "a"), ops.operand(node, "b")
    sums = [n for n in (a, b) if ops.name_of(n.target) == "all_reduce" and len(n.users) == 1]
    if len(sums) < 2 or a is b or _size(a) != _size(b):
        return False
    ops.set_operands(node, a=ops.operand(a, "x"), b=ops.operand(b, "x"))
    for total in (a, b):
        graph.fx.erase_node(total)
    parts.add(node)
    _reduce(graph, node, ranks)
    return True
