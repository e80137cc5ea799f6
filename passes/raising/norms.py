"""Rules for norms: as one operator, written in elementwise operators, or with a separate norm for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.nodes import Arguments, both_orders, is_call, is_over_last, strip, unsupported
from qcompile.passes.raising.rotary import rotation_of
from qcompile.passes.raising.values import Value, identity, operator_of


def rms_norm(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """rms_norm over the last dimension."""
    if len(a.normalized_shape) != 1:
        return None
    eps = torch.finfo(torch.float32).eps if a.eps is None else a.eps
    return _norm(facts, build, node, a.input, "rms_norm", (a.weight,), eps)


def layer_norm(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """layer_norm over the last dimension; native_layer_norm has two more results, which nothing may read."""
    if len(a.normalized_shape) != 1:
        return None
    made = _norm(facts, build, node, a.input, "layer_norm", (a.weight, a.bias), a.eps)
    return [made, None, None] if "native" in str(node.target) else made


def _norm(
    facts: Facts, build: Builder, node: fx.Node, source: fx.Node, kind: str, weights: Sequence[Any], eps: float
) -> Value:
    """qcompile::rms_norm or layer_norm over the last dimension of `source`, with `weights` (nodes or None)."""
    value = facts.require(source, f"norm {node}")
    if value.base is None or value.dims[-1] != "F":
        raise unsupported(node, "normalizes another dimension than the features of a token")
    unweighted = kind == "rms_norm" and not any(weights)
    if unweighted and not value.is_plain() and (made := _before_rotation(facts, build, node, value, eps)) is not None:
        return made
    read = [None if w is None else build.vector(w) for w in weights]
    return identity(build.call(kind, build.emit(value, value.sizes, node), *read, float(eps)), value.dims, value.sizes)


def _before_rotation(facts: Facts, build: Builder, node: fx.Node, value: Value, eps: float) -> Value | None:
    """An rms_norm without weight of rotated heads. Rotation keeps the norm, so it is the rotation of the norm."""
    if value.base is None or len(value.sizes) not in (1, 2):
        return None
    shape = (1, *value.sizes)[-2:]
    rotation = rotation_of(value.terms.reshape(len(value.terms), *shape), facts.longest)
    if rotation is None or rotation.scaling != 1.0:
        return None
    source = rotation.source
    x = build.emit(Value(value.base, value.dims, values.make_terms(shape, source)), shape, node)
    made = build.call("rms_norm", x, None, float(eps))
    place = np.full(int(source.max()) + 1, -1)
    place[source.ravel()] = np.arange(source.size)
    terms = value.terms.copy()
    terms["index"] = np.where(terms["index"] >= 0, place[terms["index"]], -1)
    return Value(made, value.dims, terms)


# ---- norms written in elementwise operators ------------------------------------------------------------


def product_norm(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """x * rsqrt(mean(x²) + eps), with or without the mean subtracted."""
    for x, factor in both_orders(node):
        spread = _inverse_root(facts, factor)
        if spread is not None:
            return _written_norm(facts, build, node, x, *spread)
    return None


def quotient_norm(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """x / sqrt(mean(x²) + eps), with or without the mean subtracted."""
    if getattr(a, "rounding_mode", None) is not None:
        return None
    x, divisor = strip(node.args[0]), strip(node.args[1])
    spread = _root(facts, divisor)
    return None if spread is None else _written_norm(facts, build, node, x, *spread)


def _written_norm(facts: Facts, build: Builder, node: fx.Node, x: fx.Node, moment: Any, eps: float) -> Known:
    """x divided by sqrt(`moment` + eps), if the moment is that of x."""
    squared = _mean_of_square(moment)
    if squared is x and isinstance(facts.known.get(x), Value):
        return _norm(facts, build, node, x, "rms_norm", (None,), eps)
    source = _centered(x)
    if source is not None and source in (_centered(squared), _variance(moment)):
        return _norm(facts, build, node, source, "layer_norm", (None, None), eps)
    return None


def _without_epsilon(facts: Facts, item: Any) -> tuple[Any, float] | None:
    """(m, eps) for m + eps."""
    if not is_call(item, "add"):
        return None
    for moment, eps in both_orders(item):
        number = facts.number(eps)
        if number is not None:
            return moment, number
    return None


def _inverse_root(facts: Facts, item: Any) -> tuple[Any, float] | None:
    """(m, eps) for 1 / sqrt(m + eps)."""
    if is_call(item, "rsqrt") or (is_call(item, "pow") and item.args[1] == -0.5):
        return _without_epsilon(facts, strip(item.args[0]))
    if is_call(item, "reciprocal"):
        return _root(facts, strip(item.args[0]))
    if is_call(item, "div") and item.args[0] == 1:
        return _root(facts, strip(item.args[1]))
    return None


def _root(facts: Facts, item: Any) -> tuple[Any, float] | None:
    """(m, eps) for sqrt(m + eps)."""
    if is_call(item, "sqrt") or (is_call(item, "pow") and item.args[1] == 0.5):
        return _without_epsilon(facts, strip(item.args[0]))
    return None


def _mean_of_square(item: Any) -> Any:
    """x for mean(x², -1), else None."""
    if not is_call(item, "mean") or not is_over_last(item):
        return None
    power = strip(item.args[0])
    if (is_call(power, "pow") and power.args[1] == 2) or is_call(power, "square"):
        return strip(power.args[0])
    if is_call(power, "mul") and strip(power.args[0]) is strip(power.args[1]):
        return strip(power.args[0])
    return None


def _centered(item: Any) -> Any:
    """x for x - mean(x), else None."""
    if not is_call(item, "sub"):
        return None
    x, mean = strip(item.args[0]), strip(item.args[1])
    return x if is_call(mean, "mean") and is_over_last(mean) and strip(mean.args[0]) is x else None


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


# ---- a norm for each head ------------------------------------------------------------------------------


def norms_of_heads(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Concatenated heads of one value that pass through separate norms: one norm with different weights per head."""
    pieces = [facts.known.get(piece) for piece in a.tensors]
    heads = [piece for piece in pieces if isinstance(piece, Value) and _is_whole_norm(piece)]
    dim = (a.dim or 0) % len(node.meta["val"].shape)
    if len(heads) < 2 or len(heads) != len(pieces) or heads[0].dims[dim] not in ("", "F"):
        return None
    norms: list[Any] = [piece.base for piece in heads]
    parts = [_columns(ops.operand(norm, "x")) for norm in norms]
    source, start, _ = parts[0]
    size = heads[0].sizes[-1]
    in_order = all(part == (source, start + i * size, start + (i + 1) * size) for i, part in enumerate(parts))
    like = {(norm.target, norm.args[-1], *(w is None for w in norm.args[1:-1])) for norm in norms}
    if not in_order or len(like) > 1 or any(piece.count != size or piece.dims != heads[0].dims for piece in heads):
        return None
    dims = tuple("F" if place == dim else axes for place, axes in enumerate(heads[0].dims))
    sizes = [length for length, axes in zip(facts.shape(node), dims, strict=True) if axes == "F"]
    index = np.arange(start, start + len(norms) * size)
    x = build.shaped(build.select_features(source, index, node), (len(norms), size))
    weights = [
        None if norms[0].args[place] is None else build.concatenated([norm.args[place] for norm in norms])
        for place in range(1, len(norms[0].args) - 1)
    ]
    made = build.call(str(ops.name_of(norms[0].target)), x, *weights, norms[0].args[-1])
    return identity(made, dims, sizes)


def _is_whole_norm(value: Value) -> bool:
    """Whether `value` is the unchanged, complete result of one norm, with its features last."""
    if operator_of(value) not in ops.NORMS or not value.is_plain() or (value.terms["coef"] != 1).any():
        return False
    index = value.terms["index"].ravel()
    return np.array_equal(index, np.arange(len(index))) and value.dims[-1] == "F"


def _columns(x: Any) -> tuple[fx.Node, int, int]:
    """(source, start, stop): the columns of a value [.., F] that `x` holds, whether or not split into heads."""
    if ops.name_of(x.target) == "split_heads":
        x = ops.operand(x, "x")
    if ops.name_of(x.target) == "slice_features":
        return x.args
    return x, 0, int(np.prod(feature_sizes(x)))
