"""Rules for functions of the position: counting, angles, their cosines, and tables of all other functions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.evaluation import PositionEvaluator
from qcompile.passes.raising.facts import LENGTHS, WHOLE, Constant, Facts, Known, Opaque
from qcompile.passes.raising.nodes import Arguments, operator_name
from qcompile.passes.raising.values import Value, identity

ELEMENTWISE = {
    *("to", "_to_copy", "type_as", "alias", "contiguous", "clone", "detach", "unsqueeze", "floor", "ceil", "round"),
    *("trunc", "log", "log1p", "log2", "log10", "exp", "expm1", "sqrt", "rsqrt", "reciprocal", "pow", "square"),
    *("abs", "neg", "add", "sub", "rsub", "mul", "div", "floor_divide", "clamp", "clamp_min", "clamp_max", "minimum"),
    *("maximum", "where", "eq", "ne", "lt", "le", "gt", "ge", "tanh", "sigmoid", "bitwise_not", "logical_not"),
}
"""Operators that compute the element at an index from the operands' elements at that index."""

LAYOUT = {"view", "reshape", "_unsafe_view", "flatten", "squeeze", "slice", "expand"}
"""Layout operators with sizes as arguments; they count as elementwise if only dimensions of size 1 change."""


def arange(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """arange over the tokens: the step's position plus `start`, which replaces the model's own counting."""
    start = getattr(a, "start", 0) or 0
    if facts.shape(node) != [LENGTHS["T"]] or not isinstance(start, int) or getattr(a, "step", 1) not in (None, 1):
        return None
    if node.meta["val"].dtype not in (*WHOLE, torch.float32, torch.float64):  # too short for every position
        return None
    place = Value(None, ("T",), values.make_terms((), kind=values.POSITION))
    return values.add(place, Value(None, (), values.make_terms((), coef=float(start))))


def uniform(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A tensor with one number in all places, such as a mask of tokens that are no padding: 1 at all positions."""
    number = facts.number(getattr(a, "fill_value", float("ones" in operator_name(node))))
    shape, axes = facts.shape(node), {size: axis for axis, size in LENGTHS.items()}
    axes[LENGTHS["B"] * LENGTHS["T"]] = "BT"
    sizes = [size for size in shape if size > 1 and size not in axes]
    if number is None or math.prod(sizes) > values.MOST_FEATURES:
        return None
    dims = tuple(axes.get(size, "F" if size > 1 else "") for size in shape)
    return Value(None, dims, values.make_terms(sizes, coef=number))


def trigonometric(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """cos and sin of angles that are linear in the position."""
    value = facts.value(a.input_)
    kind = values.COS if "cos" in str(node.target) else values.SIN
    return value and values.trigonometric(value, kind)


def outer(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The outer product of two vectors, such as positions and frequencies."""
    first, second = facts.value(a.positional[0]), facts.value(a.positional[1])
    if first is None or second is None:
        return None
    return values.multiply(values.unsqueeze(first, 1), second)


def outer_matmul(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """[.., N, 1] @ [.., 1, M], an outer product: many models multiply positions by frequencies this way."""
    left, right = a.positional[:2]
    if left.meta["val"].shape[-1] != 1:
        return None
    first, second = facts.value(left), facts.value(right)
    if first is None or second is None or (first.base or second.base) is not None:
        return None
    return values.multiply(first, second)


# ---- tables of other functions -------------------------------------------------------------------------


def scale_by_position(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Features times another function of their position, such as a logarithm: a table in f32 for every position.

    Operators that mix features by position commute with the factor, so rotations and merges of heads stay as they are,
    and the raised tensor before them is multiplied.
    """
    for source, factor in (a.positional[:2], a.positional[1::-1]):
        value = facts.known.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(value, Value) or value.base is None or not _is_by_position(facts, value, factor):
            continue
        table = PositionEvaluator(facts, facts.longest).value(factor).float().flatten()
        if (table == table[0]).all():
            return value.scaled(float(table[0]))
        return _multiplied(build, value, table, node)
    return None


def weight_by_position(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A weight times another function of the position, such as a factor of each head that grows with its logarithm."""
    axes = {LENGTHS["B"]: "B", LENGTHS["T"]: "T", 1: ""}
    for weight, factor in (a.positional[:2], a.positional[1::-1]):
        if not isinstance(weight, fx.Node) or not isinstance(facts.known.get(weight), Constant):
            continue
        value = weight.meta["val"]
        if not isinstance(value, Tensor) or not _is_opaque(facts, factor):
            continue
        count, dims = value.numel(), tuple(axes.get(size, "F") for size in facts.shape(node))
        own = [axes.get(size, "F") for size in facts.shape(factor)]
        if dims.count("F") != 1 or math.prod(s for s in facts.shape(node) if s not in axes) != count or "F" in own:
            continue
        if own.count("T") != 1 or not _reads_positions_only(facts, factor):
            continue
        number = _row_of(facts, build, factor)
        made = build.call("mul", build.gather([number], np.zeros(count, np.int64)), build.vector(weight))
        return identity(made, dims, (count,))
    return None


def add_by_position(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Features plus another function of their position, such as whether it is the first."""
    for source, term in (a.positional[:2], a.positional[1::-1]):
        value = facts.known.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(value, Value) or value.base is None or a.alpha not in (None, 1) or "sub" in str(node.target):
            continue
        if not _is_by_position(facts, value, term) or not 1 <= len(value.sizes) <= 2 or not value.is_plain():
            continue
        spread = build.gather([_row_of(facts, build, term)], np.zeros(value.count, np.int64))
        made = build.call("add", build.flat(build.emit(value, value.sizes, node)), spread)
        return identity(made, value.dims, value.sizes)
    return None


def _row_of(facts: Facts, build: Builder, factor: Any) -> fx.Node:
    """The value of a function of the position, as one feature."""
    table = PositionEvaluator(facts, facts.longest).value(factor).float().flatten()
    return build.call("embedding", build.positions, build.constant("by_position", table[:, None].contiguous()))


def _is_opaque(facts: Facts, factor: Any) -> bool:
    return isinstance(factor, fx.Node) and isinstance(facts.known.get(factor), Opaque)


def _is_by_position(facts: Facts, value: Value, factor: Any) -> bool:
    """Whether `factor` is provably one number per token that multiplies all features of `value`."""
    if not _is_opaque(facts, factor):
        return False
    axes = {1: "", LENGTHS["B"]: "B", LENGTHS["T"]: "T"}
    dims = [axes.get(size, "?") for size in facts.shape(factor)]
    own = ["", *value.dims][len(value.dims) + 1 - len(dims) :] if len(dims) <= len(value.dims) else []
    fits = bool(own) and all(mine in ("", theirs) for mine, theirs in zip(dims, own, strict=True))
    return fits and dims.count("T") == 1 and _reads_positions_only(facts, factor)


def _reads_positions_only(facts: Facts, factor: Any) -> bool:
    """Whether an expression is composed elementwise of functions of the position and numbers only."""
    seen, frontier = set(), [factor]
    while frontier:
        node = frontier.pop()
        known = facts.known.get(node)
        if node in seen or isinstance(known, Constant) or (isinstance(known, Value) and known.base is None):
            continue
        if not isinstance(known, Opaque) or not _is_elementwise(facts, node):
            return False
        seen.add(node)
        frontier += node.all_input_nodes[:1] if operator_name(node) in LAYOUT else node.all_input_nodes
    return True


def _is_elementwise(facts: Facts, node: fx.Node) -> bool:
    """Whether the result of `node` at an index depends on its operands at that index only."""
    if operator_name(node) not in LAYOUT:
        return node.op == "call_function" and operator_name(node) in ELEMENTWISE
    sizes = [[size for size in facts.shape(each) if size != 1] for each in (node, node.all_input_nodes[0])]
    return operator_name(node) == "expand" or sizes[0] == sizes[1]


def _multiplied(build: Builder, value: Value, table: torch.Tensor, node: fx.Node) -> Value | None:
    """`value` with its raised tensor multiplied by the row of `table` [P] at the position."""
    index = value.terms["index"]
    used = np.unique(index[value.terms["coef"] != 0])
    if not len(used) or used[0] < 0:  # there are constants among the features
        return None
    assert value.base is not None
    x = build.select_features(value.base, used, node)
    factor = build.call("embedding", build.positions, build.constant("by_position", table[:, None].contiguous()))
    terms = value.terms.copy()
    terms["index"] = np.clip(np.searchsorted(used, index), 0, len(used) - 1)
    return replace(value, base=_multiply_early(build, x, factor), terms=terms)


def _multiply_early(build: Builder, x: Any, factor: fx.Node) -> fx.Node:
    """`x` times one number per token, multiplied before rotations and weights per feature."""
    kind = ops.name_of(x.target)
    if kind == "rope" or (kind == "mul" and build.out.is_weight(x.args[1])):
        return build.call(kind, _multiply_early(build, x.args[0], factor), *x.args[1:])
    return build.shaped(build.call("mul", build.flat(x), factor), feature_sizes(x))
