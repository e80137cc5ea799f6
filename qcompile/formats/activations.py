"""Activation formats: how each one rounds the inputs of a linear, and what it reads back as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile.errors import UsageError
from qcompile.formats.rounding import Parts, Shape, groups_of

ACTIVATION_GROUP = 128
"""Inputs that share a scale in activation formats with several scales per row."""

CLIPPED = 0.8
"""The share of the largest magnitude that clipped codes of 4 bits cover: a rotated row is nearly normal, and its few
largest values cost less than coarser steps for all. The scale's divisor, 8.75, is exact in f32."""


@dataclass(frozen=True)
class ActivationFormat:
    """An activation format: floats of `dtype`, or integers within ±`top` with a scale (symmetric, dynamic).

    A scale covers `group` inputs (0: the whole row). Codes of the last group lie within ±`last_top`, which may keep
    more bits for channels reordered to the end. 4-bit codes are stored one per byte, for the int8 dot products. If
    `reach` is below 1, codes cover that share of the largest magnitude, in finer steps, and larger values are clipped.
    """

    name: str
    dtype: torch.dtype
    top: int = 0
    group: int = 0
    last_top: int = 0
    reach: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if self.clips and self.top != self.last_top:
            raise ValueError(f"{self.name}: clipped codes have one largest code")

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers with scales, rather than floats."""
        return self.top > 0

    @property
    def clips(self) -> bool:
        """Whether codes do not reach the largest magnitude."""
        return self.reach < 1

    @property
    def divisors(self) -> tuple[float, float]:
        """The largest magnitude over the scale: in all scale groups but a row's last, and in the last."""
        return self.top / self.reach, self.last_top / self.reach

    def sum_group(self, weight_group: int, inputs: int) -> int:
        """Codes per sum for a weight with zero points per `weight_group` inputs (0: per row) and `inputs` inputs.

        0 for floats, which need no sums.
        """
        return (weight_group or self.group or inputs) if self.is_integer else 0

    def layout(self, shape: Shape, group: int) -> list[tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of the result of `quantize` for x of `shape` [..., K]."""
        if not self.is_integer:
            return [(shape, self.dtype)]
        *rows, k = shape
        scales = (*rows, groups_of(k, self.group)) if self.group else tuple(rows)
        return [(shape, self.dtype), (scales, torch.float32), ((*rows, groups_of(k, group)), torch.int32)]

    def quantize(self, x: Tensor, group: int) -> Parts:
        """x [..., K] -> [x] for floats, or for integers [codes int8, scale f32 [...] or [..., groups], sums int32].

        codes = round(x * (1 / scale)) within ±top, where scale = max |x| * reach / top over a row or a group. The
        reciprocal is taken once in f32, as in the kernels. `sums` [..., K/group] add up `group` codes each (0: all).
        """
        if not self.is_integer:
            return [x.to(self.dtype)]
        grouped = _padded_groups(x.float(), self.group)
        top: Any = float(self.top)
        if self.last_top != self.top:
            last = torch.arange(grouped.shape[-2], device=x.device)[:, None] == grouped.shape[-2] - 1
            top = torch.where(last, float(self.last_top), top)
        scale = grouped.abs().amax(-1, keepdim=True) / (top / self.reach)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        codes = torch.round(grouped * (1.0 / scale)).clamp(-top, top).to(torch.int8).flatten(-2)[..., : x.shape[-1]]
        sums = _padded_groups(codes, group).sum(-1, dtype=torch.int32)
        return [codes.contiguous(), scale.squeeze(-1) if self.group else scale[..., 0, 0], sums]


def _padded_groups(x: Tensor, group: int) -> Tensor:
    """[..., K] -> [..., groups, group], the last group zero-padded; group 0 means all of K."""
    group = group or x.shape[-1]
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


def dequantize_activation(parts: Parts) -> Tensor:
    """The f32 [..., K] that the parts of ActivationFormat.quantize represent."""
    values = parts[0].float()
    if len(parts) == 1:
        return values
    scale = parts[1]
    if scale.dim() == values.dim():
        return values * scale.repeat_interleave(ACTIVATION_GROUP, -1)[..., : values.shape[-1]]
    return values * scale[..., None]


F32 = ActivationFormat("f32", torch.float32)
BF16 = ActivationFormat("bf16", torch.bfloat16)
INT8 = ActivationFormat("int8", torch.int8, 127, 0, 127, source="SmoothQuant; QServe 4")
INTEGERS = (
    INT8,
    ActivationFormat("int8_g128", torch.int8, 127, ACTIVATION_GROUP, 127, source="MixLLM 3.1"),
    ActivationFormat("int4", torch.int8, 7, 0, 7, source="QuaRot 4"),
    ActivationFormat("int4_clip", torch.int8, 7, 0, 7, CLIPPED, "QuaRot 4, which clips less"),
    ActivationFormat("int4_g128", torch.int8, 7, ACTIVATION_GROUP, 7, source="Atom 4.2"),
    ActivationFormat(
        *("int4_g128_outlier128", torch.int8, 7, ACTIVATION_GROUP, 127), source="Atom 4.1: outliers last, in int8"
    ),
)
ACTIVATIONS = {format.name: format for format in (F32, BF16, *INTEGERS)}


def activation_format(name: str) -> ActivationFormat:
    """The activation format called `name`. Raises UsageError if there is none."""
    if name not in ACTIVATIONS:
        raise UsageError(f"activation format {name} is unknown; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
