"""The `qcompile::` operators: schema, fake kernel and torch reference body of each, in one place.

Every stage's graph is made of these, so every stage's graph runs. Shapes are written with
B batch, T tokens, M = rows of a step (all sequences' tokens side by side), F features, H heads,
D head size, V vocabulary. Leading dimensions marked `...` are free. References favour clarity over
speed; generated kernels are tested against them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qcompile import hadamard, numerics

_DEFINED: dict[str, Any] = {}


def _op(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register `reference` as qcompile::<its name>, with `fake` giving shapes and dtypes alone."""

    def register(reference: Callable[..., Any]) -> Any:
        name = reference.__name__.rstrip("_")
        definition = torch.library.custom_op(f"qcompile::{name}", reference, mutates_args=())
        definition.register_fake(fake)
        overload = getattr(torch.ops.qcompile, name).default
        _DEFINED[name] = overload
        return overload

    return register


def op(name: str) -> Any:
    """The overload of `qcompile::name`; KeyError when there is none."""
    return _DEFINED[name]


def name_of(target: Any) -> str | None:
    """`rms_norm` for torch.ops.qcompile.rms_norm.default, None for anything that is not ours."""
    namespace = getattr(target, "namespace", None)
    return target._schema.name.split("::")[1] if namespace == "qcompile" else None


def _like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# ---- embeddings, linears, norms ---------------------------------------------------------------


@_op(lambda ids, weight: weight.new_empty(*ids.shape, weight.shape[1]))
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids int64 [...], weight [V, F] -> [..., F]."""
    return weight[ids]


@_op(lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return torch.nn.functional.linear(x, weight, bias)


@_op(lambda weight, x: weight.new_empty(weight.shape[0]))
def matvec(weight: Tensor, x: Tensor) -> Tensor:
    """weight [N, K], x [K] -> [N]: what a constant input adds to a linear, so a bias and never an activation."""
    return weight @ x


@_op(_like)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., F] over its last dimension; weight [F] or None: x / sqrt(mean(x²) + eps) * weight."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y.clone() if weight is None else y * weight


@_op(_like)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., F] over its last dimension; weight and bias [F] or None."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


# ---- elementwise ------------------------------------------------------------------------------

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@_op(_like)
def unary(x: Tensor, kind: str) -> Tensor:
    """x [...] through the function `kind`, one of UNARY."""
    return UNARY[kind](x).clone()


@_op(_like)
def scale(x: Tensor, factor: float) -> Tensor:
    """x [...] times a constant."""
    return x * factor


@_op(lambda a, b: torch.empty(torch.broadcast_shapes(a.shape, b.shape), dtype=a.dtype, device=a.device))
def add(a: Tensor, b: Tensor) -> Tensor:
    """a [..., F] + b [..., F]; b may be a weight [F]."""
    return a + b


@_op(lambda a, b: torch.empty(torch.broadcast_shapes(a.shape, b.shape), dtype=a.dtype, device=a.device))
def mul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., F] * b [..., F]; b may be a weight [F]."""
    return a * b


# ---- heads, rotary embedding, attention --------------------------------------------------------


@_op(lambda x, start, stop: x.new_empty(*x.shape[:-1], stop - start))
def slice_features(x: Tensor, start: int, stop: int) -> Tensor:
    """x [..., F] -> x[..., start:stop]."""
    return x[..., start:stop].clone()


