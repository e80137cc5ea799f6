"""Build attention: heads, rotary embeddings, grouped keys and values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.raiser import Raiser
from qcompile.passes.raising.tables import same_turning
from qcompile.passes.raising.values import COS, ONE, SIN, Terms, Value, identity


def build(
    r: Raiser,
    node: fx.Node,
    inputs: Sequence[Value],
    scale: float,
    window: int,
    softcap: float,
    sinks: fx.Node | None,
    key_bias: torch.Tensor | None = None,
) -> Value:
    """qcompile::attention of Values q [B, T, H, D], k and v [B, T, Hk, D].

    `key_bias` [H or 1, P] is added to scores by the key's position. Raises UnsupportedError if the heads do not fit.
    """
    shapes = [_head_shape(r, node, value) for value in inputs]
    factors = [_factor(value) for value in inputs[:2]]
    inputs = [*(v.scaled(1 / factor) for v, factor in zip(inputs, factors, strict=False)), inputs[2]]
    queries = shapes[0][0]
    group = math.gcd(*(_run_length(value, shape) for value, shape in zip(inputs[1:], shapes[1:], strict=True)))
    if shapes[1][0] == queries and group > 1:
        inputs = [inputs[0], *(_ungrouped(v, shape, group) for v, shape in zip(inputs[1:], shapes[1:], strict=True))]
        shapes = [shapes[0], *((heads // group, size) for heads, size in shapes[1:])]
    if shapes[1][0] != shapes[2][0] or queries % shapes[1][0] or shapes[0][1] != shapes[1][1]:
        raise r.unsupported(node, f"has heads {shapes[0]}, {shapes[1]}, {shapes[2]} that do not fit together")
    order = _rotary_first([v.terms.reshape(len(v.terms), *s) for v, s in zip(inputs[:2], shapes[:2], strict=True)])
    if order is not None:
        inputs = [*(_reordered(value, order) for value in inputs[:2]), inputs[2]]
    q, k, v = (_heads(r, node, value, shape) for value, shape in zip(inputs, shapes, strict=True))
    q, k = _with_key_weights(r, q, k)
    extra = [] if key_bias is None else [r.constant("key_bias", key_bias.expand(queries, -1).contiguous())]
    made = r.call("attention", q, k, v, float(scale * math.prod(factors)), int(window), float(softcap), sinks, *extra)
    return identity(made, ("B", "T", "F", "F"), (queries, shapes[2][1]))


def _head_shape(r: Raiser, node: fx.Node, value: Value) -> tuple[int, int]:
    """(heads, head size) of a [B, T, H, D] value."""
    dims = value.dims
    if value.base is None or len(dims) != 4 or dims[:2] != ("B", "T") or dims[2] not in ("", "F") or dims[3] != "F":
        raise r.unsupported(node, "takes queries, keys or values that are not [batch, tokens, heads, features]")
    return (1, value.sizes[0]) if dims[2] == "" else (value.sizes[0], value.sizes[1])


def _factor(value: Value) -> float:
    """The constant factor of all of `value`, which attention takes into its scale; 1 if there is none."""
    fixed = value.terms["coef"][(value.terms["kind"] == ONE) & (value.terms["coef"] != 0)]
    found = fixed if fixed.size else value.terms["coef"][value.terms["kind"] == COS]
    return float(found[0]) if found.size and found[0] and (found == found[0]).all() else 1.0


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


def _rotary_first(terms: Sequence[Terms]) -> np.ndarray[Any, Any] | None:
    """The order that puts rotated features of heads first; None if they are, or if queries and keys differ.

    terms: [n, H, D] of queries and of keys. Scores are sums over features, so both may be permuted alike.
    """
    turned = [((t["kind"] == COS) & (t["coef"] != 0)).any(0) for t in terms]
    first = turned[0][0]
    if not all((heads == first).all() for heads in turned) or first[: first.sum()].all():
        return None
    return np.argsort(~first, kind="stable")


def _reordered(value: Value, order: np.ndarray[Any, Any]) -> Value:
    """`value` with the features of each head permuted."""
    return Value(value.base, value.dims, value.terms[..., order])


def _heads(r: Raiser, node: fx.Node, value: Value, shape: tuple[int, int]) -> fx.Node:
    """The raised tensor [B, T, H, D] of `value`, including its rotary embedding."""
    if value.is_plain():
        return r.emit(value, shape, node)
    made = turned(r, node, value, shape)
    if made is None:
        raise r.unsupported(node, "rotates its queries or keys in a way that is no rotary embedding")
    assert made.base is not None
    return made.base


def turned(r: Raiser, node: fx.Node, value: Value, shape: tuple[int, int] | None = None) -> Value | None:
    """A Value over all of a qcompile::rope [B, T, H, D] if `value` holds rotated heads (of `shape`, if known)."""
    heads, head_dim = shape or (1, 1, *value.sizes)[-2:]
    if value.base is None or heads * head_dim != value.count:
        return None
    terms = value.terms.reshape(len(value.terms), heads, head_dim)
    found = rotation(terms, r.source.info.max_position)
    if found is None:
        return None
    source, inv_freq, scaling, interleaved = found
    plain = Value(value.base, value.dims, values.make_terms((heads, head_dim), source))
    made = r.emit(plain, (heads, head_dim), node)
    frequencies = r.constant("inv_freq", torch.from_numpy(inv_freq.astype(np.float32)))
    made = r.call("rope", made, r.positions, frequencies, scaling, interleaved)
    return identity(made, value.dims, value.sizes)


def _with_key_weights(r: Raiser, q: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Move a weight that multiplies all keys to the queries, which gives the same sums over features."""
    if (of_keys := _weight_of(r, k)) is None:
        return q, k
    unweighed: Any = k.args[0]
    if (of_queries := _weight_of(r, q)) is None:
        return r.call("mul", q, of_keys), unweighed
    first, second = str(of_queries.target), str(of_keys.target)
    name, store = f"{first}.times.{second}", r.out.weights
    if name not in store:
        shape = of_keys.meta["val"].shape
        store.add(name, shape, torch.float32, lambda: store[first].float() * store[second].float())
    return r.call("mul", q.args[0], r.read(name)), unweighed


