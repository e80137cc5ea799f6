"""Variations of norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.variations.decoder import HIDDEN, Part, Table

TABLE = Table()
add = TABLE.add


def half(x: Tensor) -> Tensor:
    """x rounded to bfloat16."""
    return x.to(torch.bfloat16).to(torch.float32)


# ---- norms ---------------------------------------------------------------------------------------------


def norm(change: Part) -> dict[str, Part]:
    return {"norm": lambda m, x, w: change(x, w)}


def ms(x: Tensor, **more: Any) -> Tensor:
    return x.square().mean(-1, keepdim=True, **more)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


add("agrees", "root mean square", **norm(lambda x, w: x * torch.rsqrt(ms(x) + 1e-5) * w))
add("agrees", "weight first", **norm(lambda x, w: w * (x * torch.rsqrt(ms(x) + 1e-5))))
add("agrees", "weight and 1", **norm(lambda x, w: x * torch.rsqrt(ms(x) + 1e-5) * (1 + w)))
add("agrees", "weight twice", **norm(lambda x, w: x * torch.rsqrt(ms(x) + 1e-5) * w * w))
add("agrees", "weight negated", **norm(lambda x, w: x * torch.rsqrt(ms(x) + 1e-5) * -w))
add("refused", "weight before", **norm(lambda x, w: (x * w) * torch.rsqrt(ms(x * w) + 1e-5)))
add("refused", "weight before, unseen by the mean", **norm(lambda x, w: (x * w) * torch.rsqrt(ms(x) + 1e-5)))
add(
    "agrees",
    "weight in the root as well",
    **norm(lambda x, w: x * torch.rsqrt(ms(x) + 1e-5) * w.square().mean().sqrt()),
)
add("agrees", "bias behind", **norm(lambda x, w: x * torch.rsqrt(ms(x) + 1e-5) * w + w))
add("agrees", "bias, then weight", **norm(lambda x, w: (F.layer_norm(x, (HIDDEN,)) + w) * w))
add("agrees", "large eps", **norm(lambda x, w: x * torch.rsqrt(ms(x) + 0.5) * w))
add("agrees", "no eps", **norm(lambda x, w: x * torch.rsqrt(ms(x) + 0.0) * w))
add("agrees", "negative eps", **norm(lambda x, w: x * torch.rsqrt(ms(x) + -1e-3) * w))
add("refused", "eps outside the root", **norm(lambda x, w: x / (ms(x).sqrt() + 0.1) * w))
add("refused", "eps in the mean", **norm(lambda x, w: x * torch.rsqrt((x.square() + 0.1).mean(-1, keepdim=True)) * w))
add("refused", "eps as the least", **norm(lambda x, w: x * torch.rsqrt(ms(x).clamp_min(0.5)) * w))
add("refused", "eps subtracted", **norm(lambda x, w: x * torch.rsqrt(ms(x) - 0.01) * w))
add("refused", "eps doubled by alpha", **norm(lambda x, w: x * torch.rsqrt(torch.add(ms(x), 0.1, alpha=2)) * w))
add("refused", "sum of squares", **norm(lambda x, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5) * w))
add("refused", "mean of absolutes", **norm(lambda x, w: x / (x.abs().mean(-1, keepdim=True) + 1e-5) * w))
add(
    "refused", "mean of fourth powers", **norm(lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5) * w)
)
add("refused", "mean of another's squares", **norm(lambda x, w: x * torch.rsqrt(ms(x + 1) + 1e-5) * w))
add("refused", "mean of part", **norm(lambda x, w: x * torch.rsqrt(ms(x[..., :16]) + 1e-5) * w))
add("refused", "mean over tokens", **norm(lambda x, w: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * w))
add("refused", "mean over everything", **norm(lambda x, w: x * torch.rsqrt(x.square().mean() + 1e-5) * w))
add(
    "refused",
    "mean over tokens and features",
    **norm(lambda x, w: x * torch.rsqrt(x.square().mean((1, 2), keepdim=True) + 1e-5) * w),
)
add("refused", "over the batch", **norm(lambda x, w: x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-5) * w))
add("refused", "over a transposed last dimension", **norm(lambda x, w: (x.mT * torch.rsqrt(ms(x.mT) + 1e-5)).mT * w))
add(
    "refused",
    "in groups",
    **norm(lambda x, w: (x.unflatten(-1, (4, 8)) * torch.rsqrt(ms(x.unflatten(-1, (4, 8))) + 1e-5)).flatten(-2) * w),
)
add(
    "agrees",
    "in groups, over the groups",
    **norm(lambda x, w: F.layer_norm(x.unflatten(-1, (4, 8)).mT, (4,)).mT.flatten(-2) * w),
)
add("refused", "cube root", **norm(lambda x, w: x * (ms(x) + 1e-5).pow(-1 / 3) * w))
add("agrees", "power of -0.5", **norm(lambda x, w: x * (ms(x) + 1e-5).pow(-0.5) * w))
add("agrees", "divided by a root", **norm(lambda x, w: x / (ms(x) + 1e-5).sqrt() * w))
add("refused", "multiplied by a root", **norm(lambda x, w: x * (ms(x) + 1e-5).sqrt() * w))
add("refused", "divided by rsqrt", **norm(lambda x, w: x / torch.rsqrt(ms(x) + 1e-5) * w))
add("refused", "root over x", **norm(lambda x, w: (ms(x) + 1e-5).sqrt() / x * w))
add("refused", "another x", **norm(lambda x, w: x.relu() * torch.rsqrt(ms(x) + 1e-5) * w))
add("refused", "negated", **norm(lambda x, w: -x * torch.rsqrt(ms(-x) + 1e-5) * w))
add("refused", "doubled first, for the eps", **norm(lambda x, w: 0.01 * x * torch.rsqrt(ms(0.01 * x) + 1e-5) * w))
add("agrees", "in float64", **norm(lambda x, w: (x.double() * torch.rsqrt(ms(x.double()) + 1e-5)).float() * w))
add("refused", "x in bfloat16", **norm(lambda x, w: half(x) * torch.rsqrt(ms(half(x)) + 1e-5) * w))
add(
    "refused",
    "square in bfloat16",
    **norm(lambda x, w: x * torch.rsqrt(half(x.square()).mean(-1, keepdim=True) + 1e-5) * w),
)
add("refused", "mean in bfloat16", **norm(lambda x, w: x * torch.rsqrt(ms(x, dtype=torch.bfloat16) + 1e-5) * w))
add(
    "refused",
    "mean in float16, back in float32",
    **norm(lambda x, w: x * torch.rsqrt(ms(x, dtype=torch.float16).float() + 1e-5) * w),
)
add("refused", "root in bfloat16", **norm(lambda x, w: x * half(torch.rsqrt(ms(x) + 1e-5)) * w))
add("refused", "product in bfloat16", **norm(lambda x, w: half(x * torch.rsqrt(ms(x) + 1e-5)) * w))
add(
    "refused",
    "product in float8",
    **norm(lambda x, w: (x * torch.rsqrt(ms(x) + 1e-5)).to(torch.float8_e5m2).float() * w),
)
add("agrees", "weight in bfloat16", **norm(lambda x, w: x * torch.rsqrt(ms(x) + 1e-5) * w.bfloat16()))
add("agrees", "layer norm", **norm(lambda x, w: centred(x) / (ms(centred(x)) + 1e-5).sqrt() * w))
add(
    "agrees",
    "layer norm by var",
    **norm(lambda x, w: centred(x) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * w),
)
add("refused", "unbiased variance", **norm(lambda x, w: centred(x) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * w))
add(
    "refused",
    "variance of another correction",
    **norm(lambda x, w: centred(x) / (x.var(-1, keepdim=True, correction=2) + 1e-5).sqrt() * w),
)
add(
    "refused",
    "standard deviation",
    **norm(lambda x, w: centred(x) / (x.std(-1, keepdim=True, unbiased=False) + 1e-5) * w),
)
add(
    "refused",
    "not centred, by variance",
    **norm(lambda x, w: x / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * w),
)
add("refused", "centred, by the mean square", **norm(lambda x, w: centred(x) / (ms(x) + 1e-5).sqrt() * w))
add(
    "refused",
    "centred by the mean of part",
    **norm(lambda x, w: (x - x[..., :16].mean(-1, keepdim=True)) / (ms(centred(x)) + 1e-5).sqrt() * w),
)
add(
    "refused",
    "centred by twice the mean",
    **norm(lambda x, w: torch.sub(x, x.mean(-1, keepdim=True), alpha=2) / (ms(centred(x)) + 1e-5).sqrt() * w),
)
add(
    "refused",
    "centred by the median",
    **norm(lambda x, w: (x - x.median(-1, keepdim=True)[0]) / (ms(centred(x)) + 1e-5).sqrt() * w),
)
add(
    "refused", "variance of the variance", **norm(lambda x, w: centred(x) / (ms(centred(x).square()) + 1e-5).sqrt() * w)
)
add("refused", "mean less x", **norm(lambda x, w: (x.mean(-1, keepdim=True) - x) / (ms(centred(x)) + 1e-5).sqrt() * w))
add(
    "agrees",
    "layer norm of a layer norm",
    **norm(lambda x, w: F.layer_norm(F.layer_norm(x, (HIDDEN,), w), (HIDDEN,), w, w)),
)
add("agrees", "norm without weight", **norm(lambda x, w: F.rms_norm(x, (HIDDEN,), None, 1e-5)))
add("agrees", "norm with the eps of the type", **norm(lambda x, w: F.rms_norm(x, (HIDDEN,), w)))
add("refused", "group norm", **norm(lambda x, w: F.group_norm(x.mT, 4).mT * w))
add(
    "refused",
    "norm over heads and features",
    **norm(lambda x, w: F.layer_norm(x.unflatten(-1, (4, 8)), (4, 8)).flatten(-2) * w),
)
add("refused", "instance norm", **norm(lambda x, w: F.instance_norm(x.mT).mT * w))
add("refused", "batch norm", **norm(lambda x, w: F.batch_norm(x.mT, w * 0, w * 0 + 1, w).mT))
add("refused", "unit length", **norm(lambda x, w: F.normalize(x, dim=-1) * w))
add("refused", "largest value 1", **norm(lambda x, w: x / x.abs().amax(-1, keepdim=True) * w))
add("agrees", "tanh in place of a norm", **norm(lambda x, w: torch.tanh(x * 0.7) * w + w))
add("agrees", "tanh with a learned slope", **norm(lambda x, w: torch.tanh(x * w[:1]) * w))
add("agrees", "norm of a sum with itself", **norm(lambda x, w: F.rms_norm(x + x, (HIDDEN,), w, 0.1)))
add(
    "agrees",
    "every second feature first",
    **norm(lambda x, w: F.rms_norm(torch.cat((x[..., ::2], x[..., 1::2]), -1), (HIDDEN,), w, 0.1)),
)
add(
    "agrees",
    "norms of two halves, exchanged",
    **norm(
        lambda x, w: torch.cat(
            (F.rms_norm(x[..., 16:], (16,), w[:16], 0.1), F.rms_norm(x[..., :16], (16,), w[16:], 0.1)), -1
        )
    ),
)
add(
    "agrees",
    "norms of two halves",
    **norm(
        lambda x, w: torch.cat(
            (F.rms_norm(x[..., :16], (16,), w[:16], 0.1), F.rms_norm(x[..., 16:], (16,), w[16:], 0.1)), -1
        )
    ),
)
add(
    "agrees",
    "norms of two halves, eps of their own",
    **norm(
        lambda x, w: torch.cat(
            (F.rms_norm(x[..., :16], (16,), w[:16], 0.1), F.rms_norm(x[..., 16:], (16,), w[16:], 0.9)), -1
        )
    ),
)
add(
    "agrees",
    "norms of overlapping halves",
    **norm(
        lambda x, w: torch.cat(
            (F.rms_norm(x[..., :16], (16,), w[:16], 0.1), F.rms_norm(x[..., 8:24], (16,), w[16:], 0.1)), -1
        )
    ),
)
