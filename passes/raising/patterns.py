"""Norms and activations written in elementwise ATen operators, recognized from their last operator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.passes.raising.nodes import operator_name, rounds
from qcompile.passes.raising.raiser import Known, Raiser
from qcompile.passes.raising.values import Value, identity

TRANSPARENT = {"to", "_to_copy", "alias", "contiguous", "clone", "detach", "dropout", "expand", "type_as"}
"""Operators that patterns look through when they do not change values."""


def strip(item: Any, booleans: bool = False) -> Any:
    """The node that `item` copies or casts without changing values; with `booleans`, or casts to booleans."""
    while isinstance(item, fx.Node) and operator_name(item) in TRANSPARENT and not _changes(item, booleans):
        item = item.args[0]
    return item


def _changes(item: Any, booleans: bool) -> bool:
    """Whether a cast changes values: to integers, booleans or real numbers, or to a short type."""
    made, given = item.meta["val"].dtype, item.args[0].meta["val"].dtype
    if made == torch.bool and booleans:
        return False
    narrower = given.is_floating_point and not made.is_floating_point
    return rounds(item) or narrower or (made == torch.bool != given) or (given.is_complex and not made.is_complex)


def is_call(item: Any, *names: str) -> bool:
    """Whether `item` calls one of the ATen operators `names`; add and sub without alpha, div without rounding mode.

    A call that rounds its result to a short type is none.
    """
    if not isinstance(item, fx.Node) or item.op != "call_function" or operator_name(item) not in names or rounds(item):
        return False
    more = (*item.args[2:], *item.kwargs.values()) if operator_name(item) in ("add", "sub", "div") else ()
    return all(value in (None, 1) for value in more)


def pair(node: fx.Node) -> list[tuple[Any, Any]]:
    """Both orders of the operands of a commutative operator, with casts stripped."""
    a, b = strip(node.args[0]), strip(node.args[1])
    return [(a, b), (b, a)]


def with_weight(r: Raiser, name: str, source: fx.Node, factor: fx.Node) -> Known:
    """A raised tensor times (or plus) a weight over its last dimension, folded into a norm or linear if possible."""
    value = r.known[source]
    fits, by_head = _lies_along(value, factor) if isinstance(value, Value) else (False, False)
    if not isinstance(value, Value) or not (fits or by_head):
        raise r.unsupported(source, f"meets weight {factor} in an unsupported way")
    if name == "mul" and not value.is_plain():
        from qcompile.passes.raising.attention import turned

        value = turned(r, source, value) or value
    made = r.emit(value, value.sizes, source)
    weight = r.vector(factor)
    kind = ops.name_of(made.target)
    if by_head and kind not in ("rms_norm", "layer_norm"):
        raise r.unsupported(source, f"meets weight {factor} of every head, which is supported only after a norm")
    if name == "mul" and kind in ("rms_norm", "layer_norm") and made.args[1:-1].count(None) == len(made.args) - 2:
        joined = r.call(str(kind), made.args[0], weight, *made.args[2:])
    elif name == "add" and kind == "layer_norm" and made.args[2] is None:
        joined = r.call("layer_norm", made.args[0], made.args[1], weight, made.args[3])
    elif name == "add" and kind == "linear" and len(made.args) == 2:
        joined = r.call("linear", *made.args, weight)
    elif by_head:
        raise r.unsupported(source, f"meets weight {factor} of every head after a norm that has weights already")
    else:
        joined = r.call(name, made, weight)
    return identity(joined, value.dims, value.sizes)


def _lies_along(value: Value, factor: fx.Node) -> tuple[bool, bool]:
    """Whether a weight's elements match the last dimension of `value`, or its heads and their features."""
    sizes = factor.meta["val"].shape
    wide = [place for place, size in enumerate(reversed(sizes)) if size != 1]
    own = [place for place, axes in enumerate(reversed(value.dims)) if axes == "F"]
    shape = tuple(size for size in sizes if size != 1)
    if value.dims[-1] != "F" or len(sizes) > len(value.dims):
        return False, False
    return wide == [0] and shape == value.sizes[-1:], wide == own and len(own) == 2 and shape == value.sizes


def norm(r: Raiser, node: fx.Node, source: fx.Node, kind: str, weights: tuple[Any, ...], eps: float) -> Value:
    """qcompile::rms_norm or layer_norm over the last dimension of `source`."""
    value = r.require(source, f"norm {node}")
    if value.base is None or value.dims[-1] != "F":
        raise r.unsupported(node, "normalises something else than the features of a token")
    if kind == "rms_norm" and weights == (None,) and not value.is_plain():
        from qcompile.passes.raising.heads import behind_rotation

        if (turned := behind_rotation(r, node, value, eps)) is not None:
            return turned
    read = [None if w is None else r.vector(w) for w in weights]
    return identity(r.call(kind, r.emit(value, value.sizes, node), *read, float(eps)), value.dims, value.sizes)


# ---- norms -------------------------------------------------------------------------------------------


