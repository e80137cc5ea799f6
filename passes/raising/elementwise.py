"""Rules for arithmetic on features: sums, products, quotients and bounds, with numbers, weights or other features."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, working_sizes
from qcompile.passes.raising.facts import Constant, Facts, Known
from qcompile.passes.raising.nodes import Arguments, strip, unsupported
from qcompile.passes.raising.rotary import as_rotary, rotated
from qcompile.passes.raising.slots import is_one_slot
from qcompile.passes.raising.values import Value, identity


def negate(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """-x."""
    value = facts.value(a.input_)
    return value and value.scaled(-1.0)


def multiply(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A product with a number, a weight, a function of the position, or other features."""
    left, right = a.positional[:2]
    for x, factor in ((left, right), (right, left)):
        number = facts.number(factor)
        if number is not None:
            scaled = facts.value(x)
            return scaled and scaled.scaled(number)
    for x, factor in ((left, right), (right, left)):
        if _has_base(facts.known.get(x)) and isinstance(facts.known.get(factor), Constant):
            return with_weight(facts, build, "mul", x, factor)
    first, second = facts.value(left), facts.value(right)
    if first is None or second is None:
        return None
    if first.base is not None and second.base is not None:
        first, second = (as_rotary(facts, build, value) or value for value in (first, second))
    if first.base is not None and second.base is not None:
        early = _multiply_early(build, first, second, node) or _multiply_early(build, second, first, node)
        return early or _combine(build, "mul", first, second, left)
    return values.multiply(first, second)


