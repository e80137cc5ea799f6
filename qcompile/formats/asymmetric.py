"""Asymmetric 4-bit and 3-bit integers with a scale and a zero point per group of inputs (AWQ; MixLLM 3.1; GPTQ).

w4_asym_g128 has groups of 128 inputs, w4_asym_g64 and w4_asym_g32 smaller ones (on CPUs). w3_asym_g128 has 3-bit codes
in groups of 128 (on CPUs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcompile.formats.activations import BF16, INTEGERS
from qcompile.formats.blocks import NIBBLES, THREE_BITS
from qcompile.formats.gpu import NO_GPU, GpuKernel, GpuPacking, GpuSupport, GpuWords
from qcompile.formats.rounding import Parts, asymmetric, by_group, spread
from qcompile.formats.weight import (
    CODES,
    FINE_RATIOS,
    GROUP_SCALE,
    GROUP_ZERO,
    Grid,
    WeightFormat,
    positive,
    ranges,
    small_groups,
)


def fit_asymmetric(format: WeightFormat, group: int, w: Tensor, ratio: Tensor | float) -> Grid:
    """The grid of asymmetric codes, of as many bits as those of `format`, in groups of `group` inputs."""
    low, high = ranges(w, group, ratio)
    step = positive((high - low) / highest(format))
    bottom = torch.zeros_like(step)
    return Grid(format, group, step, torch.round(-low / step), bottom, bottom + highest(format))


def highest(format: WeightFormat) -> int:
    """The largest unsigned code of a format."""
    return int(2**format.codes.bits - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class AsymmetricGroups(WeightFormat):
    """value = (code - zero) * scale, with a scale and a zero point per group."""

    def quantize(self, w: Tensor) -> Parts:
        """w [N, K] rounded to nearest. Groups that already lie on such a grid keep their values exactly."""
        codes, scale, zero = asymmetric(by_group(w.float(), self.group), self.codes.bits, keep=True)
        return [codes.flatten(1)[:, : w.shape[1]].contiguous(), scale.squeeze(-1), zero.squeeze(-1)]

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, scale, zero = parts[:3]
        return (codes.float() - spread(zero, self.group, k)) * spread(scale, self.group, k)

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        return fit_asymmetric(self, self.group, w, ratio)

    def grid_of(self, parts: Parts) -> Grid | None:
        _, scale, zero = parts[:3]
        bottom = torch.zeros_like(scale)
        return Grid(self, self.group, scale, zero.float(), bottom, bottom + highest(self))

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        return [grid.codes(values).to(torch.uint8), grid.step, grid.zero.to(torch.uint8)]


GPU_NIBBLES = GpuPacking("w4_asym_g128_int8", 128, 2, 128, words=GpuWords.SCALES)
"""Packing for GPU kernels with int8 activations."""
_GPU_ITEMS = GpuPacking("w4_asym_g128", 256, 4, 256, words=GpuWords.BF16_SCALES)
"""Packing for GPU kernels with bf16 activations."""
_GPU_KERNELS = (
    GpuKernel("w4_asym_g128_int8", GPU_NIBBLES, "nibbles", "i8", 64, words=1, float_sum=True, gemv=True, few_rows=True),
    GpuKernel(
        "w4_asym_g128",
        _GPU_ITEMS,
        *("nibbles_to_bf16", "i16", 64),
        words=2,
        float_x=True,
        float_sum=True,
        few_rows=True,
        by_plane=True,
        serial_few_rows=True,
    ),
    GpuKernel("w4_asym_g128_a8", _GPU_ITEMS, "nibble_pairs", "i16", 64, words=2, float_sum=True, few_rows=True),
)
W4_ASYM_G128 = AsymmetricGroups(
    name="w4_asym_g128",
    bits=4,
    parts=(CODES, GROUP_SCALE, GROUP_ZERO),
    codes=NIBBLES,
    activations=(*INTEGERS, BF16),
    group=128,
    sum_group=128,
    ratios=FINE_RATIOS,
    source="AWQ; MixLLM 3.1",
    gpu=GpuSupport(_GPU_KERNELS),
)
W4_ASYM_G64, W4_ASYM_G32 = (
    replace(W4_ASYM_G128, name=f"w4_asym_g{group}", source="ONNX Runtime; GPTQ", gpu=NO_GPU, **small_groups(group))
    for group in (64, 32)
)
W3_ASYM_G128 = AsymmetricGroups(
    name="w3_asym_g128",
    bits=3,
    parts=(CODES, GROUP_SCALE, GROUP_ZERO),
    codes=THREE_BITS,
    activations=(BF16,),
    group=128,
    sum_group=128,
    ratios=FINE_RATIOS,
    source="GPTQ 3 bits",
    cpu_headers=("gemm_w3.h",),
)
