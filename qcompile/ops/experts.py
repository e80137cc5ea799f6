"""Operators of mixtures of experts: each token uses k of E experts, and only their weights are read.

A choice is index int64 [..., k]. The k slots of a token are its chosen experts, in the order of the index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcompile.formats.activations import activation_format, dequantize_activation
from qcompile.formats.registry import weight_format
from qcompile.ops.epilogues import gate
from qcompile.ops.model import GATED
from qcompile.ops.registry import define, like, reference

# ---- routers ----------------------------------------------------------------------------------------


@define(like)
def softmax(x: Tensor) -> Tensor:
    """Softmax of x [..., E] over its last dimension."""
    return torch.softmax(x, -1)


@define(lambda x, k: torch.empty(*x.shape[:-1], k, dtype=torch.int64, device=x.device))
def top_k(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of x [..., E], in descending order, ties by index -> int64 [..., k]."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k].clone()


@define(lambda x, experts: torch.empty(*x.shape, experts, dtype=torch.int64, device=x.device))
def every_expert(x: Tensor, experts: int) -> Tensor:
    """The choice of all experts, in their order, for each of x [...] -> int64 [..., experts].

    With it, expert_linear multiplies each of `experts` parts of a token, such as its heads, by its own weight.
    """
    return torch.arange(experts, device=x.device).expand(*x.shape, experts).clone()


@define(lambda index, last: torch.empty_like(index))
def bound_choice(index: Tensor, last: int) -> Tensor:
    """index int64 [..., k] with `last` in place of what is above it: experts that have no weights of their own.

    It is the last one that has weights, and the only one that a token may choose more than once.
    """
    return index.clamp(max=last)


@define(lambda x, index: x.new_empty(index.shape))
def pick(x: Tensor, index: Tensor) -> Tensor:
    """x [..., E], or a weight [E], at index int64 [..., k] -> [..., k]."""
    return x[index] if x.dim() == 1 else x.gather(-1, index)


@define(lambda x, index, tolerance: x.new_empty(index.shape))
def near_share(x: Tensor, index: Tensor, tolerance: float) -> Tensor:
    """The share of each slot in a softmax of x [..., E] over those near it -> [..., k].

    `index` [..., k] is a choice of the largest x in descending order. With m = x at a slot, x_i counts if no earlier
    slot has chosen it and (m - x_i) / max(|x_i|, m) is not more than `tolerance`.
    """
    shares, left = [], torch.ones_like(x, dtype=torch.bool)
    for slot in index.split(1, -1):
        best = x.gather(-1, slot)
        far = (best - x) / x.abs().maximum(best) > tolerance
        total = torch.where(left & ~far, torch.exp(x - best), 0.0).sum(-1, keepdim=True)
        shares.append(1.0 / total)
        left = left.scatter(-1, slot, False)
    return torch.cat(shares, -1)


@define(like)
def normalize(x: Tensor, eps: float, floor: float) -> Tensor:
    """x [..., k] / max(sum of x + eps, floor)."""
    return x / (x.sum(-1, keepdim=True) + eps).clamp_min(floor)


@define(like)
def limit_groups(x: Tensor, groups: int, keep: int, count: int) -> Tensor:
    """x [..., E] with minus infinity outside the `keep` best of `groups` groups, ranked by the sum of `count` best."""
    runs = x.unflatten(-1, (groups, -1))
    best = runs.topk(count, -1).values.sum(-1)
    kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[..., :keep]
    mask = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True)
    return runs.masked_fill(~mask[..., None], float("-inf")).flatten(-2)


# ---- experts ----------------------------------------------------------------------------------------


@define(lambda x, index, weight, bias=None: x.new_empty(*index.shape, weight.shape[1]))
def expert_linear(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each slot's linear: x [..., K], or [..., k, K] per slot; weight [E, N, K], bias [E, N] -> [..., k, N]."""
    if x.dim() == index.dim():
        x = x.unsqueeze(-2).expand(*index.shape, x.shape[-1])
    y = x.new_empty(*index.shape, weight.shape[1])
    for expert in range(weight.shape[0]):
        chosen = index == expert
        y[chosen] = torch.nn.functional.linear(x[chosen], weight[expert], None if bias is None else bias[expert])
    return y


@define(lambda x, index, weight, bias, kind, width, limit, offset: x.new_empty(*index.shape, width))
def gated_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: str,
    width: int,
    limit: float | None,
    offset: float,
) -> Tensor:
    """Each slot's gated linear: weight [E, 2N', K] interleaved in blocks of GATE_BLOCK rows -> [..., k, width].

    `limit` and `offset` are as in gate().
    """
    return gate(reference("expert_linear")(x, index, weight, bias), kind, width, limit, offset)


@define(lambda y, factor: torch.empty_like(y))
def scale_slots(y: Tensor, factor: Tensor) -> Tensor:
    """y [..., k, F] times factor [..., k]."""
    return y * factor[..., None]


@define(lambda y, factor: y.new_empty(*y.shape[:-2], y.shape[-1]))
def combine(y: Tensor, factor: Tensor | None) -> Tensor:
    """Sum over slots of y [..., k, F], each multiplied by its factor [..., k] if given -> [..., F]."""
    return (y if factor is None else y * factor[..., None]).sum(-2)


# ---- activations used by experts ----------------------------------------------------------------------


@define(like, traits=("elementwise",))
def clamp(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """x [...] clamped to low and high; None means unbounded."""
    return torch.clamp(x, low, high)


@define(like, traits=("elementwise",))
def shift(x: Tensor, offset: float) -> Tensor:
    """x [...] plus a constant."""
    return x + offset


# ---- packed -----------------------------------------------------------------------------------------


def _fake_expert_gemm(  # parameters: those of expert_gemm
    x: Tensor,
    index: Tensor,
    weight: list[Tensor],
    bias: Tensor | None,
    format: str,
    activation: str,
    group: int,
    experts: int,
    width: int,
    epilogue: str,
    limit: float | None,
    offset: float,
) -> Tensor:
    return x.new_empty((*index.shape, width), dtype=torch.float32)


@define(_fake_expert_gemm, since="quantize")
def expert_gemm(  # parameters: the schema of an operator is flat
    x: Tensor,
    index: Tensor,
    weight: list[Tensor],
    bias: Tensor | None,
    format: str,
    activation: str,
    group: int,
    experts: int,
    width: int,
    epilogue: str,
    limit: float | None,
    offset: float,
) -> Tensor:
    """expert_linear on quantized weights (as in expert_rows) and per-slot quantized inputs -> f32 [..., k, width].

    Epilogues: `store`, or those of gated_experts. For the latter, the weight interleaves gate and up rows, and `limit`
    and `offset` are used.
    """
    kept = None if epilogue in GATED else width
    rows = weight_format(format).dequantize(weight, x.shape[-1]).unflatten(0, (experts, -1))[:, :kept]
    added = None if bias is None else bias.unflatten(0, (experts, -1))[:, :kept]
    rounded = dequantize_activation(activation_format(activation).quantize(x.float(), group))
    y: Tensor = expert_linear(rounded, index, rows, added).float()
    return gate(y, GATED[epilogue], width, limit, offset) if epilogue in GATED else y
