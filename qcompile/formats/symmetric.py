"""Symmetric 8-bit integers with a scale per output feature (SmoothQuant; QServe 4), or per group of its inputs.

w8_sym_g32, w8_sym_g64 and w8_sym_g128 have groups (on CPUs). They hold the weights of Q8_0 (GGUF) and of 8-bit
checkpoints in groups as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats.activations import INTEGERS
from qcompile.formats.blocks import BYTES
from qcompile.formats.gpu import GpuCodes, GpuKernel, GpuPacking, GpuSupport
from qcompile.formats.rounding import Parts, by_group, spread, symmetric
from qcompile.formats.weight import GROUP_SCALE, INT8_MAX, Grid, Part, Per, WeightFormat, positive, ranges, small_groups


def _bytes_grid(format: WeightFormat, group: int, step: Tensor) -> Grid:
    """The grid of codes within ±127, for steps [N, groups]."""
    none = torch.zeros_like(step)
    return Grid(format, group, step, none, none - INT8_MAX, none + INT8_MAX)


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricChannel(WeightFormat):
    """value = code * scale of the row, codes within ±127."""

    def quantize(self, w: Tensor) -> Parts:
        codes, scale = symmetric(w, INT8_MAX)
        return [codes, scale.squeeze(-1)]

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, scale = parts
        return codes.float() * scale[:, None]

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        low, high = ranges(w, w.shape[1], ratio)
        return _bytes_grid(self, w.shape[1], positive(torch.maximum(high, -low) / INT8_MAX))

    def grid_of(self, parts: Parts) -> Grid | None:
        codes, scale = parts
        return _bytes_grid(self, codes.shape[1], scale[:, None])

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        return [grid.codes(values).to(torch.int8), grid.step[:, 0]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricGroups(WeightFormat):
    """value = code * scale of the group. Codes are within ±127; groups that were published with a code -128 keep it."""

    def quantize(self, w: Tensor) -> Parts:
        """w [N, K] rounded to nearest. Groups that already lie on such a grid keep their values exactly."""
        codes, scale = symmetric(by_group(w.float(), self.group), INT8_MAX, keep=True)
        return [codes.flatten(1)[:, : w.shape[1]].contiguous(), scale.squeeze(-1)]

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, scale = parts
        return codes.float() * spread(scale, self.group, k)

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        low, high = ranges(w, self.group, ratio)
        return _bytes_grid(self, self.group, positive(torch.maximum(high, -low) / INT8_MAX))

    def grid_of(self, parts: Parts) -> Grid | None:
        return _bytes_grid(self, self.group, parts[1])

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        return [grid.codes(values).to(torch.int8), grid.step]


GPU_BYTES = GpuPacking("w8_sym_channel", 128, 1, 128, GpuCodes.BYTES, row_scale=True)
"""Packing of 8-bit codes for GPU kernels."""
W8_SYM_CHANNEL = SymmetricChannel(
    name="w8_sym_channel",
    bits=8,
    parts=(Part("codes", Per.WEIGHT, torch.int8), Part("scale", Per.ROW, torch.float32)),
    codes=BYTES,
    activations=INTEGERS,
    ratios=(1.0, 0.95, 0.9, 0.85, 0.8),
    source="SmoothQuant; QServe 4",
    gpu=GpuSupport((GpuKernel("w8_sym_channel", GPU_BYTES, "whole", "i8", 128, gemv=True),)),
)
W8_SYM_G32, W8_SYM_G64, W8_SYM_G128 = (
    SymmetricGroups(
        name=f"w8_sym_g{group}",
        bits=8,
        parts=(W8_SYM_CHANNEL.parts[0], GROUP_SCALE),
        codes=BYTES,
        activations=INTEGERS,
        ratios=W8_SYM_CHANNEL.ratios,
        source="GGUF Q8_0; GPTQ",
        **small_groups(group),
    )
    for group in (32, 64, 128)
)