def match_product(r: Raiser, node: fx.Node) -> Known:
    """x * rsqrt(mean(x²) + eps), with or without the mean subtracted; GELU by tanh, erf or sigmoid; Mish."""
    for x, factor in pair(node):
        spread = _inverse_root(r, factor)
        if spread is not None:
            return _normalised(r, node, x, *spread)
    return _match_gelu(r, node) or _match_gelu_quick(r, node) or _match_mish(r, node)


def match_quotient(r: Raiser, node: fx.Node) -> Known:
    """x / sqrt(mean(x²) + eps), with or without the mean subtracted."""
    x, divisor = strip(node.args[0]), strip(node.args[1])
    spread = _root(r, divisor)
    return None if spread is None else _normalised(r, node, x, *spread)


def _normalised(r: Raiser, node: fx.Node, x: fx.Node, moment: Any, eps: float) -> Known:
    """x divided by sqrt(`moment` + eps), if the moment is that of x."""
    squared = _mean_of_square(r, moment)
    if squared is x and isinstance(r.known.get(x), Value):
        return norm(r, node, x, "rms_norm", (None,), eps)
    source = _centred(x)
    if source is not None and source in (_centred(squared), _variance(moment)):
        return norm(r, node, source, "layer_norm", (None, None), eps)
    return None


def _plus_epsilon(r: Raiser, item: Any) -> tuple[Any, float] | None:
    """(m, eps) for m + eps."""
    if not is_call(item, "add"):
        return None
    for moment, eps in pair(item):
        number = r.number(eps)
        if number is not None:
            return moment, number
    return None


def _inverse_root(r: Raiser, item: Any) -> tuple[Any, float] | None:
    if is_call(item, "rsqrt") or (is_call(item, "pow") and item.args[1] == -0.5):
        return _plus_epsilon(r, strip(item.args[0]))
    if is_call(item, "reciprocal"):
        return _root(r, strip(item.args[0]))
    if is_call(item, "div") and item.args[0] == 1:
        return _root(r, strip(item.args[1]))
    return None


def _root(r: Raiser, item: Any) -> tuple[Any, float] | None:
    if is_call(item, "sqrt") or (is_call(item, "pow") and item.args[1] == 0.5):
        return _plus_epsilon(r, strip(item.args[0]))
    return None


def over_last(node: fx.Node) -> bool:
    """Whether a reduction is over the last dimension and keeps it."""
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    dims = node.args[1] if len(node.args) > 1 else None
    keep = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    return isinstance(dims, (list, tuple)) and [d % rank for d in dims] == [rank - 1] and bool(keep)


def _mean_of_square(r: Raiser, item: Any) -> Any:
    """x for mean(x², -1), else None."""
    if not is_call(item, "mean") or not over_last(item):
        return None
    power = strip(item.args[0])
    if (is_call(power, "pow") and power.args[1] == 2) or is_call(power, "square"):
        return strip(power.args[0])
    if is_call(power, "mul") and strip(power.args[0]) is strip(power.args[1]):
        return strip(power.args[0])
    return None


def _centred(item: Any) -> Any:
    """x for x - mean(x), else None."""
    if not is_call(item, "sub"):
        return None
    x, mean = strip(item.args[0]), strip(item.args[1])
    return x if is_call(mean, "mean") and over_last(mean) and strip(mean.args[0]) is x else None


def _variance(item: Any) -> Any:
    """x for the biased variance of x over the last dimension, else None."""
    if not is_call(item, "var") or item.kwargs.get("correction", 1) not in (0, 0.0):
        biased = is_call(item, "var") and len(item.args) > 2 and item.args[2] is False
        if not biased:
            return None
    rank = item.args[0].meta["val"].dim()
    keep = item.kwargs.get("keepdim", item.args[3] if len(item.args) > 3 else False)
    dims = item.args[1] if len(item.args) > 1 else None
    return strip(item.args[0]) if keep and dims and [d % rank for d in dims] == [rank - 1] else None


# ---- activations -------------------------------------------------------------------------------------


def match_power(r: Raiser, node: fx.Node) -> Known:
    """relu(x)²; other powers are matched as parts of norms."""
    from qcompile.passes.raising.aten import elementwise

    relu = strip(node.args[0])
    squares = is_call(node, "square") or node.args[1] == 2
    return elementwise(r, node, relu.args[0], "unary", "relu2") if squares and is_call(relu, "relu") else None


def match_where(r: Raiser, node: fx.Node) -> Known:
    """xIELU: a x² + b x where x > 0, else c (expm1(min(x, eps)) - x) + b x."""
    from qcompile.passes.raising.aten import elementwise

    test, yes, no = (strip(item) for item in node.args[:3])
    if not is_call(test, "gt") or r.number(test.args[1]) != 0 or not (is_call(yes, "add") and is_call(no, "add")):
        return None
    x = strip(test.args[0])
    line, square = _terms(r, yes, x)
    bend, same = _terms(r, no, x)
    powers = [term[1] for term in (line, square, bend, same)]
    others = [term[2] for term in (line, square, same)]
    if powers != [1, 2, 0, 1] or any(others) or len(bend[2]) != 1 or line[0] != same[0]:
        return None
    eps = _bound_of_bend(r, bend[2][0], x)
    if eps is None or r.shape(x) != r.shape(node):
        return None
    curve = r.constant("xielu", torch.tensor([square[0], bend[0], line[0], eps]))
    return elementwise(r, node, x, "xielu", curve)


