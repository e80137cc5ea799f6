"""Operators of a step: rows of many sequences over a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcompile.formats.kv import PAGE_TOKENS, kv_format, read_hier
from qcompile.ops.model import attend, key_offsets, layer_norm, rms_norm, visible, whole_keys
from qcompile.ops.registry import define, like, reference

# ---- a step: rows of many sequences over a paged cache ---------------------------------------------
#
# `cache` is f32 [layers, 2, slots, Hk, D] here: the values that the paged cache reads back, after quantization.


def _slots(positions: Tensor, sequence: Tensor, block_table: Tensor) -> Tensor:
    """Cache slot of each row [M], from its position and its sequence's pages [S, pages]."""
    page = block_table[sequence, positions // PAGE_TOKENS]
    return (page * PAGE_TOKENS + positions % PAGE_TOKENS).long()


@define(lambda k, v, positions, sequence, block_table, cache, layer, format: torch.empty_like(cache))
def kv_append(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    sequence: Tensor,
    block_table: Tensor,
    cache: Tensor,
    layer: int,
    format: str,
) -> Tensor:
    """Write k, v [M, Hk, D] to their rows' slots with the cache's rounding; returns the new cache."""
    slots = _slots(positions, sequence, block_table)
    cache = cache.clone()
    for index, value in enumerate((k, v)):
        cache[layer, index, slots] = kv_format(format).round_trip(value).to(cache.dtype)
    return cache


def _fake_kv_attention(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(q)


@define(_fake_kv_attention)
def kv_attention(
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
) -> Tensor:
    """q [M, H, D] at positions [M] of sequences [M] over the cache's pages [S, pages] -> [M, H, D].

    With `bits`, older keys and values are read as from a hierarchical cache (formats/kv.py). `center` [Hk * D] was
    subtracted from the keys when they were written, and is added back for their scores.
    """
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        seen = torch.arange(int(positions[row]) + 1)
        slots = _slots(seen, sequence[row].expand(len(seen)), block_table)
        mask = visible(positions[row : row + 1], seen, window)
        k, v = cache[layer, 0, slots].to(q.dtype), cache[layer, 1, slots].to(q.dtype)
        if bits:
            k, v = read_hier(k, v, bits)
        bias = key_offsets(key_bias, positions[row : row + 1].long(), seen)
        out[row] = attend(q[row : row + 1], whole_keys(k, center), v, mask, scale, softcap, sinks, bias)[0]
    return out


def turn_heads(
    qkv: Tensor,
    turn: tuple[Tensor, Tensor | None, float, bool],
    offsets: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    center: Tensor | None,
    block: int,
    query_table: Tensor | None = None,
    query_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [M, ...] with q and k rotated in place, and the k and v [M, Hk, D] in it.

    `turn` are rope's arguments after its values (without inv_freq nothing is rotated). q is then multiplied by the row
    of `query_table` [P, 1] at its position and by `query_weight` [D]. Then rotate_heads subtracts `center` from k, and
    rotates both if `block` is not 0.
    """
    parts: list[Tensor] = []
    for offset, count, less in zip(offsets, (heads, kv_heads, kv_heads), (None, center, None), strict=True):
        part = qkv[:, offset : offset + count * head_dim].reshape(-1, count, head_dim)
        if len(parts) < 2:  # not v
            if turn[1] is not None:
                part = reference("rope")(part, *turn)
            if not parts:  # q
                part = part if query_table is None else part * query_table[turn[0].long()][..., None].to(part.dtype)
                part = part if query_weight is None else part * query_weight.to(part.dtype)
            if block or less is not None:
                part = reference("rotate_heads")(part, less, block)
            qkv = qkv.slice_scatter(part.flatten(1), 1, offset, offset + count * head_dim)
        parts.append(part.contiguous())
    return qkv, parts[1], parts[2]


def _fake_rope_append(qkv: Tensor, inv_freq: Tensor | None, *args: Any, **kwargs: Any) -> list[Tensor]:
    cache = kwargs.get("cache", args[3] if len(args) > 3 else None)
    assert cache is not None
    return [torch.empty_like(qkv), torch.empty_like(cache)]


@define(_fake_rope_append)
def rope_append(
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

    Rotated q is multiplied by the row of `query_table` [P, 1] at its position and by `query_weight` [D]. Then
    rotate_heads subtracts `center` [Hk * D] from k and, with `block`, rotates both. Returns [qkv with q and k rotated,
    new cache].
    """
    turn = positions, inv_freq, scaling, interleaved
    qkv, k, v = turn_heads(qkv, turn, offsets, heads, kv_heads, head_dim, center, block, query_table, query_weight)
    return [qkv, kv_append(k, v, positions, sequence, block_table, cache, layer, format)]


@define(lambda x, rows: x.new_empty(rows.shape[0], *x.shape[1:]))
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [M, F] -> x[rows], [R, F]: the rows whose logits are requested."""
    return x[rows.long()]


@define(like)
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
