"""Rules for formulas over the features of a token: powers, means, deviations, sums with weights of the token's own."""

from __future__ import annotations

from typing import Any

from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.nodes import Arguments, operator_name
from qcompile.passes.raising.values import Value, identity

EXPONENTS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
"""The powers that are operators of their own."""
MOST_MIXED = 16
"""Most slots, and most sums over them, of a product within tokens: each result reads all slots."""


def power(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Squares, roots and reciprocals of features."""
    name = operator_name(node)
    exponent = EXPONENTS[name] if name in EXPONENTS else facts.number(a.exponent)
    value = _features(facts, a.positional[0])
    return build.apply("power", value, node, exponent) if value is not None and exponent in ops.POWERS else None


def mean(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The mean or the sum over the last features of a token, or over slots before them."""
    value, dim = _features(facts, a.input_), _only(getattr(a, "dim", None), a.input_)
    if value is None or dim is None or value.dims[dim] != "F":
        return None
    count = value.sizes[value.axis(dim) - 1]
    if value.axis(dim) == len(value.sizes):
        made = _reduced(value, build.call("mean", build.emit(value, value.sizes, node)), dim, a.keepdim)
        return made if operator_name(node) == "mean" else made.scaled(count)
    if len(value.sizes) != 2:
        return None
    total = build.call("combine", build.emit(value, value.sizes, node), None)
    dims = value.dims[:dim] + ("",) * bool(a.keepdim) + value.dims[dim + 1 :]
    made = identity(total, dims, value.sizes[1:])
    return made if operator_name(node) == "sum" else made.scaled(1 / count)


def deviation(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The variance or standard deviation of the features of a token."""
    value, dim = _features(facts, a.input_), _only(a.dim, a.input_)
    correction = getattr(a, "correction", None)
    less = 1 if correction is None else correction
    less = int(a.unbiased) if hasattr(a, "unbiased") else less
    if value is None or dim is None or len(value.sizes) != 1 or value.dims[dim] != "F" or value.count <= less:
        return None
    x = build.emit(value, value.sizes, node)
    centered = build.call("add", x, build.call("scale", build.call("mean", x), -1.0))
    moment = build.call("mean", build.call("power", centered, 2.0))
    moment = build.call("scale", moment, value.count / (value.count - less)) if less else moment
    made = build.call("power", moment, 0.5) if operator_name(node) == "std" else moment
    return _reduced(value, made, dim, a.keepdim)


def token_product(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """[.., M, S] @ [.., S, N] within each token: N sums of S slots, each with weights that the token computes."""
    left, right = (_features(facts, item) for item in a.positional[:2])
    shapes = [value.dims if value is not None and len(value.sizes) == 2 else () for value in (left, right)]
    if left is None or right is None or shapes[0] != shapes[1] or shapes[0][-2:] != ("F", "F"):
        return None
    if "".join(shapes[0][:-2]) != "BT":
        return None
    swapped = [values.permute(value, (*range(len(value.dims) - 2), -1, -2)) for value in (left, right)]
    if max(right.sizes) > MOST_MIXED:  # then the first operand may hold the weights
        if max(left.sizes) > MOST_MIXED:
            return None
        made = build.call("mix", build.emit(right, right.sizes, node), build.emit(left, left.sizes, node))
        return identity(made, left.dims, (left.sizes[0], right.sizes[1]))
    made = build.call("mix", *(build.emit(value, value.sizes, node) for value in swapped))
    mixed = identity(made, left.dims, (right.sizes[1], left.sizes[0]))
    return values.permute(mixed, (*range(len(mixed.dims) - 2), -1, -2))


def _features(facts: Facts, item: Any) -> Value | None:
    """`item` as one or two axes of unmixed features in floating point; None if it is anything else."""
    value = facts.plain(item)
    if value is None or value.base is None or not 1 <= len(value.sizes) <= 2:
        return None
    return value if value.base.meta["val"].is_floating_point() else None


def _only(dims: Any, item: fx.Node) -> int | None:
    """The dimension of a reduction over one dimension."""
    given = dims if isinstance(dims, (list, tuple)) else [dims]
    return given[0] % item.meta["val"].dim() if len(given) == 1 and isinstance(given[0], int) else None


def _reduced(value: Value, made: fx.Node, dim: int, kept: bool) -> Value:
    """`made`, which has one number in place of the last features of `value`, with or without dimension `dim`."""
    whole = identity(made, value.dims, (*value.sizes[:-1], 1))
    return whole if kept else values.select(whole, dim, 0)  # type: ignore[return-value]
