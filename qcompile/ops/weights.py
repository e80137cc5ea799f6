"""Operators on weights only: they run while an artifact is built, one weight at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from qcompile.formats import hadamard, mixed
from qcompile.formats.registry import weight_format
from qcompile.ops.model import GATE_BLOCK
from qcompile.ops.registry import define


@define(lambda weight, x: weight.new_empty(weight.shape[:-1]))
def matvec(weight: Tensor, x: Tensor) -> Tensor:
    """weight [..., N, K], x [K] -> [..., N]: the contribution of a constant input, which becomes a bias."""
    return weight @ x


# ---- changes of basis ----------------------------------------------------------------------------


@define(lambda w, signs, axis: torch.empty_like(w))
def rotate(w: Tensor, signs: Tensor, axis: int) -> Tensor:
    """w with blocks of n = len(signs) along `axis`, each times diag(signs) H / sqrt(n): a randomized rotation."""
    blocks = w.movedim(axis, -1).unflatten(-1, (-1, signs.shape[0])) * signs.to(w.dtype)
    return hadamard.transform(blocks).flatten(-2).movedim(-1, axis).contiguous()


@define(lambda w, axis: torch.empty_like(w))
def center(w: Tensor, axis: int) -> Tensor:
    """w minus its mean along `axis`, so that the outputs of its linear have mean 0."""
    return w - w.mean(axis, keepdim=True)


@define(lambda w, factor, axis, inverse: torch.empty_like(w))
def scale_axis(w: Tensor, factor: Tensor, axis: int, inverse: bool) -> Tensor:
    """w times (with `inverse`: divided by) factor along `axis`; a shorter factor repeats block by block."""
    size = w.shape[axis]
    full = factor.to(w.dtype).repeat(size // factor.shape[0]).reshape([-1 if d == axis else 1 for d in range(w.dim())])
    return w / full if inverse else w * full


@define(lambda w, bias=None: w.new_empty(w.shape[0], dtype=torch.float32))
def row_size(w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Typical magnitude of each output of a linear behind a norm, from its weights: |row|_2 + |bias|, f32 [N].

    A normalized input has mean square 1, so an output's standard deviation is about the norm of its row.
    """
    size = w.float().norm(dim=1)
    return size if bias is None else size + bias.float().abs()


@define(lambda weights: weights[0].new_empty(weights[0].shape[-1], dtype=torch.float32))
def column_max(weights: list[Tensor]) -> Tensor:
    """Largest |entry| per input column over weights [..., N_i, K] that read the same value, f32 [K]."""
    return torch.stack([w.float().abs().flatten(0, -2).amax(0) for w in weights]).amax(0)


def _fake_key_scale(size: Tensor, head_dim: int, rotary: int, interleaved: bool, shared: bool, alpha: float) -> Tensor:
    return size.new_empty(head_dim) if shared else torch.empty_like(size)


@define(_fake_key_scale)
def key_scale(size: Tensor, head_dim: int, rotary: int, interleaved: bool, shared: bool, alpha: float) -> Tensor:
    """SmoothAttention's factor for key channels (QServe 4.3.2): size^alpha, equal within each rotary pair.

    size [Hk * D] is the magnitude of each key channel. The first `rotary` <= D features of a head rotate in pairs
    (i, i + rotary/2), or (2i, 2i + 1) if interleaved. The result is [Hk * D], or [D] if all heads share one (`shared`).
    """
    heads = size.abs().reshape(-1, head_dim)  # the weights of a norm may be negative
    if shared:
        heads = heads.amax(0, keepdim=True)
    turning = heads[:, :rotary].unflatten(1, (-1, 2) if interleaved else (2, -1))
    pair = 2 if interleaved else 1
    heads[:, :rotary] = turning.amax(pair, keepdim=True).expand_as(turning).flatten(1)
    factor = heads.clamp_min(torch.finfo(torch.float32).tiny) ** alpha
    return torch.where(heads > 0, factor, torch.ones_like(factor)).flatten()


@define(lambda factor, group, head_dim: factor.new_empty(factor.shape[0] * group))
def repeat_heads(factor: Tensor, group: int, head_dim: int) -> Tensor:
    """[Hk * D] -> [Hk * group * D]: each KV head's block repeated for every query head that reads it."""
    return factor.reshape(-1, head_dim).repeat_interleave(group, 0).flatten()


