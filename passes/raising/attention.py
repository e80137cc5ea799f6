"""A rule for attention as one operator, and how qcompile::attention is built from queries, keys and values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx

from qcompile import ops
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.nodes import Arguments, unsupported
from qcompile.passes.raising.rotary import rotated
from qcompile.passes.raising.values import COS, ONE, Terms, Value, identity


@dataclass(frozen=True)
class Scores:
    """How attention makes scores: scale, causal `window`, `softcap` and `chunk`, each as in the operator (0: none).

    `sinks` is the node of a raised weight [H], or None; `key_bias` [H or 1, P] is added by the key's position.
    """

    scale: float
    window: int
    softcap: float = 0.0
    sinks: fx.Node | None = None
    key_bias: Tensor | None = None
    chunk: int = 0


def attention(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """qcompile::attention, as transformers' models export it."""
    sinks = None if a.sinks is None else build.weight(a.sinks)
    inputs = [facts.require(t, f"attention {node}") for t in (a.q, a.k, a.v)]
    return build_attention(facts, build, node, inputs, Scores(a.scale, a.window, a.softcap, sinks, chunk=a.chunk))


def build_attention(facts: Facts, build: Builder, node: fx.Node, inputs: Sequence[Value], scores: Scores) -> Value:
    """qcompile::attention of Values q [B, T, H, D], k and v [B, T, Hk, D].

    Raises UnsupportedError naming `node` if the heads do not fit.
    """
    shapes = [_head_shape(node, value) for value in inputs]
    factors = [_factor(value) for value in inputs[:2]]
    inputs = [*(v.divided(factor) for v, factor in zip(inputs, factors, strict=False)), inputs[2]]
    queries = shapes[0][0]
    group = math.gcd(*(_run_length(value, shape) for value, shape in zip(inputs[1:], shapes[1:], strict=True)))
    if shapes[1][0] == queries and group > 1:
        inputs = [inputs[0], *(_ungrouped(v, shape, group) for v, shape in zip(inputs[1:], shapes[1:], strict=True))]
        shapes = [shapes[0], *((heads // group, size) for heads, size in shapes[1:])]
    if shapes[1][0] != shapes[2][0] or queries % shapes[1][0] or shapes[0][1] != shapes[1][1]:
        raise unsupported(node, f"has heads {shapes[0]}, {shapes[1]}, {shapes[2]} that do not fit together")
    order = _rotary_first([v.terms.reshape(len(v.terms), *s) for v, s in zip(inputs[:2], shapes[:2], strict=True)])
    if order is not None:
        inputs = [*(_reordered(value, order) for value in inputs[:2]), inputs[2]]
    q, k, v = (_heads(facts, build, node, value, shape) for value, shape in zip(inputs, shapes, strict=True))
    q, k = _with_key_weights(build, q, k)
    bias = scores.key_bias
    extra: list[Any] = [] if bias is None else [build.constant("key_bias", bias.expand(queries, -1).contiguous())]
    extra += [*[None] * (2 - len(extra)), int(scores.chunk)] if scores.chunk else []
    scale = float(scores.scale * math.prod(factors))
    made = build.call("attention", q, k, v, scale, int(scores.window), float(scores.softcap), scores.sinks, *extra)
    return identity(made, ("B", "T", "F", "F"), (queries, shapes[2][1]))


def _head_shape(node: fx.Node, value: Value) -> tuple[int, int]:
    """(heads, head size) of a [B, T, H, D] value."""
    dims = value.dims
    if value.base is None or len(dims) != 4 or dims[:2] != ("B", "T") or dims[2] not in ("", "F") or dims[3] != "F":
        raise unsupported(node, "takes queries, keys or values that are not [batch, tokens, heads, features]")
    return (1, value.sizes[0]) if dims[2] == "" else (value.sizes[0], value.sizes[1])


def _factor(value: Value) -> float:
    """The constant factor of all of `value`, which attention includes in its scale; 1 if there is none."""
    fixed = value.terms["coef"][(value.terms["kind"] == ONE) & (value.terms["coef"] != 0)]
    coefs = fixed if fixed.size else value.terms["coef"][value.terms["kind"] == COS]
    return float(coefs[0]) if coefs.size and coefs[0] and (coefs == coefs[0]).all() else 1.0


def _run_length(value: Value, shape: tuple[int, int]) -> int:
    """The length of the runs of equal heads, as left by expanding grouped keys or values; 1 without such runs."""
    terms = value.terms.reshape(len(value.terms), *shape)
    changes = [h for h in range(1, shape[0]) if not np.array_equal(terms[:, h], terms[:, h - 1])]
    starts = [0, *changes, shape[0]]
    runs = {b - a for a, b in itertools.pairwise(starts)}
    return runs.pop() if len(runs) == 1 else 1


def _ungrouped(value: Value, shape: tuple[int, int], group: int) -> Value:
    """Every `group`-th head."""
    terms = value.terms.reshape(len(value.terms), *shape)[:, ::group]
    return Value(value.base, ("B", "T", "F", "F"), terms)


def _rotary_first(terms: Sequence[Terms]) -> NDArray[np.int64] | None:
    """The order that puts rotated features of heads first; None if they are, or if queries and keys differ.

    terms: [n, H, D] of queries and of keys. Scores are sums over features, so both may be permuted alike.
    """
    moving = [((t["kind"] == COS) & (t["coef"] != 0)).any(0) for t in terms]
    first = moving[0][0]
    if not all((heads == first).all() for heads in moving) or first[: first.sum()].all():
        return None
    return np.argsort(~first, kind="stable")


def _reordered(value: Value, order: NDArray[np.int64]) -> Value:
    """`value` with the features of each head permuted."""
    return Value(value.base, value.dims, value.terms[..., order])


def _heads(facts: Facts, build: Builder, node: fx.Node, value: Value, shape: tuple[int, int]) -> fx.Node:
    """The raised tensor [B, T, H, D] of `value`, including its rotary embedding."""
    if value.is_plain():
        return build.emit(value, shape, node)
    made = rotated(facts, build, node, value, shape)
    if made is None:
        raise unsupported(node, "transforms its queries or keys in a way that is no rotary embedding")
    assert made.base is not None
    return made.base


def _with_key_weights(build: Builder, q: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Move a weight that multiplies all keys to the queries, which gives the same sums over features."""
    if (of_keys := _weight_of(k)) is None:
        return q, k
    unweighted = ops.operand(k, "a")
    if (of_queries := _weight_of(q)) is None:
        return build.call("mul", q, of_keys), unweighted
    return build.call("mul", ops.operand(q, "a"), build.product(of_queries, of_keys)), unweighted


def _weight_of(heads: fx.Node) -> fx.Node | None:
    """The weight [D] that multiplies `heads` [B, T, H, D], or None."""
    weight = ops.operand(heads, "b") if ops.name_of(heads.target) == "mul" else None
    return weight if weight is not None and weight.op == "get_attr" and weight.meta["val"].dim() == 1 else None