def _bound_of_bend(r: Raiser, item: Any, x: Any) -> float | None:
    """eps for expm1(min(x, eps)) - x."""
    if not is_call(item, "sub") or strip(item.args[1]) is not x:
        return None
    grown = strip(item.args[0])
    least: Any = strip(grown.args[0]) if is_call(grown, "expm1") else None
    if not is_call(least, "min", "minimum") or len(least.args) != 2:
        return None
    return next((r.number(bound) for y, bound in pair(least) if y is x), None)


_Term = tuple[float, int, list[Any]]


def _terms(r: Raiser, total: Any, x: Any) -> list[_Term]:
    """Both terms of a sum as returned by _product, the one with the lower power of x first."""
    return sorted((_product(r, term, x) for term in total.args[:2]), key=lambda term: term[1])


def _is_close(r: Raiser, item: Any, wanted: float) -> bool:
    number = r.number(item)
    return number is not None and math.isclose(number, wanted, rel_tol=1e-6)


def _factor(r: Raiser, item: Any, wanted: float) -> Any:
    """x for x * wanted in either order, or x / (1 / wanted); else None."""
    if is_call(item, "mul"):
        for x, number in pair(item):
            if _is_close(r, number, wanted):
                return x
    if is_call(item, "div") and _is_close(r, item.args[1], 1 / wanted):
        return strip(item.args[0])
    return None


def _plus_one(r: Raiser, item: Any) -> Any:
    if is_call(item, "add"):
        for x, one in pair(item):
            if _is_close(r, one, 1.0):
                return x
    return None


def _match_gelu(r: Raiser, node: fx.Node) -> Known:
    """0.5 * x * (1 + tanh(...)) or 0.5 * x * (1 + erf(...)), with the products associated in any way."""
    from qcompile.passes.raising.aten import elementwise

    for outer, inner in pair(node):
        candidates = [(outer, inner, _factor(r, outer, 0.5))]
        if _is_close(r, outer, 0.5) and is_call(inner, "mul"):
            candidates += [(a, b, a) for a, b in pair(inner)]
        for _, gate, x in candidates:
            squash: Any = _plus_one(r, gate) if x is not None else None
            if is_call(squash, "tanh") and _is_tanh_argument(r, strip(squash.args[0]), x):
                return elementwise(r, node, x, "unary", "gelu_tanh")
            if is_call(squash, "erf") and _factor(r, strip(squash.args[0]), math.sqrt(0.5)) is x:
                return elementwise(r, node, x, "unary", "gelu")
    return None


def _match_mish(r: Raiser, node: fx.Node) -> Known:
    """x * tanh(softplus(x))."""
    from qcompile.passes.raising.aten import elementwise

    for x, squash in pair(node):
        soft: Any = strip(squash.args[0]) if is_call(squash, "tanh") else None
        if is_call(soft, "softplus") and strip(soft.args[0]) is x and len(soft.args) == 1 and not soft.kwargs:
            return elementwise(r, node, x, "unary", "mish")
    return None


def _match_gelu_quick(r: Raiser, node: fx.Node) -> Known:
    """x * sigmoid(1.702 * x)."""
    from qcompile.passes.raising.aten import elementwise

    for x, squash in pair(node):
        if is_call(squash, "sigmoid") and _factor(r, strip(squash.args[0]), ops.QUICK) is x:
            return elementwise(r, node, x, "unary", "gelu_quick")
    return None


def _is_tanh_argument(r: Raiser, item: Any, x: Any) -> bool:
    """Whether `item` is sqrt(2/pi) * (x + 0.044715 * x³), or the same with x factored out of the sum."""
    number, powers, others = _product(r, item, x)
    if not math.isclose(number, math.sqrt(2 / math.pi), rel_tol=1e-6) or len(others) != 1 or powers > 1:
        return False
    if not is_call(others[0], "add"):
        return False
    least, most = _terms(r, others[0], x)
    cubic, own = (most[1], least[1]) == (3 - powers, 1 - powers), least[0] == 1
    return cubic and own and math.isclose(most[0], 0.044715, rel_tol=1e-6) and not least[2] + most[2]


def _product(r: Raiser, item: Any, x: Any) -> _Term:
    """(coefficient, power of x, other factors) of the product `item`."""
    item = strip(item)
    number = r.number(item)
    if item is x or number is not None:
        return (1.0, 1, []) if number is None else (number, 0, [])
    if is_call(item, "pow", "square"):
        power = 2 if is_call(item, "square") else item.args[1]
        if strip(item.args[0]) is x and power in (2, 3):
            return 1.0, int(power), []
    if is_call(item, "div") and (divisor := r.number(item.args[1])):
        number, powers, others = _product(r, item.args[0], x)
        return number / divisor, powers, others
    if not is_call(item, "mul"):
        return 1.0, 0, [item]
    first, second = (_product(r, factor, x) for factor in item.args[:2])
    return first[0] * second[0], first[1] + second[1], first[2] + second[2]
