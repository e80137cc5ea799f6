"""Operators of a raised model, on values [..., F] and [..., H, D]."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qcompile.formats import hadamard as hadamard_module
from qcompile.ops.registry import define, like

# ---- embeddings, linears, norms ---------------------------------------------------------------


@define(lambda ids, weight: weight.new_empty(*ids.shape, weight.shape[1]))
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids int64 [...], weight [V, F] -> [..., F]."""
    return weight[ids]


@define(lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return torch.nn.functional.linear(x, weight, bias)


@define(like, traits=("permutes",))
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., F] over its last dimension: x / sqrt(mean(x²) + eps) * weight, with weight [F] or None.

    For x [..., H, D] the weight may also be [H * D], different for each head.
    """
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y.clone() if weight is None else y * _by_head(weight, x)


def _by_head(weight: Tensor, x: Tensor) -> Tensor:
    """weight [F] unchanged, weight [H * D] as [H, D]."""
    return weight if weight.shape[0] == x.shape[-1] else weight.view(x.shape[-2:])


@define(like, traits=("permutes",))
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., F] over its last dimension; weight and bias are [F], [H * D] as in rms_norm, or None."""
    if all(w is None or w.shape[0] == x.shape[-1] for w in (weight, bias)):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], None, None, eps)
    y = y if weight is None else y * _by_head(weight, x)
    return y if bias is None else y + _by_head(bias, x)


NORMS = ("rms_norm", "layer_norm")
"""The norms: operators of x, weights or None, and eps as their last argument."""


# ---- elementwise ------------------------------------------------------------------------------

QUICK = 1.702
"""With this factor, x sigmoid(QUICK x) approximates GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(QUICK * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": torch.nn.functional.mish,
    "elu": torch.nn.functional.elu,
    "softplus": torch.nn.functional.softplus,
    "exp": torch.exp,
}
GATED = {f"{kind}_mul": kind for kind in UNARY}
"""Epilogues of linears that return kind(gate) * up."""
CURVES = {"xielu": ("alpha_p", "alpha_n", "beta", "eps")}
"""Operators of x [...] and `curve`, a weight of the parameters named here, that apply one function to each element."""
GATE_BLOCK = 16
"""Rows of a block where the rows of gate and up alternate in one weight."""


@define(like, traits=("elementwise", "permutes"))
def unary(x: Tensor, kind: str) -> Tensor:
    """The function `kind`, one of UNARY, of x [...]."""
    return UNARY[kind](x).clone()


@define(like, traits=("elementwise", "permutes"))
def xielu(x: Tensor, curve: Tensor) -> Tensor:
    """xIELU (Huang and Schlag 2024, arXiv 2411.13010) of x [...]; curve [4] holds alpha_p, alpha_n, beta and eps.

    alpha_p x² + beta x where x > 0, else alpha_n (expm1(min(x, eps)) - x) + beta x.
    """
    alpha_p, alpha_n, beta, eps = curve.to(x.dtype)
    below = (torch.expm1(torch.minimum(x, eps)) - x) * alpha_n
    return torch.where(x > 0, alpha_p * x * x, below) + beta * x


@define(like, traits=("elementwise", "permutes", "rotates"))
def scale(x: Tensor, factor: float) -> Tensor:
    """x [...] times a constant."""
    return x * factor


@define(
    lambda a, b: torch.empty(torch.broadcast_shapes(a.shape, b.shape), dtype=a.dtype, device=a.device),
    traits=("elementwise", "permutes", "rotates"),
)
def add(a: Tensor, b: Tensor) -> Tensor:
    """a [..., F] + b [..., F]; b may be a weight [F], or [..., 1]: one number for all features."""
    return a + b


@define(
    lambda a, b: torch.empty(torch.broadcast_shapes(a.shape, b.shape), dtype=a.dtype, device=a.device),
    traits=("elementwise", "permutes"),
)
def mul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., F] * b [..., F]; b may be a weight [F], or [..., 1]: one number for all features."""
    return a * b


POWERS = (2.0, 0.5, -0.5, -1.0)
"""Exponents of `power`: the square, the root, and their reciprocals."""


@define(like, traits=("elementwise",))
def power(x: Tensor, exponent: float) -> Tensor:
    """x [...] to the power `exponent`, one of POWERS."""
    return x**exponent


@define(lambda x: x.new_empty(*x.shape[:-1], 1))
def mean(x: Tensor) -> Tensor:
    """The mean over the last dimension of x [..., F] -> [..., 1]."""
    return x.mean(-1, keepdim=True)


@define(lambda x, weights: x.new_empty(*weights.shape[:-1], x.shape[-1]))
def mix(x: Tensor, weights: Tensor) -> Tensor:
    """Sums of the slots of x [..., S, F], each with its own weights [..., N, S] -> [..., N, F]."""
    return weights @ x


@define(like)
def hadamard(x: Tensor, core: Tensor, block: int) -> Tensor:
    """x [..., F] with each block of `block` features multiplied by hadamard_matrix(block) / sqrt(block).

    core [c * c], row-major, is the matrix that remains after removing the doublings (hadamard.core_order).
    """
    size = math.isqrt(core.shape[0])
    return hadamard_module.transform(x.unflatten(-1, (-1, block)), core.reshape(size, size)).flatten(-2)


# ---- heads, rotary embedding, attention --------------------------------------------------------


@define(lambda x, start, stop: x.new_empty(*x.shape[:-1], stop - start))
def slice_features(x: Tensor, start: int, stop: int) -> Tensor:
    """x [..., F] -> x[..., start:stop]."""
    return x[..., start:stop].clone()