@_op(lambda x, heads: x.new_empty(*x.shape[:-1], heads, x.shape[-1] // heads))
def split_heads(x: Tensor, heads: int) -> Tensor:
    """x [..., H*D] -> [..., H, D]."""
    return x.reshape(*x.shape[:-1], heads, -1).clone()


@_op(lambda x: x.new_empty(*x.shape[:-2], x.shape[-2] * x.shape[-1]))
def merge_heads(x: Tensor) -> Tensor:
    """x [..., H, D] -> [..., H*D]."""
    return x.flatten(-2).clone()


@_op(_like)
def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool) -> Tensor:
    """Rotary position embedding of x [..., H, D] at positions [...], inv_freq [R/2], R <= D rotated features.

    Pair i is features (i, i + R/2), or (2i, 2i + 1) when `interleaved`; it turns by the angle
    position * inv_freq[i], in float32 as Hugging Face computes it, and is multiplied by `scaling`.
    """
    angle = positions[..., None, None].to(torch.float32) * inv_freq.to(torch.float32)
    cos, sin = (angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype)
    rotary = 2 * inv_freq.shape[0]
    head, tail = x[..., :rotary], x[..., rotary:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    c, d = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((c, d), -1).flatten(-2) if interleaved else torch.cat((c, d), -1)
    return torch.cat((turned, tail), -1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """q [..., Q, H, D], k and v [..., S, Hk, D], mask bool broadcastable to [..., 1, Q, S] -> [..., Q, H, D]."""
    groups = q.shape[-2] // k.shape[-2]
    k, v = (t.repeat_interleave(groups, -2).transpose(-2, -3) for t in (k, v))
    scores = q.transpose(-2, -3) @ k.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[-2]]
    return (weights @ v).transpose(-2, -3).contiguous()


def _visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Causal mask [..., Q, S] from positions query [..., Q] and key [..., S]; window 0 means unlimited."""
    distance = query[..., :, None] - key[..., None, :]
    seen = distance >= 0
    return seen & (distance < window) if window else seen


@_op(lambda q, k, v, scale, window=0, softcap=0.0, sinks=None: q.new_empty(*q.shape[:-1], v.shape[-1]))
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention: q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, Dv] -> [B, T, H, Dv].

    Query head h reads key head h // (H / Hk). `window` > 0 hides keys `window` or more tokens back;
    `softcap` > 0 bounds scores as softcap * tanh(score / softcap); sinks [H] are extra scores that
    take part in the softmax's sum alone.
    """
    place = torch.arange(q.shape[1], device=q.device)
    return _attend(q, k, v, _visible(place, place, window), scale, softcap, sinks)


# ---- changes of basis, on weights ----------------------------------------------------------------


@_op(lambda w, signs, axis: torch.empty_like(w))
def rotate(w: Tensor, signs: Tensor, axis: int) -> Tensor:
    """w with `axis` cut into blocks of len(signs), each times diag(signs) H / sqrt(n): a randomized rotation."""
    blocks = w.movedim(axis, -1).unflatten(-1, (-1, signs.shape[0])) * signs.to(w.dtype)
    return hadamard.transform(blocks).flatten(-2).movedim(-1, axis).contiguous()


@_op(lambda w, factor, axis, inverse: torch.empty_like(w))
def scale_axis(w: Tensor, factor: Tensor, axis: int, inverse: bool) -> Tensor:
    """w times (with `inverse`, divided by) factor along `axis`; a shorter factor repeats, block after block."""
    size = w.shape[axis]
    full = factor.to(w.dtype).repeat(size // factor.shape[0]).reshape([-1 if d == axis else 1 for d in range(w.dim())])
    return w / full if inverse else w * full


@_op(lambda w, bias=None: w.new_empty(w.shape[0], dtype=torch.float32))
def row_size(w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Typical magnitude of each output of a linear behind a norm, from its weights: |row|_2 + |bias|, f32 [N].

    A normalized input has mean square 1, so an output's standard deviation is about the norm of its row.
    """
    size = w.float().norm(dim=1)
    return size if bias is None else size + bias.float().abs()


@_op(lambda weights: weights[0].new_empty(weights[0].shape[1], dtype=torch.float32))
def column_max(weights: list[Tensor]) -> Tensor:
    """Largest |entry| of each input column over weights [N_i, K] that read the same value, f32 [K]."""
    return torch.stack([w.float().abs().amax(0) for w in weights]).amax(0)


def _fake_key_scale(size: Tensor, head_dim: int, rotary: int, interleaved: bool, shared: bool, alpha: float) -> Tensor:
    return size.new_empty(head_dim) if shared else torch.empty_like(size)


@_op(_fake_key_scale)
def key_scale(size: Tensor, head_dim: int, rotary: int, interleaved: bool, shared: bool, alpha: float) -> Tensor:
    """SmoothAttention's factor for key channels (QServe 4.3.2): size^alpha, equal within each rotary pair.

    size [Hk * D]: magnitude of each key channel; `rotary` <= D of them turn in pairs (i, i + rotary/2), or (2i,
    2i + 1) when interleaved. The result is [Hk * D], or [D] when the heads must share one (`shared`).
    """
    heads = size.reshape(-1, head_dim).clone()
    if shared:
        heads = heads.amax(0, keepdim=True)
    turning = heads[:, :rotary].unflatten(1, (-1, 2) if interleaved else (2, -1))
    pair = 2 if interleaved else 1
    heads[:, :rotary] = turning.amax(pair, keepdim=True).expand_as(turning).flatten(1)
    factor = heads.clamp_min(torch.finfo(torch.float32).tiny) ** alpha
    return torch.where(heads > 0, factor, torch.ones_like(factor)).flatten()


@_op(lambda factor, group, head_dim: factor.new_empty(factor.shape[0] * group))
def repeat_heads(factor: Tensor, group: int, head_dim: int) -> Tensor:
    """[Hk * D] -> [Hk * group * D]: each KV head's block once for every query head that reads it."""
    return factor.reshape(-1, head_dim).repeat_interleave(group, 0).flatten()


@_op(lambda factor, group, head_dim: factor.new_empty(factor.shape[0] // group))
def max_heads(factor: Tensor, group: int, head_dim: int) -> Tensor:
    """[Hk * group * D] -> [Hk * D]: the largest over the query heads of each KV head."""
    return factor.reshape(-1, group, head_dim).amax(1).flatten()


@_op(lambda weight_max, alpha, activation_max=None: torch.empty_like(weight_max))
def smooth_factor(weight_max: Tensor, alpha: float, activation_max: Tensor | None = None) -> Tensor:
    """What input channels are divided by (SmoothQuant, eq. 4): activation_max^alpha / weight_max^(1 - alpha), [K].

    Scaled to a geometric mean of 1; channels with nothing in them keep 1. Without activation_max alpha must be 0.
    """
    factor = weight_max.clamp_min(torch.finfo(torch.float32).tiny) ** (alpha - 1)
    if activation_max is not None:
        factor = factor * activation_max.clamp_min(torch.finfo(torch.float32).tiny) ** alpha
    alive = weight_max > 0 if activation_max is None else (weight_max > 0) & (activation_max > 0)
    mean = factor[alive].double().log().mean().exp().float() if alive.any() else torch.tensor(1.0)
    return torch.where(alive, factor / mean, torch.ones_like(factor))


# ---- quantized linears --------------------------------------------------------------------------


@_op(lambda weights: weights[0].new_empty(sum(w.shape[0] for w in weights), *weights[0].shape[1:]))
def concat_rows(weights: list[Tensor]) -> Tensor:
    """Weights [N_i, K] (or biases [N_i]) -> [sum N_i, K], for linears that share their input."""
    return torch.cat(weights)


@_op(lambda a, b, block: a.new_empty(2 * (-(-a.shape[0] // block)) * block, *a.shape[1:]))
def interleave_rows(a: Tensor, b: Tensor, block: int) -> Tensor:
    """a and b [N, ...] -> their blocks of `block` rows alternating, a's first; a last short block is zero-filled.

    So one thread's run of output rows holds a gate and its up projection together.
    """
    short = -a.shape[0] % block
    pair = [torch.cat((t, t.new_zeros(short, *t.shape[1:]))).unflatten(0, (-1, block)) for t in (a, b)]
    return torch.stack(pair, 1).flatten(0, 2).contiguous()


@_op(
    lambda w, format: [
        torch.empty(s, dtype=d, device=w.device) for s, d in numerics.weight_parts(tuple(w.shape), format)
    ]
)
def quantize_weight(w: Tensor, format: str) -> list[Tensor]:
    """w [N, K] -> the parts of `format` in the order of numerics.FORMATS[format].roles."""
    return [part.clone() for part in numerics.quantize_weight(w, format)]


def _fake_activation(x: Tensor, dtype: str, group: int) -> list[Tensor]:
    if dtype != "int8":
        return [x.new_empty(x.shape, dtype=numerics.ACTIVATION_DTYPES[dtype])]
    groups = -(-x.shape[-1] // group)
    return [
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        x.new_empty((*x.shape[:-1], groups), dtype=torch.int32),
    ]


@_op(_fake_activation)
def quantize_activation(x: Tensor, dtype: str, group: int) -> list[Tensor]:
    """x [..., K] -> [x in bf16 or f32], or for int8 [codes int8, scale f32 [...], sums int32 [..., K/group]].

    Per token: scale = max |x| / 127. `sums` are of the codes in each group of inputs: what a weight's
    zero point is multiplied with.
    """
    return [part.clone() for part in numerics.quantize_activation(x, dtype, group)]


GATED = {"silu_mul": "silu"}
GATE_BLOCK = 16


def _fake_gemm(
    x: list[Tensor],
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    epilogue: str,
    width: int,
) -> Tensor:
    return x[0].new_empty((*x[0].shape[:-1], width), dtype=torch.float32)


@_op(_fake_gemm)
def gemm(
    x: list[Tensor],
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    epilogue: str,
    width: int,
) -> Tensor:
    """A linear on a quantized activation [..., K] and a quantized weight [N, K] -> f32 [..., width].

    Epilogues: `store`; `add` (residual + y); `silu_mul`, whose weight has gate and up rows interleaved in
    blocks of GATE_BLOCK and whose result is silu(gate) * up.
    """
    y = torch.nn.functional.linear(
        numerics.dequantize_activation(x), numerics.dequantize_weight(weight, format, x[0].shape[-1]), bias
    )
    if epilogue in GATED:
        gate, up = y.unflatten(-1, (-1, 2, GATE_BLOCK)).unbind(-2)
        y = UNARY[GATED[epilogue]](gate.flatten(-2)) * up.flatten(-2)
    y = y[..., :width]
    return y.contiguous() if residual is None else residual + y


@_op(lambda x, gate_up, bias, kind, width: x.new_empty(*x.shape[:-1], width))
def gated_linear(x: Tensor, gate_up: Tensor, bias: Tensor | None, kind: str, width: int) -> Tensor:
    """x [..., K], gate_up [2N', K] interleaved in blocks of GATE_BLOCK rows -> kind(gate) * up, [..., width]."""
    gate, up = torch.nn.functional.linear(x, gate_up, bias).unflatten(-1, (-1, 2, GATE_BLOCK)).unbind(-2)
    return (UNARY[kind](gate.flatten(-2)) * up.flatten(-2))[..., :width].contiguous()


def _fake_norm_quantize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, dtype: str, group: int
) -> list[Tensor]:
    return _fake_activation(x, dtype, group)


@_op(_fake_norm_quantize)
def norm_quantize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, dtype: str, group: int
) -> list[Tensor]:
    """rms_norm or layer_norm (`kind` rms, layer) followed by quantize_activation, in one pass over x [..., F]."""
    y = rms_norm(x, weight, eps) if kind == "rms" else layer_norm(x, weight, bias, eps)
    return numerics.quantize_activation(y, dtype, group)


# ---- the step's view: rows of many sequences over a paged cache -----------------------------------
#
# `cache` here is f32 [layers, 2, slots, Hk, D]: what the paged cache reads back, quantization included.


def _slots(positions: Tensor, sequence: Tensor, block_table: Tensor) -> Tensor:
    """Cache slot of each row [M], from its position and its sequence's pages [S, pages]."""
    page = block_table[sequence, positions // numerics.PAGE_TOKENS]
    return (page * numerics.PAGE_TOKENS + positions % numerics.PAGE_TOKENS).long()


@_op(lambda k, v, positions, sequence, block_table, cache, layer, format: torch.empty_like(cache))
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
    """k, v [M, Hk, D] written through the cache format at their rows' slots; returns the new cache."""
    slots = _slots(positions, sequence, block_table)
    cache = cache.clone()
    for index, value in enumerate((k, v)):
        cache[layer, index, slots] = numerics.round_trip_kv(value, format).to(cache.dtype)
    return cache


@_op(lambda q, positions, sequence, block_table, cache, layer, scale, window, softcap: torch.empty_like(q))
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
) -> Tensor:
    """q [M, H, D] at positions [M] of sequences [M] over the cache's pages [S, pages] -> [M, H, D]."""
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        seen = torch.arange(int(positions[row]) + 1)
        slots = _slots(seen, sequence[row].expand(len(seen)), block_table)
        mask = _visible(positions[row : row + 1], seen, window)
        k, v = cache[layer, 0, slots].to(q.dtype), cache[layer, 1, slots].to(q.dtype)
        out[row] = _attend(q[row : row + 1], k, v, mask, scale, softcap)[0]
    return out


def _fake_rope_append(qkv: Tensor, inv_freq: Tensor | None, *args: Any, **kwargs: Any) -> list[Tensor]:
    cache = kwargs.get("cache", args[3] if len(args) > 3 else None)
    assert cache is not None
    return [torch.empty_like(qkv), torch.empty_like(cache)]


@_op(_fake_rope_append)
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
) -> list[Tensor]:
    """Rotates q and k inside qkv [M, ...] (offsets of q, k, v in features) and appends k, v to the cache.

    Returns [qkv with q and k rotated, new cache].
    """
    qkv = qkv.clone()
    views = []
    for offset, count in zip(offsets, (heads, kv_heads, kv_heads), strict=True):
        views.append(qkv[:, offset : offset + count * head_dim].unflatten(-1, (count, head_dim)))
    if inv_freq is not None:
        for view in views[:2]:
            view.copy_(rope(view.contiguous(), positions, inv_freq, scaling, interleaved))
    k, v = (view.contiguous() for view in views[1:])
    return [qkv, kv_append(k, v, positions, sequence, block_table, cache, layer, format)]


@_op(lambda x, rows: x.new_empty(rows.shape[0], *x.shape[1:]))
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [M, F] -> x[rows], [R, F]: the rows whose logits are wanted."""
    return x[rows.long()]
