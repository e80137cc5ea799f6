"""The rule for logarithms of what multiplies a state, which loops over tokens give as factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.nodes import Arguments, strip, unsupported
from qcompile.passes.raising.values import ONE, Value


def log_decay(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The logarithm of a factor of a state that is exp(x), sigmoid(x), 1 - sigmoid(x), or a number.

    A function of the position that is 1 after the first token, where the state is 0, changes nothing.
    """
    value = facts.value(a.factor)
    if value is None:
        return None
    if value.base is None:
        return _log_of_number(node, value)
    made = _log(build, value)
    if made is None:
        reason = "needs a decay that is exp(x), sigmoid(x) or 1 - sigmoid(x), which are above 0 and have a logarithm"
        raise unsupported(strip(a.factor), reason)
    return made


def _log_of_number(node: fx.Node, value: Value) -> Value:
    coef = value.terms["coef"]
    if len(value.terms) != 1 or (value.terms["kind"] != ONE).any() or (coef <= 0).any():
        raise unsupported(node, "needs a decay that is above 0")
    terms = value.terms.copy()
    terms["coef"] = np.log(coef)
    return replace(value, terms=terms)


def _log(build: Builder, value: Value) -> Value | None:
    """The logarithm of features, each of which is one of a raised tensor; None if it is not known."""
    if not value.is_plain() or (value.terms["coef"] != 1).any() or value.base is None:
        return None
    made = _log_of(build, value.base)
    return None if made is None else replace(value, base=made)


def _log_of(build: Builder, x: fx.Node) -> fx.Node | None:
    """A raised tensor that is the logarithm of `x`, feature by feature; None if it is not known."""
    kind, given = ops.name_of(x.target), ops.named(x) if ops.name_of(x.target) else {}
    if kind in ("split_heads", "merge_heads"):
        inner = _log_of(build, given["x"])
        return inner and build.shaped(inner, feature_sizes(x))
    if kind == "unary" and given["kind"] == "exp":
        return given["x"]
    if kind == "unary" and given["kind"] == "sigmoid":  # -softplus(-x)
        return build.call("scale", build.call("unary", build.call("scale", given["x"], -1.0), "softplus"), -1.0)
    if kind == "shift" and (one := _negated_sigmoid(given)) is not None:
        return build.call("scale", build.call("unary", one, "softplus"), -1.0)
    if kind == "mul" and _is_one_later(build, given["b"]):
        return _log_of(build, given["a"])
    return None


def _negated_sigmoid(given: Mapping[str, Any]) -> fx.Node | None:
    """x if `given` are the operands of a shift for 1 - sigmoid(x)."""
    scaled = ops.named(given["x"])
    if given["offset"] != 1 or ops.name_of(given["x"].target) != "scale" or scaled["factor"] != -1:
        return None
    inner = scaled["x"]
    is_sigmoid = ops.name_of(inner.target) == "unary" and ops.named(inner)["kind"] == "sigmoid"
    return ops.named(inner)["x"] if is_sigmoid else None


def _is_one_later(build: Builder, factor: fx.Node) -> bool:
    """Whether `factor` is a table of the position that holds 1 for all but the first."""
    if ops.name_of(factor.target) != "embedding" or ops.named(factor)["ids"] is not build.positions:
        return False
    table = build.out.weights[str(ops.named(factor)["weight"].target)]
    return bool((table[1:] == 1).all())
