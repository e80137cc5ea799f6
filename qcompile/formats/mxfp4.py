"""mxfp4: E2M1 elements with a power of two per 32 inputs (OCP MX 1.0; ML-SpecQD III-D)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats.activations import INTEGERS
from qcompile.formats.blocks import NIBBLES
from qcompile.formats.elements import E2M1_MAX_EXPONENT, e2m1_codes, e2m1_round, e2m1_values
from qcompile.formats.gpu import GpuCodes, GpuKernel, GpuPacking, GpuSupport, GpuWords
from qcompile.formats.rounding import Parts, by_group, spread
from qcompile.formats.weight import CODES, Grid, Part, Per, WeightFormat


def mx_exponent(largest: Tensor) -> Tensor:
    """Exponents of the scales of MXFP4 groups, given their largest magnitudes.

    OCP MX 1.0 6.3 uses floor(log2 largest) - 2, which puts largest at 4..8 scales and clamps it to 6. From 7 on, the
    clamping error exceeds rounding, and the next power of two (which puts it at 3.5..4) loses less.
    """
    exponent = torch.frexp(largest).exponent - 1 - E2M1_MAX_EXPONENT
    exponent = exponent + (torch.ldexp(largest, -exponent) >= 7).int()
    return exponent.clamp_(-126, 127)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mxfp4(WeightFormat):
    """value = E2M1 element * 2^(exponent - 127)."""

    def quantize(self, w: Tensor) -> Parts:
        grouped = by_group(w.float(), self.group)
        exponent = mx_exponent(grouped.abs().amax(-1, keepdim=True))
        codes = e2m1_codes(torch.ldexp(grouped, -exponent))
        biased = (exponent.squeeze(-1) + 127).to(torch.uint8)
        return [codes.flatten(1)[:, : w.shape[1]].contiguous(), biased]

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, exponent = parts
        return torch.ldexp(e2m1_values(codes), spread(exponent.int() - 127, self.group, k))

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        largest = by_group(w, self.group).abs().amax(-1) * ratio
        step = torch.ldexp(torch.ones_like(largest), mx_exponent(largest))
        none = torch.zeros_like(step)
        return Grid(self, self.group, step, none, none, none)

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        exponent = torch.frexp(grid.step).exponent - 1 + 127
        return [e2m1_codes(values / grid.spread(grid.step, values.shape[1])), exponent.to(torch.uint8)]

    def nearest(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return e2m1_round(w / step) * step


_GPU_KERNELS = (
    GpuKernel(
        "mxfp4_a8",
        GpuPacking("mxfp4_int8", 128, 4, 128, GpuCodes.PERMUTED_E2M1, GpuWords.POWERS_AND_RANGES),
        *("e2m1_by_ranges", "i16", 32),
        words=1,
        float_sum=True,
        gemv=True,
        few_rows=True,
    ),
    GpuKernel(
        "mxfp4",
        GpuPacking("mxfp4", 128, 4, 128, words=GpuWords.BF16_POWERS),
        *("e2m1_to_bf16", "i16", 32),
        words=1,
        float_x=True,
        float_sum=True,
        few_rows=True,
        by_plane=True,
    ),
)
MXFP4 = Mxfp4(
    name="mxfp4",
    bits=4,
    parts=(CODES, Part("exponent", Per.GROUP, torch.uint8)),
    codes=NIBBLES,
    activations=INTEGERS,
    group=32,
    sum_group=32,
    ratios=(1.0, 2.0, 0.5),
    source="OCP MX 1.0; ML-SpecQD III-D",
    gpu=GpuSupport(_GPU_KERNELS),
)
