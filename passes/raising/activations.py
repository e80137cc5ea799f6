"""Rules for activations: as one operator, or written in elementwise operators and recognized from the last one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.nodes import Arguments, both_orders, is_call, operator_name, strip
from qcompile.passes.raising.values import Value

Term = tuple[float, int, list[Any]]
"""A product of a coefficient, a power of x, and other factors."""


def activation(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """An activation that is one operator, with its usual settings."""
    if any(getattr(a, name, 1) != 1 for name in ("alpha", "scale", "input_scale", "beta")):  # of elu and softplus
        return None
    if getattr(a, "threshold", 20) < 20:  # the bend that it cuts off is no longer lost by rounding
        return None
    kind = "gelu_tanh" if getattr(a, "approximate", "none") == "tanh" else operator_name(node)
    return _apply(facts, build, node, a.positional[0], "unary", kind)


def log_sigmoid(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """log(sigmoid(x)) = -softplus(-x)."""
    value = facts.known.get(a.positional[0])
    if not isinstance(value, Value) or value.base is None:
        return None
    return build.apply("unary", value.scaled(-1.0), node, "softplus").scaled(-1.0)


def written_softplus(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """x where x > bound, else log(1 + e^x), for a bound beyond which both are equal in float32, and e^x is finite."""
    test, yes, no = (strip(item) for item in node.args[:3])
    bound = facts.number(test.args[1]) if is_call(test, "gt", "ge") else None
    if bound is None or not 17 <= bound <= 88 or strip(test.args[0]) is not yes:
        return None
    raised = (
        no.args[0] if is_call(no, "log1p") else _minus_one(facts, strip(no.args[0])) if is_call(no, "log") else None
    )
    if not is_call(strip(raised), "exp") or strip(strip(raised).args[0]) is not yes:
        return None
    return _apply(facts, build, node, yes, "unary", "softplus")


def squared_relu(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """relu(x)²."""
    relu = strip(node.args[0])
    squares = is_call(node, "square") or node.args[1] == 2
    if not squares or not is_call(relu, "relu"):
        return None
    return _apply(facts, build, node, relu.args[0], "unary", "relu2")


def gelu(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """0.5 * x * (1 + tanh(...)) or 0.5 * x * (1 + erf(...)), with the products associated in any way."""
    for outer, inner in both_orders(node):
        candidates = [(inner, _over(facts, outer, 0.5))]
        if _is_close(facts, outer, 0.5) and is_call(inner, "mul"):
            candidates += [(gate, x) for x, gate in both_orders(inner)]
        for gate, x in candidates:
            squash: Any = _minus_one(facts, gate) if x is not None else None
            if is_call(squash, "tanh") and _is_tanh_argument(facts, strip(squash.args[0]), x):
                return _apply(facts, build, node, x, "unary", "gelu_tanh")
            if is_call(squash, "erf") and _over(facts, strip(squash.args[0]), math.sqrt(0.5)) is x:
                return _apply(facts, build, node, x, "unary", "gelu")
    return None


def quick_gelu(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """x * sigmoid(1.702 * x)."""
    for x, squash in both_orders(node):
        if is_call(squash, "sigmoid") and _over(facts, strip(squash.args[0]), ops.QUICK) is x:
            return _apply(facts, build, node, x, "unary", "gelu_quick")
    return None


def mish(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """x * tanh(softplus(x))."""
    for x, squash in both_orders(node):
        soft: Any = strip(squash.args[0]) if is_call(squash, "tanh") else None
        if is_call(soft, "softplus") and strip(soft.args[0]) is x and len(soft.args) == 1 and not soft.kwargs:
            return _apply(facts, build, node, x, "unary", "mish")
    return None


def xielu(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """xIELU: a x² + b x where x > 0, else c (expm1(min(x, eps)) - x) + b x."""
    test, yes, no = (strip(item) for item in node.args[:3])
    if not is_call(test, "gt") or facts.number(test.args[1]) != 0 or not (is_call(yes, "add") and is_call(no, "add")):
        return None
    x = strip(test.args[0])
    line, square = _terms(facts, yes, x)
    bend, same = _terms(facts, no, x)
    powers = [term[1] for term in (line, square, bend, same)]
    others = [term[2] for term in (line, square, same)]
    if powers != [1, 2, 0, 1] or any(others) or len(bend[2]) != 1 or line[0] != same[0]:
        return None
    eps = _bound_of_bend(facts, bend[2][0], x)
    if eps is None or facts.shape(x) != facts.shape(node):
        return None
    curve = build.constant("xielu", torch.tensor([square[0], bend[0], line[0], eps]))
    return _apply(facts, build, node, x, "xielu", curve)


def _bound_of_bend(facts: Facts, item: Any, x: Any) -> float | None:
    """eps for expm1(min(x, eps)) - x."""
    if not is_call(item, "sub") or strip(item.args[1]) is not x:
        return None
    grown = strip(item.args[0])
    least: Any = strip(grown.args[0]) if is_call(grown, "expm1") else None
    if not is_call(least, "min", "minimum") or len(least.args) != 2:
        return None
    return next((facts.number(bound) for y, bound in both_orders(least) if y is x), None)


def _apply(facts: Facts, build: Builder, node: fx.Node, source: fx.Node, name: str, *more: Any) -> Known:
    """qcompile::name of `source`, with further arguments `more`; None if `source` has no features."""
    value = facts.known.get(source)
    return build.apply(name, value, node, *more) if isinstance(value, Value) and value.base is not None else None


# ---- products and sums ---------------------------------------------------------------------------------


def _is_close(facts: Facts, item: Any, wanted: float) -> bool:
    number = facts.number(item)
    return number is not None and math.isclose(number, wanted, rel_tol=1e-6)


def _over(facts: Facts, item: Any, factor: float) -> Any:
    """x for x * factor in either order, or x / (1 / factor); else None."""
    if is_call(item, "mul"):
        for x, number in both_orders(item):
            if _is_close(facts, number, factor):
                return x
    if is_call(item, "div") and _is_close(facts, item.args[1], 1 / factor):
        return strip(item.args[0])
    return None


def _minus_one(facts: Facts, item: Any) -> Any:
    """x for x + 1 in either order; else None."""
    if is_call(item, "add"):
        for x, one in both_orders(item):
            if _is_close(facts, one, 1.0):
                return x
    return None


def _is_tanh_argument(facts: Facts, item: Any, x: Any) -> bool:
    """Whether `item` is sqrt(2/pi) * (x + 0.044715 * x³), or the same with x factored out of the sum."""
    number, powers, others = _product(facts, item, x)
    if not math.isclose(number, math.sqrt(2 / math.pi), rel_tol=1e-6) or len(others) != 1 or powers > 1:
        return False
    if not is_call(others[0], "add"):
        return False
    least, most = _terms(facts, others[0], x)
    cubic, own = (most[1], least[1]) == (3 - powers, 1 - powers), least[0] == 1
    return cubic and own and math.isclose(most[0], 0.044715, rel_tol=1e-6) and not least[2] + most[2]


def _terms(facts: Facts, total: Any, x: Any) -> list[Term]:
    """Both terms of a sum, the one with the lower power of x first."""
    return sorted((_product(facts, term, x) for term in total.args[:2]), key=lambda term: term[1])


def _product(facts: Facts, item: Any, x: Any) -> Term:
    """The product `item` as one term in x."""
    item = strip(item)
    number = facts.number(item)
    if item is x or number is not None:
        return (1.0, 1, []) if number is None else (number, 0, [])
    if is_call(item, "pow", "square"):
        power = 2 if is_call(item, "square") else item.args[1]
        if strip(item.args[0]) is x and power in (2, 3):
            return 1.0, int(power), []
    if is_call(item, "div") and (divisor := facts.number(item.args[1])):
        number, powers, others = _product(facts, item.args[0], x)
        return number / divisor, powers, others
    if not is_call(item, "mul"):
        return 1.0, 0, [item]
    first, second = (_product(facts, factor, x) for factor in item.args[:2])
    return first[0] * second[0], first[1] + second[1], first[2] + second[2]
