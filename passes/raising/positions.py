"""Factors that depend on the position and leave raising's algebra, such as logarithms: tables over all positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.aten import handles
from qcompile.passes.raising.joined import HANDLERS
from qcompile.passes.raising.masks import Run
from qcompile.passes.raising.nodes import Arguments, operator_name
from qcompile.passes.raising.raiser import LENGTHS, Known, Opaque, Raiser, Weight, features
from qcompile.passes.raising.routing import overridden
from qcompile.passes.raising.values import Value

__all__ = ["HANDLERS"]

ELEMENTWISE = {
    *("to", "_to_copy", "type_as", "alias", "contiguous", "clone", "detach", "unsqueeze", "floor", "ceil", "round"),
    *("trunc", "log", "log1p", "log2", "log10", "exp", "expm1", "sqrt", "rsqrt", "reciprocal", "pow", "square"),
    *("abs", "neg", "add", "sub", "rsub", "mul", "div", "floor_divide", "clamp", "clamp_min", "clamp_max", "minimum"),
    *("maximum", "where", "eq", "ne", "lt", "le", "gt", "ge", "tanh", "sigmoid"),
}
"""Operators whose result at an index depends only on their operands at that index."""

LAYOUT = {"view", "reshape", "_unsafe_view", "flatten", "squeeze", "slice", "expand"}
"""Layout operators with sizes as arguments; they count as elementwise if only dimensions of size 1 change."""


@overridden("mul", "multiply")
def _times_number_of_position(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Features times a function of their position, whose values are tabulated in f32 for every position.

    Operators that mix features by position commute with the factor, so rotations and merges of heads stay as they are,
    and the raised tensor before them is multiplied.
    """
    for source, factor in (a.positional[:2], a.positional[1::-1]):
        value = r.known.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(value, Value) or value.base is None or not _is_by_position(r, value, factor):
            continue
        table = Run(r, r.source.info.max_position).value(factor).float().flatten()
        if (table == table[0]).all():
            return value.scaled(float(table[0]))
        return _multiplied(r, value, table, node)
    return None


def _is_by_position(r: Raiser, value: Value, factor: Any) -> bool:
    """Whether `factor` is provably one number per token that multiplies all features of `value`."""
    if not isinstance(factor, fx.Node) or not isinstance(r.known.get(factor), Opaque):
        return False
    axes = {1: "", LENGTHS["B"]: "B", LENGTHS["T"]: "T"}
    dims = [axes.get(size, "?") for size in r.shape(factor)]
    own = ["", *value.dims][len(value.dims) + 1 - len(dims) :] if len(dims) <= len(value.dims) else []
    fits = bool(own) and all(mine in ("", theirs) for mine, theirs in zip(dims, own, strict=True))
    return fits and dims.count("T") == 1 and _of_positions(r, factor)


def _of_positions(r: Raiser, factor: Any) -> bool:
    """Whether an expression is composed elementwise of functions of the position and numbers only."""
    seen, frontier = set(), [factor]
    while frontier:
        node = frontier.pop()
        known = r.known.get(node)
        if node in seen or isinstance(known, Weight) or (isinstance(known, Value) and known.base is None):
            continue
        if not isinstance(known, Opaque) or not _is_by_place(r, node):
            return False
        seen.add(node)
        frontier += node.all_input_nodes[:1] if operator_name(node) in LAYOUT else node.all_input_nodes
    return True


def _is_by_place(r: Raiser, node: fx.Node) -> bool:
    """Whether `node` is elementwise: its result at an index depends on its operands at that index only."""
    if operator_name(node) not in LAYOUT:
        return node.op == "call_function" and operator_name(node) in ELEMENTWISE
    sizes = [[size for size in r.shape(each) if size != 1] for each in (node, node.all_input_nodes[0])]
    return operator_name(node) == "expand" or sizes[0] == sizes[1]


def _multiplied(r: Raiser, value: Value, table: torch.Tensor, node: fx.Node) -> Value | None:
    """`value` with its raised tensor multiplied by the row of `table` [P] at the position."""
    index = value.terms["index"]
    used = np.unique(index[value.terms["coef"] != 0])
    if not len(used) or used[0] < 0:  # there are constants among the features
        return None
    assert value.base is not None
    x = r.select_features(value.base, used, node)
    factor = r.call("embedding", r.positions, r.constant("by_position", table[:, None].contiguous()))
    terms = value.terms.copy()
    terms["index"] = np.clip(np.searchsorted(used, index), 0, len(used) - 1)
    return replace(value, base=_multiply_early(r, x, factor), terms=terms)


def _multiply_early(r: Raiser, x: Any, factor: fx.Node) -> fx.Node:
    """`x` times one number per token, multiplied before rotations and weights per feature."""
    kind = ops.name_of(x.target)
    if kind == "rope" or (kind == "mul" and r.out.is_weight(x.args[1])):
        return r.call(kind, _multiply_early(r, x.args[0], factor), *x.args[1:])
    return r.shaped(r.call("mul", r.flat(x), factor), features(x))


# ---- positions times frequencies ----------------------------------------------------------------------


@handles("outer", "ger")
def _outer_product(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    first, second = r.value(a.positional[0]), r.value(a.positional[1])
    if first is None or second is None:
        return None
    return values.multiply(values.unsqueeze(first, 1), second)