@define(lambda sources, index: sources[0].new_empty(*sources[0].shape[:-1], index.shape[0]))
def gather_features(sources: list[Tensor], index: Tensor) -> Tensor:
    """sources [..., F_i], index int64 [N] into their concatenated features, -1 for zeros -> [..., N]."""
    joined = torch.cat([*sources, torch.zeros_like(sources[0][..., :1])], -1)
    return joined.index_select(-1, torch.where(index < 0, joined.shape[-1] - 1, index))


@define(like)
def rotate_heads(x: Tensor, center: Tensor | None, block: int) -> Tensor:
    """x [..., H, D] - center [H * D], with blocks of `block` features times hadamard_matrix(block) / sqrt(block).

    `block` is a power of 2, so the matrix consists of doublings only; with 0 nothing is rotated.
    """
    if center is not None:
        x = x - center.to(x.dtype).unflatten(0, x.shape[-2:])
    if not block:
        return x.clone() if center is None else x
    return hadamard_module.transform(x.unflatten(-1, (-1, block)), torch.ones(1, 1)).flatten(-2)


@define(lambda x, heads: x.new_empty(*x.shape[:-1], heads, x.shape[-1] // heads))
def split_heads(x: Tensor, heads: int) -> Tensor:
    """x [..., H*D] -> [..., H, D]."""
    return x.reshape(*x.shape[:-1], heads, -1).clone()


@define(lambda x: x.new_empty(*x.shape[:-2], x.shape[-2] * x.shape[-1]))
def merge_heads(x: Tensor) -> Tensor:
    """x [..., H, D] -> [..., H*D]."""
    return x.flatten(-2).clone()


@define(like, until="raise")
def within(x: Tensor, longest: int) -> Tensor:
    """x [...], which is computed as the model does only if sequences have at most `longest` tokens."""
    return x.clone()


@define(like)
def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool) -> Tensor:
    """Rotary position embedding of x [..., H, D] at positions [...], inv_freq [R/2], R <= D rotated features.

    Pair i is features (i, i + R/2), or (2i, 2i + 1) if `interleaved`. It is rotated by the angle
    position * inv_freq[i], in float32 as in Hugging Face, and multiplied by `scaling`.
    """
    angle = positions[..., None, None].to(torch.float32) * inv_freq.to(torch.float32)
    cos, sin = (angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype)
    rotary = 2 * inv_freq.shape[0]
    head, tail = x[..., :rotary], x[..., rotary:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    c, d = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack((c, d), -1).flatten(-2) if interleaved else torch.cat((c, d), -1)
    return torch.cat((rotated, tail), -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """q [..., Q, H, D], k and v [..., S, Hk, D], mask bool broadcastable to [..., 1, Q, S] -> [..., Q, H, D].

    `bias` [H, Q, S] is added to the scores after soft capping.
    """
    groups = q.shape[-2] // k.shape[-2]
    k, v = (t.repeat_interleave(groups, -2).transpose(-2, -3) for t in (k, v))
    scores = q.transpose(-2, -3) @ k.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[-2]]
    return (weights @ v).transpose(-2, -3).contiguous()


def visible(query: Tensor, key: Tensor, window: int, chunk: int = 0) -> Tensor:
    """Causal mask [..., Q, S] from positions query [..., Q] and key [..., S].

    `window` > 0 hides keys `window` or more tokens back, `chunk` > 0 those before the query's chunk of that many
    tokens.
    """
    distance = query[..., :, None] - key[..., None, :]
    seen = distance >= 0
    seen = seen & (distance < window) if window else seen
    return seen & (distance <= (query % chunk)[..., :, None]) if chunk else seen


def whole_keys(k: Tensor, center: Tensor | None) -> Tensor:
    """Keys k [..., Hk, D] plus the `center` [Hk * D] that was subtracted from them (None: nothing was)."""
    return k if center is None else k + center.to(k.dtype).unflatten(0, k.shape[-2:])


def key_offsets(key_bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """What key_bias [H, P] adds to scores at positions query [Q], key [S]: bias[key] - bias[query], [H, Q, S]."""
    return None if key_bias is None else key_bias[:, None, key] - key_bias[:, query, None]


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@define(_fake_attention, until="quantize")
def attention(  # parameters: the schema of an operator is flat
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
    center: Tensor | None = None,
    chunk: int = 0,
) -> Tensor:
    """Causal attention: q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, Dv] -> [B, T, H, Dv].

    Query head h reads key head h // (H / Hk). `window` > 0 hides keys `window` or more tokens back, `chunk` > 0 those
    before the query's own chunk: chunks begin at multiples of that many tokens. `softcap` > 0 bounds scores as softcap
    * tanh(score / softcap). sinks [H] are extra scores that enter only the denominator of the softmax. key_bias [H, P]
    adds key_bias[h, key] - key_bias[h, query], by position: it expresses ALiBi and any other bias that depends on the
    key's position only, up to a constant per query, which softmax ignores. `center` [Hk * D] was subtracted from all
    keys, and is added back for their scores.
    """
    k = whole_keys(k, center)
    plain = not window and not chunk and not softcap and sinks is None and key_bias is None
    if plain and scale > 0:  # fast, without a [T, T] tensor; torch gives NaN for scales below 0
        first, second, third = (t.transpose(1, 2) for t in (q, k, v))  # heads before tokens
        grouped = q.shape[2] != k.shape[2]
        y = torch.nn.functional.scaled_dot_product_attention(
            first, second, third, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return y.transpose(1, 2).contiguous()
    place = torch.arange(q.shape[1], device=q.device)
    mask, bias = visible(place, place, window, chunk), key_offsets(key_bias, place, place)
    return attend(q, k, v, mask, scale, softcap, sinks, bias)