@define(lambda factor, group, head_dim: factor.new_empty(factor.shape[0] // group))
def max_heads(factor: Tensor, group: int, head_dim: int) -> Tensor:
    """[Hk * group * D] -> [Hk * D]: the maximum over the query heads of each KV head."""
    return factor.reshape(-1, group, head_dim).amax(1).flatten()


@define(lambda weight_max, alpha, activation_max=None: torch.empty_like(weight_max))
def smooth_factor(weight_max: Tensor, alpha: float, activation_max: Tensor | None = None) -> Tensor:
    """The divisor of input channels (SmoothQuant, eq. 4): activation_max^alpha / weight_max^(1 - alpha), [K].

    It is scaled to a geometric mean of 1; channels that are all zero get 1. The signs of activation_max are ignored.
    Without activation_max, alpha must be 0.
    """
    factor = weight_max.clamp_min(torch.finfo(torch.float32).tiny) ** (alpha - 1)
    if activation_max is not None:
        activation_max = activation_max.float().abs()
        factor = factor * activation_max.clamp_min(torch.finfo(torch.float32).tiny) ** alpha
    alive = weight_max > 0 if activation_max is None else (weight_max > 0) & (activation_max > 0)
    mean = factor[alive].double().log().mean().exp().float() if alive.any() else torch.tensor(1.0)
    return torch.where(alive, factor / mean, torch.ones_like(factor))


# ---- channel orders -------------------------------------------------------------------------------


def _by_norm(weights: list[Tensor], heads: int) -> Tensor:
    """Indices [heads, K / heads] of input columns within each head, sorted by descending norm over all weights."""
    size = torch.stack([w.double().square().sum(0) for w in weights]).sum(0).reshape(heads, -1)
    return torch.sort(size, dim=1, descending=True, stable=True).indices


@define(lambda weights: weights[0].new_empty(weights[0].shape[1], dtype=torch.int64))
def column_order(weights: list[Tensor]) -> Tensor:
    """The input columns of weights [N_i, K] that read the same value, by descending norm: int64 [K]."""
    return _by_norm(weights, 1).flatten()


@define(
    lambda weights, group, head_dim, wide: weights[0].new_empty(
        weights[0].shape[1] // (1 if wide else group), dtype=torch.int64
    )
)
def head_order(weights: list[Tensor], group: int, head_dim: int, wide: bool) -> Tensor:
    """column_order within KV heads, for weights [N_i, Hk * group * D] over attention's output: int64 [Hk * D].

    All query heads of a KV head share an order; `wide` repeats it for each of them, [Hk * group * D].
    """
    rows = [w.unflatten(1, (-1, group, head_dim)).transpose(1, 2).flatten(0, 1).flatten(1) for w in weights]
    order = _by_norm(rows, rows[0].shape[1] // head_dim)
    if wide:
        order = order.repeat_interleave(group, 0)
    return (order + torch.arange(len(order))[:, None] * head_dim).flatten()


@define(lambda w, order, axis: torch.empty_like(w))
def take_axis(w: Tensor, order: Tensor, axis: int) -> Tensor:
    """w permuted along `axis` by order int64 [w.shape[axis]]."""
    return w.index_select(axis, order)


# ---- joining and rounding ------------------------------------------------------------------------


@define(lambda weights: weights[0].new_empty(sum(w.shape[0] for w in weights), *weights[0].shape[1:]))
def concat_rows(weights: list[Tensor]) -> Tensor:
    """Weights [N_i, K] (or biases [N_i]) -> [sum N_i, K], for linears that share their input."""
    return torch.cat(weights)


@define(lambda w, start, stop: w.new_empty(stop - start, *w.shape[1:]))
def slice_rows(w: Tensor, start: int, stop: int) -> Tensor:
    """Rows start:stop of a weight [N, K] or a bias [N], for the outputs start:stop of its linear."""
    return w[start:stop].clone()


@define(lambda a, b, block: a.new_empty(2 * (-(-a.shape[0] // block)) * block, *a.shape[1:]))
def interleave_rows(a: Tensor, b: Tensor, block: int) -> Tensor:
    """a and b [N, ...] -> blocks of `block` rows in alternation, a first; a short last block is zero-padded.

    This way the run of output rows of one thread contains a gate together with its up projection.
    """
    short = -a.shape[0] % block
    pair = [torch.cat((t, t.new_zeros(short, *t.shape[1:]))).unflatten(0, (-1, block)) for t in (a, b)]
    return torch.stack(pair, 1).flatten(0, 2).contiguous()


@define(lambda a, b, block: a.new_empty(a.shape[0], 2 * (-(-a.shape[1] // block)) * block, *a.shape[2:]))
def interleave_experts(a: Tensor, b: Tensor, block: int) -> Tensor:
    """a and b [E, N, ...] -> [E, 2N', ...]: interleave_rows per expert."""
    short = -a.shape[1] % block
    pair = [torch.cat((t, t.new_zeros(t.shape[0], short, *t.shape[2:])), 1).unflatten(1, (-1, block)) for t in (a, b)]
    return torch.stack(pair, 2).flatten(1, 3).contiguous()


def _fake_head_rows(w: Tensor, index: Tensor, heads: int, transposed: bool) -> Tensor:
    rows, inputs = index.shape[0] // heads, w.shape[1]
    return w.new_empty(heads, *((inputs, rows) if transposed else (rows, inputs)))


@define(_fake_head_rows)
def head_rows(w: Tensor, index: Tensor, heads: int, transposed: bool) -> Tensor:
    """Rows index int64 [heads * N] of a weight [..., K], as one matrix [N, K] per head: [heads, N, K].

    If `transposed`, the matrices are transposed: [heads, K, N].
    """
    rows = w.index_select(0, index).unflatten(0, (heads, -1))
    return rows.transpose(1, 2).contiguous() if transposed else rows


def _padded(n: int) -> int:
    return -(-n // GATE_BLOCK) * GATE_BLOCK


@define(lambda w: w.new_empty(w.shape[0] * _padded(w.shape[1]), *w.shape[2:]))
def expert_rows(w: Tensor) -> Tensor:
    """w [E, N, ...] -> [E * N', ...], where N' is N padded to a multiple of GATE_BLOCK with rows of zeros."""
    short = _padded(w.shape[1]) - w.shape[1]
    return torch.cat((w, w.new_zeros(w.shape[0], short, *w.shape[2:])), 1).flatten(0, 1).contiguous()


def _fake_quantized(w: Tensor, format: str, *chosen: Tensor | None) -> list[Tensor]:
    return [torch.empty(s, dtype=d, device=w.device) for s, d in weight_format(format).layout(tuple(w.shape))]


@define(_fake_quantized, since="quantize")
def quantize_weight(
    w: Tensor,
    format: str,
    codes: Tensor | None = None,
    second: Tensor | None = None,
    third: Tensor | None = None,
    fourth: Tensor | None = None,
) -> list[Tensor]:
    """w [N, K] -> the parts of `format` in the order of WeightFormat.roles, rounded to nearest.

    Parts that were chosen in another way are passed after the format; w then only documents what they approximate.
    """
    chosen = [part.clone() for part in (codes, second, third, fourth) if part is not None]
    return chosen or [part.clone() for part in weight_format(format).quantize(w)]


@define(lambda weight, format, k: torch.empty(weight[0].shape[0], k, device=weight[0].device), since="quantize")
def dequantize(weight: list[Tensor], format: str, k: int) -> Tensor:
    """The f32 [N, k] that the parts of a rounded weight stand for: a table of which a step reads single rows."""
    return weight_format(format).dequantize(weight, k)


@define(lambda w, fraction: w.new_empty(w.shape[0], dtype=torch.bool), since="quantize")
def worst_rows(w: Tensor, fraction: float) -> Tensor:
    """w [N, K] -> bool [N]: the `fraction` of rows with the largest 4-bit rounding error."""
    return mixed.worst_rows(w, fraction)


@define(
    lambda w, wide, *chosen: [
        torch.empty(s, dtype=d, device=w.device) for s, d in mixed.MIX_4_8.layout(tuple(w.shape))
    ],
    since="quantize",
)
def quantize_mixed(
    w: Tensor, wide: Tensor, codes: Tensor | None = None, scale: Tensor | None = None, zero: Tensor | None = None
) -> list[Tensor]:
    """w [N, K] -> the parts of mix_4_8, with rows marked in `wide` bool [N] rounded to 8 bits, the others to 4.

    Parts that were not rounded to nearest are passed after `wide`; w then only documents what they approximate.
    """
    chosen = [part.clone() for part in (codes, scale, zero) if part is not None]
    return [*chosen, wide.clone()] if chosen else [part.clone() for part in mixed.MIX_4_8.quantize_rows(w, wide)]


@define(lambda weight: [torch.empty_like(part) for part in weight[:3]], since="quantize")
def upper_nibble(weight: list[Tensor]) -> list[Tensor]:
    """The parts of a nested_8_4 weight -> those of the w4_asym_g128 weight it contains, its first three."""
    return [part.clone() for part in weight[:3]]


@define(lambda w: w.new_empty(w.shape[0]))
def zero_bias(w: Tensor) -> Tensor:
    """w [N, K] -> zeros [N]: the bias of a linear without one that is joined with linears that have one."""
    return w.new_zeros(w.shape[0])
