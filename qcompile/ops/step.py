"""Operators of a step: rows of many sequences over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile.formats.kv import PAGE_TOKENS, kv_format, read_hier
from qcompile.ops.model import attend, key_offsets, layer_norm, rms_norm, visible, whole_keys
from qcompile.ops.registry import define, like, reference

# ---- a step: rows of many sequences over a paged cache ---------------------------------------------
#
# `cache` is f32 [layers, 2, slots, Hk, D] here: the values that the paged cache reads back, after quantization. Hk and
# D are the largest of all layers: a layer with fewer heads or features uses the first ones.


def _slots(positions: Tensor, sequence: Tensor, block_table: Tensor) -> Tensor:
    """Cache slot of each row [M], from its position and its sequence's pages [S, pages]."""
    page = block_table[sequence, positions // PAGE_TOKENS]
    return (page * PAGE_TOKENS + positions % PAGE_TOKENS).long()


@define(lambda k, v, positions, sequence, block_table, cache, layer, format: torch.empty_like(cache), since="cache")
def kv_append(
    k: Tensor,
    v: Tensor | None,
    positions: Tensor,
    sequence: Tensor,
    block_table: Tensor,
    cache: Tensor,
    layer: int,
    format: str,
) -> Tensor:
    """Write k, v [M, Hk, D] to their rows' slots with the cache's rounding; returns the new cache.

    Without v only keys are written: the values are features of the keys.
    """
    slots = _slots(positions, sequence, block_table)
    cache = cache.clone()
    rounds = kv_format(format)
    if v is None:
        cache[layer, 0, :, : k.shape[1], : k.shape[2]][slots] = rounds.round_trip_latent(k).to(cache.dtype)
        return cache
    for index, value in enumerate((k, v)):
        place = cache[layer, index, :, : value.shape[1], : value.shape[2]]
        place[slots] = rounds.round_trip(value).to(cache.dtype)
    return cache


def _fake_kv_attention(q: Tensor, *given: Any, value: list[int] | None = None, **_: Any) -> Tensor:
    value = given[12] if len(given) > 12 else value
    return torch.empty_like(q) if value is None else q.new_empty(*q.shape[:-1], value[1] - value[0])


@define(_fake_kv_attention, since="cache")
def kv_attention(  # parameters: the schema of an operator is flat
    q: Tensor,
    positions: Tensor,
    sequence: Tensor,
    block_table: Tensor,
    cache: Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
    bits: int = 0,
    center: Tensor | None = None,
    value: list[int] | None = None,
    chunk: int = 0,
    kv_heads: int = 0,
) -> Tensor:
    """q [M, H, D] at positions [M] of sequences [M] over the cache's pages [S, pages] -> [M, H, D].

    The layer has `kv_heads` KV heads; 0: as many as the cache. `window` and `chunk` are as in attention. With `bits`,
    older keys and values are read as from a hierarchical cache (formats/kv.py). `center` [Hk * D] was subtracted from
    the keys when they were written, and is added back for their scores. With `value` [start, stop] the values are the
    features start:stop of the keys in the cache, and the result is [M, H, stop - start].
    """
    out = q.new_empty(*q.shape[:-1], q.shape[-1] if value is None else value[1] - value[0])
    cache = cache[..., : kv_heads or cache.shape[-2], : q.shape[-1]]
    for row in range(q.shape[0]):
        seen = torch.arange(int(positions[row]) + 1)
        slots = _slots(seen, sequence[row].expand(len(seen)), block_table)
        mask = visible(positions[row : row + 1], seen, window, chunk)
        k = cache[layer, 0, slots].to(q.dtype)
        v = cache[layer, 1, slots].to(q.dtype) if value is None else k[..., slice(*value)]
        if bits:
            k, v = read_hier(k, v, bits)
        bias = key_offsets(key_bias, positions[row : row + 1].long(), seen)
        out[row] = attend(q[row : row + 1], whole_keys(k, center), v, mask, scale, softcap, sinks, bias)[0]
    return out


@dataclass(frozen=True)
class HeadLayout:
    """Where a row holds its heads: first features of q, k and v (`offsets`), numbers of heads, features of a head.

    Without an offset of v there are no values.
    """

    offsets: list[int]
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class HeadTransform:
    """What happens to q and k before attention, in this order; v stays as it is.

    q and k are rotated as by rope (`positions`, `inv_freq`, `scaling`, `interleaved`; not at all without inv_freq). q
    is multiplied by the row of `query_table` [P, 1] at its position and by `query_weight` [D]. `center` [Hk * D] is
    subtracted from k. With `block`, rotate_heads multiplies both by a Hadamard matrix.
    """

    positions: Tensor
    inv_freq: Tensor | None
    scaling: float
    interleaved: bool
    center: Tensor | None = None
    block: int = 0
    query_table: Tensor | None = None
    query_weight: Tensor | None = None

    def of_queries(self, q: Tensor) -> Tensor:
        """q [M, H, D] transformed."""
        q = self._rotated(q)
        if self.query_table is not None:
            q = q * self.query_table[self.positions.long()][..., None].to(q.dtype)
        if self.query_weight is not None:
            q = q * self.query_weight.to(q.dtype)
        return reference("rotate_heads")(q, None, self.block) if self.block else q

    def of_keys(self, k: Tensor) -> Tensor:
        """k [M, Hk, D] transformed."""
        k = self._rotated(k)
        plain = not self.block and self.center is None
        return k if plain else reference("rotate_heads")(k, self.center, self.block)

    def _rotated(self, x: Tensor) -> Tensor:
        if self.inv_freq is None:
            return x
        return reference("rope")(x, self.positions, self.inv_freq, self.scaling, self.interleaved)


def transform_heads(qkv: Tensor, layout: HeadLayout, transform: HeadTransform) -> tuple[Tensor, Tensor, Tensor | None]:
    """qkv [M, ...] with q and k transformed in place, and the transformed k and the v (if any) [M, Hk, D] in it."""
    functions = (transform.of_queries, transform.of_keys, lambda v: v)
    parts: list[Tensor] = []
    for offset, count, function in zip(
        layout.offsets, (layout.heads, layout.kv_heads, layout.kv_heads), functions, strict=False
    ):
        end = offset + count * layout.head_dim
        part = function(qkv[:, offset:end].reshape(-1, count, layout.head_dim))
        qkv = qkv.slice_scatter(part.flatten(1), 1, offset, end)
        parts.append(part.contiguous())
    return qkv, parts[1], parts[2] if len(parts) > 2 else None


def _fake_rope_append(qkv: Tensor, inv_freq: Tensor | None, *args: Any, **kwargs: Any) -> list[Tensor]:
    cache = kwargs.get("cache", args[3] if len(args) > 3 else None)
    assert cache is not None
    return [torch.empty_like(qkv), torch.empty_like(cache)]


@define(_fake_rope_append, since="cache")
def rope_append(  # parameters: the schema of an operator is flat
    qkv: Tensor,
    inv_freq: Tensor | None,
    positions: Tensor,
    sequence: Tensor,
    block_table: Tensor,
    cache: Tensor,
    offsets: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    scaling: float,
    interleaved: bool,
    layer: int,
    format: str,
    center: Tensor | None = None,
    block: int = 0,
    query_table: Tensor | None = None,
    query_weight: Tensor | None = None,
) -> list[Tensor]:
    """Rotate q and k inside qkv [M, ...] (`offsets` of q, k, v in features) and append k, v to the cache.

    Without an offset of v only k is appended.
    Rotated q is multiplied by the row of `query_table` [P, 1] at its position and by `query_weight` [D]. Then
    rotate_heads subtracts `center` [Hk * D] from k and, with `block`, rotates both. Returns [qkv with q and k rotated,
    new cache].
    """
    layout = HeadLayout(offsets, heads, kv_heads, head_dim)
    transform = HeadTransform(positions, inv_freq, scaling, interleaved, center, block, query_table, query_weight)
    qkv, k, v = transform_heads(qkv, layout, transform)
    return [qkv, kv_append(k, v, positions, sequence, block_table, cache, layer, format)]


@define(like, since="cache")
def rope_heads(  # parameters: the schema of an operator is flat
    x: Tensor,
    inv_freq: Tensor | None,
    positions: Tensor,
    offset: int,
    heads: int,
    head_dim: int,
    scaling: float,
    interleaved: bool,
    center: Tensor | None = None,
    block: int = 0,
    table: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """x [M, F] with `heads` heads from column `offset` on changed as rope_append changes queries.

    After the factors `table` [P, 1] and `weight` [D], `center` [heads * D] is subtracted, as from keys.
    """
    transform = HeadTransform(positions, inv_freq, scaling, interleaved, None, 0, table, weight)
    end = offset + heads * head_dim
    part = transform.of_queries(x[:, offset:end].reshape(-1, heads, head_dim))
    part = reference("rotate_heads")(part, center, block)
    return x.slice_scatter(part.flatten(1), 1, offset, end)


@define(lambda x, rows: x.new_empty(rows.shape[0], *x.shape[1:]), since="cache")
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [M, F] -> x[rows], [R, F]: the rows with requested logits."""
    return x[rows.long()]


@define(like, since="cache")
def norm_heads(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, offset: int, heads: int, width: int
) -> Tensor:
    """x [M, F] with each of `heads` blocks of `width` columns from `offset` normalized; other columns are unchanged.

    weight and bias are [width], [heads * width] if they differ between blocks, or None; `kind` is rms or layer.
    """
    end = offset + heads * width
    view = x[:, offset:end].unflatten(-1, (heads, width)).contiguous()
    y = rms_norm(view, weight, eps) if kind == "rms" else layer_norm(view, weight, bias, eps)
    return x.slice_scatter(y.flatten(1), 1, offset, end)