def _weight_of(r: Raiser, heads: Any) -> fx.Node | None:
    """The weight [D] that multiplies `heads` [B, T, H, D], or None."""
    weight = heads.args[1] if ops.name_of(heads.target) == "mul" else None
    return weight if weight is not None and weight.op == "get_attr" and weight.meta["val"].dim() == 1 else None


def rotation(terms: Terms, longest: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float, bool] | None:
    """(source index [H, D], inv_freq [R/2], scaling, interleaved) if `terms` [n, H, D] are a rotary embedding."""
    own, other = _by_kind(terms, (ONE, COS)), _by_kind(terms, (SIN,))
    if own is None or other is None or (own["coef"] == 0).any() or (own["index"] < 0).any():
        return None
    turned = own["kind"] == COS
    rotary = int(turned[0].sum())
    if rotary == 0 or rotary % 2 or not turned[:, :rotary].all() or turned[:, rotary:].any():
        return None
    turning = own["freq"][0, :rotary], other["freq"][0, :rotary]
    if not (turning[0] == turning[1]).all() and same_turning(*turning, longest):
        own["freq"] = np.where(turned, other["freq"], own["freq"])
    scaling = float(own["coef"][0, 0])
    if not (own["coef"][:, :rotary] == scaling).all() or not (own["coef"][:, rotary:] == 1).all():
        return None
    for interleaved, sense in itertools.product((False, True), (1.0, -1.0)):
        inv_freq = own["freq"][0, :rotary:2] if interleaved else own["freq"][0, : rotary // 2]
        if _is_rotary(own, other, inv_freq, scaling, interleaved, sense):
            return own["index"], sense * inv_freq, scaling, interleaved
    return None


def _by_kind(terms: Terms, kinds: tuple[int, ...]) -> Terms | None:
    """The single term of each element with a kind in `kinds`, zero if it has none; None if one has two."""
    picked = np.isin(terms["kind"], kinds) & (terms["coef"] != 0)
    if (picked.sum(0) > 1).any():
        return None
    found = np.take_along_axis(terms, picked.argmax(0)[None], 0)[0]
    return np.where(picked.any(0), found, np.zeros((), terms.dtype))


def _is_rotary(
    own: Terms, other: Terms, inv_freq: np.ndarray[Any, Any], scaling: float, interleaved: bool, sense: float
) -> bool:
    """Whether feature i is cos * x[i] -+ sin * x[partner of i] as in qcompile::rope; `sense` -1 rotates backwards."""
    half = len(inv_freq)
    place = np.arange(2 * half)
    pair, second = (place // 2, place % 2) if interleaved else (place % half, place // half)
    partner = place + np.where(second == 0, 1, -1) * (1 if interleaved else half)
    sign = np.where(second == 0, -sense, sense)
    freq = inv_freq[pair]
    head = other[:, : 2 * half]
    return bool(
        (own["freq"][:, : 2 * half] == freq).all()
        and (head["freq"] == freq).all()
        and (head["index"] == own["index"][:, partner]).all()
        and (head["coef"] == sign * scaling).all()
        and not other[:, 2 * half :]["coef"].any()
    )
