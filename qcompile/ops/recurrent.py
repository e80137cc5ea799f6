"""Operators of layers with a state of fixed size: short causal convolutions and gated linear recurrences.

They work on whole sequences [B, T, ...] that start from a state of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError
from qcompile.ops import recurrent_chunks
from qcompile.ops.registry import define, like


@define(like, until="quantize")
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal convolution of each feature of x [B, T, F] with its own weight [F, W] -> [B, T, F].

    y[t] = bias + the sum over j of weight[:, j] * x[t - W + 1 + j], with j ascending; x is 0 before the first token.
    """
    width = weight.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, width - 1, 0))
    y = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x)
    for j in range(width):
        y = y + padded[:, j : j + x.shape[1]] * weight[:, j].to(x.dtype)
    return y.contiguous()


@define(
    lambda q, k, v, decay, rates=None, gain=None, delta=False: v.new_empty(*v.shape),
    until="quantize",
)
def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rates: Tensor | None = None,
    gain: Tensor | None = None,
    delta: bool = False,
) -> Tensor:
    """A gated linear recurrence with a matrix state S [K, D] per head; S is 0 before the first token.

    q and k [B, T, Hk, K], v [B, T, H, D], decay [B, T, H] or [B, T, H, K], rates [H] or [H, K] or None, gain [B, T, H]
    or None -> [B, T, H, D]. Head h reads head h // (H / Hk) of q and k. For each token,

        S = exp(decay * rates) * S        each row of S by its own factor if decay or rates has K
        u = v - S^T k   if delta, else v
        S = S + k (gain * u)^T
        y = S^T q

    Without rates or gain, they are 1. This expresses the gated delta rule (Yang et al. 2024, arXiv 2412.06464) and its
    variant with a decay for each key feature (KDA, arXiv 2510.26692), with `delta`; and without it Mamba-2's SSD
    (Dao and Gu 2024, arXiv 2405.21060), Mamba's selective scan (Gu and Dao 2023, arXiv 2312.00752, with D = 1 and one
    head per feature), lightning attention (arXiv 2401.04658), and the RG-LRU (De et al. 2024, arXiv 2402.19427).
    """
    group = v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(group, 2) for t in (q, k))
    if recurrent_chunks.pays(v, decay) and {q.dtype, k.dtype, decay.dtype} == {v.dtype}:
        return _in_chunks(q, k, v, _exponent(decay, rates, 3), gain, delta)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(v.shape[1]):
        state, y = recurrence_token(
            state, q[:, t], k[:, t], v[:, t], decay[:, t], rates, None if gain is None else gain[:, t], delta
        )
        outputs.append(y)
    return torch.stack(outputs, 1) if outputs else torch.empty_like(v)


def recurrence_token(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rates: Tensor | None,
    gain: Tensor | None,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    """One token of `linear_recurrence`: state [..., H, K, D], q and k [..., H, K], v [..., H, D].

    decay is [..., H] or [..., H, K], and gain [..., H]. Returns the new state and y [..., H, D].
    """
    state = decayed(state, decay, rates)
    u = v - (state * k[..., None]).sum(-2) if delta else v
    state = state + outer(k, u if gain is None else u * gain[..., None])
    return state, (state * q[..., None]).sum(-2)


def decayed(state: Tensor, decay: Tensor, rates: Tensor | None) -> Tensor:
    """state [..., H, K, D] times exp(decay * rates), with decay [..., H] or [..., H, K] and rates [H] or [H, K]."""
    return state * torch.exp(_exponent(decay, rates, state.dim() - 2))[..., None]


def _exponent(decay: Tensor, rates: Tensor | None, without_keys: int) -> Tensor:
    """decay * rates [..., H, 1 or K]; a decay of `without_keys` dimensions [..., H] has none for key features."""
    exponent = decay[..., None] if decay.dim() == without_keys else decay
    if rates is not None:
        exponent = exponent * (rates if rates.dim() == 2 else rates[..., None]).to(exponent.dtype)
    return exponent


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, exponent: Tensor, gain: Tensor | None, delta: bool) -> Tensor:
    """`linear_recurrence` for as many heads of q and k as of v, by chunks."""
    q, k, v, exponent = (t.transpose(1, 2) for t in (q, k, v, exponent))
    gains = v.new_ones(v.shape[:3]) if gain is None else gain.transpose(1, 2)
    return recurrent_chunks.chunked_recurrence(q, k, v, exponent, gains, delta).transpose(1, 2).contiguous()


def outer(k: Tensor, update: Tensor) -> Tensor:
    """k [..., H, K] and an update [..., H, D] -> [..., H, K, D]."""
    return k[..., None] * update[..., None, :]


@define(lambda x, *_: torch.empty_like(x), until="raise")
def proved(x: Tensor, one: Tensor, other: Tensor, tables: Sequence[Tensor], where: str) -> Tensor:
    """x [...], if `one` and `other`, of one shape, are finite and agree but for rounding, that of `tables` included.

    `tables` are the numbers from which `one` was computed: a checkpoint of 16 bits stores them rounded.

    Raises UnsupportedError, which names the loop `where`, if they do not.
    """
    alike = (one - other).abs().max() <= _rounding(tables) * one.abs().max()
    if not (bool(alike) and bool(one.isfinite().all())):
        raise UnsupportedError(f"{where} is over blocks, and does not compute the recurrence of its single tokens")
    return x.clone()


def _rounding(tables: Sequence[Tensor]) -> float:
    """How far results of `tables` may lie apart, relative to the largest.

    100 times what float32 rounding gives; one unit in the last place where all tables have short numbers. Tables of
    lightning attention (8 to 16 heads, blocks of 64 and 256) that were rounded to these gave 0.4 of a unit at most.
    """
    for short in (torch.bfloat16, torch.float16):  # the fewest digits first: float16 has most numbers of bfloat16
        if tables and all(bool((table.to(short).to(table.dtype) == table).all()) for table in tables):
            return float(torch.finfo(short).eps)
    return 1e-4


@define(like, until="raise")
def log_decay(factor: Tensor) -> Tensor:
    """log(factor) [...], for a factor that multiplies a state.

    At the first token the state is 0, so any finite number may stand there for -inf.

    Raises UnsupportedError if a factor that is known is not positive.
    """
    if bool((factor < 0).any()):
        raise UnsupportedError("a recurrence multiplies its state by a number that is not positive")
    return torch.log(factor)