def divide(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A quotient by a number other than 0."""
    number = facts.number(a.positional[1]) if getattr(a, "rounding_mode", None) is None else None
    value = facts.value(a.positional[0]) if number else None
    return value and value.scaled(1.0 / number)  # type: ignore[operator]


def quotient(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A quotient of features by features: a product with their reciprocals."""
    if getattr(a, "rounding_mode", None) is not None:
        return None
    divisor = facts.plain(a.positional[1])
    if divisor is None or not 1 <= len(divisor.sizes) <= 2:
        return None
    inverse, value = build.apply("power", divisor, node, -1.0), facts.value(a.positional[0])
    if value is None or value.base is None:
        return value and values.multiply(value, inverse)
    return _combine(build, "mul", value, inverse, node)


def add(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A sum or difference: of functions of the position, of features and a weight, or of two features."""
    left, right = a.positional[:2]
    sign = (-1.0 if "sub" in str(node.target) else 1.0) * float(a.alpha if isinstance(a.alpha, (int, float)) else 1)
    number = facts.number(right)
    if number is not None:
        table, offset = facts.known.get(left), Value(None, (), values.make_terms((), coef=sign * number))
        return values.add(table, offset) if isinstance(table, Value) and table.base is None else None
    for x, bias in ((left, right), (right, left)):
        if _has_base(facts.known.get(x)) and isinstance(facts.known.get(bias), Constant) and sign == 1:
            return with_weight(facts, build, "add", x, bias)
    first, second = facts.value(left), facts.value(right)
    if first is None or second is None:
        return None
    second = second if sign == 1 else second.scaled(sign)
    if first.is_plain() and second.is_plain():
        return _combine(build, "add", first, second, node)
    return values.add(first, second)


def add_expanded_bias(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A bias that is expanded over batch and tokens before it is added."""
    for x, bias in (a.positional[:2], a.positional[1::-1]):
        known = facts.known.get(x) if isinstance(x, fx.Node) else None
        if not _has_base(known) or a.alpha not in (None, 1):
            continue
        weight = strip(bias)  # behind the expansion, and copies of it
        if weight is bias or not isinstance(facts.known.get(weight), Constant):
            continue
        if weight.meta["val"].dim() == 1 and facts.shape(bias) == facts.shape(x):
            return with_weight(facts, build, "add", x, weight)
    return None


def shift(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A number added to features. The sum of a number and a function of the position is one, see `add`."""
    number, value = facts.number(a.positional[1]), facts.plain(a.positional[0])
    if number is None or value is None or a.alpha not in (None, 1) or not 1 <= len(value.sizes) <= 2:
        return None
    sign = -1.0 if "sub" in str(node.target) else 1.0
    return build.apply("shift", value, node, sign * number)


def shift_negated(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A number minus features, or minus a function of the position."""
    number, value = facts.number(a.other), facts.value(a.input_)
    if number is None or value is None or a.alpha not in (None, 1):
        return None
    if value.base is None:
        return values.add(value.scaled(-1.0), Value(None, (), values.make_terms((), coef=number)))
    if facts.plain(a.input_) is None or not 1 <= len(value.sizes) <= 2:
        return None
    return build.apply("shift", value.scaled(-1.0), node, number)


def clamp(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Features bounded by numbers; infinite ones bound nothing."""
    bounds = [getattr(a, "min", None), getattr(a, "max", None)]
    value = facts.plain(a.input_)
    if value is None or any(isinstance(bound, fx.Node) for bound in bounds) or not 1 <= len(value.sizes) <= 2:
        return None
    low, high = (None if bound is None else float(bound) for bound in bounds)
    low, high = (None if low == -math.inf else low), (None if high == math.inf else high)
    return value if low is None and high is None else build.apply("clamp", value, node, low, high)


# ---- building ------------------------------------------------------------------------------------------


def _combine(build: Builder, name: str, a: Value, b: Value, node: Any) -> Known:
    """qcompile::name of two raised tensors, feature by feature; features that both lack are repeated."""
    aligned = values.align(a, b)
    if aligned is None:
        return None
    dims, left, right = aligned
    sizes = left.shape[1:]
    for x, number in ((a, b), (b, a)):  # one number for all features
        if number.count == 1 < x.count and x.sizes == sizes and len(sizes) == 1 and not is_one_slot(x.base):
            made = build.call(name, build.emit(x, sizes, node), build.emit(number, (1,), node))
            return identity(made, dims, sizes)
    if not a.sizes == b.sizes == sizes:
        if is_one_slot(a.base) or is_one_slot(b.base):
            return None
        a, b = Value(a.base, dims, left), Value(b.base, dims, right)
    own, other = working_sizes(a), working_sizes(b)
    shape = own if own == other else (a.count,)  # any layout will do, since the operator is elementwise
    made = build.call(name, build.emit(a, shape, node), build.emit(b, shape, node))
    return identity(made, dims, sizes)


def _multiply_early(build: Builder, mixed: Value, factor: Value, node: fx.Node) -> Value | None:
    """Mixed features, such as rotated heads, times features: multiplied before they are mixed.

    None if features are not mixed, or if those with different factors are.
    """
    aligned = values.align(mixed, factor)
    if mixed.is_plain() or not factor.is_plain() or aligned is None or aligned[1].shape[1:] != mixed.sizes:
        return None
    dims, terms, factors = aligned
    used = terms["coef"] != 0
    index, by = terms["index"][used], np.broadcast_to(factors["index"], terms.shape)[used]
    coefs = np.unique(factors["coef"])
    if dims != mixed.dims or len(coefs) > 1 or not len(index) or (index < 0).any():
        return None
    places, first = np.unique(index, return_index=True)
    if (by[first][np.searchsorted(places, index)] != by).any():
        return None
    assert mixed.base is not None
    x = build.flat(build.select_features(mixed.base, places, node))
    row = Value(factor.base, ("B", "T", "F"), values.make_terms((len(places),), by[first], float(coefs[0])))
    moved = terms.copy()
    moved["index"] = np.clip(np.searchsorted(places, terms["index"]), 0, len(places) - 1)
    return Value(build.call("mul", x, build.emit(row, row.sizes, node)), dims, moved)


def with_weight(facts: Facts, build: Builder, name: str, source: fx.Node, weight: fx.Node) -> Known:
    """A raised tensor times (`name` mul) or plus (add) a weight over its last dimension, its heads, or both.

    The weight becomes an operand of the norm or linear before it if that has none yet. Raises UnsupportedError if its
    shape does not fit.
    """
    value = facts.known[source]
    lies = _lies_along(value, weight) if isinstance(value, Value) else None
    if not isinstance(value, Value) or lies is None:
        raise unsupported(source, f"is combined with weight {weight}, which fits neither its features nor its heads")
    if name == "mul" and not value.is_plain():
        value = rotated(facts, build, source, value) or value
    made = build.emit(value, value.sizes, source)
    operand = build.vector(weight) if lies != "heads" else build.spread(weight, value.sizes[1])
    kind, given = str(ops.name_of(made.target)), ops.named(made)
    if lies != "last" and (kind not in ops.NORMS or given["weight"] is not None):
        made = build.flat(made)  # one weight for each feature of each head
        kind, given = str(ops.name_of(made.target)), ops.named(made)
    if name == "mul" and kind in ops.NORMS and given["weight"] is None and given.get("bias") is None:
        joined = build.call(kind, given["x"], operand, *made.args[2:])
    elif name == "add" and kind == "layer_norm" and given["bias"] is None:
        joined = build.call("layer_norm", given["x"], given["weight"], operand, given["eps"])
    elif name == "add" and kind == "linear" and given["bias"] is None:
        joined = build.call("linear", given["x"], given["weight"], operand)
    else:
        joined = build.call(name, made, operand)
    return identity(joined, value.dims, value.sizes)


def _lies_along(value: Value, weight: fx.Node) -> str | None:
    """Whether a weight's elements match the "last" features of `value`, its "heads", or "both"; None: neither."""
    sizes = weight.meta["val"].shape
    wide = [place for place, size in enumerate(reversed(sizes)) if size != 1]
    own = [place for place, axes in enumerate(reversed(value.dims)) if axes == "F"]
    shape = tuple(size for size in sizes if size != 1)
    if len(sizes) > len(value.dims):
        return None
    if wide == own and len(value.sizes) == 1 and shape == value.sizes:  # in any place
        return "last"
    if value.dims[-1] != "F":
        return None
    if wide == [0] and shape == value.sizes[-1:]:
        return "last"
    if len(own) != 2 or is_one_slot(value.base):
        return None
    if wide == own and shape == value.sizes:
        return "both"
    return "heads" if wide == own[1:] and shape == value.sizes[:1] else None


def _has_base(known: Known) -> bool:
    """Whether `known` holds features of a raised tensor."""
    return isinstance(known, Value) and known.base is not None
