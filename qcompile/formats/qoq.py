"""QServe's 4-bit weights: qoq_g128, rounded twice with integer group scales, and qoq_channel, rounded once per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats.activations import INTEGERS
from qcompile.formats.asymmetric import fit_asymmetric
from qcompile.formats.blocks import NIBBLES
from qcompile.formats.gpu import GpuCodes, GpuKernel, GpuPacking, GpuSupport, GpuWords
from qcompile.formats.rounding import Parts, asymmetric, by_group, spread, symmetric
from qcompile.formats.weight import (
    CODES,
    FINE_RATIOS,
    GROUP_ZERO,
    INT8_MAX,
    Grid,
    Part,
    Per,
    WeightFormat,
    positive,
    ranges,
)

QOQ_RANGE = 119
"""QServe 3.1: int8 codes within ±119 stay within int8 after rounding in 4-bit groups and scaling back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QoqGroups(WeightFormat):
    """int8 per channel within ±119, then uint4 with an integer scale and zero point per 128 inputs."""

    def quantize(self, w: Tensor) -> Parts:
        level, scale = symmetric(w, QOQ_RANGE)
        grouped = by_group(level.float(), self.group)
        low, high = grouped.amin(-1, keepdim=True).clamp_(max=0), grouped.amax(-1, keepdim=True).clamp_(min=0)
        step = torch.round((high - low) / 15).clamp_(1, 255)
        zero = torch.round(-low / step).clamp_(0, 15)
        codes = (torch.round(grouped / step) + zero).clamp_(0, 15).to(torch.uint8)
        codes = codes.flatten(1)[:, : w.shape[1]].contiguous()
        return [codes, step.squeeze(-1).to(torch.uint8), zero.squeeze(-1).to(torch.uint8), scale.squeeze(-1)]

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, group_scale, zero, scale = parts
        level = (codes.float() - spread(zero, self.group, k)) * spread(group_scale, self.group, k)
        return level * scale[:, None]

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        """Integer steps, and codes limited so that (code - zero) * step stays within int8."""
        scale = positive(w.abs().amax(1) / QOQ_RANGE)
        low, high = ranges(torch.round(w / scale[:, None]), self.group, ratio)
        inner = torch.round((high - low) / 15).clamp_(1, 255)
        zero = torch.round(-low / inner).clamp_(0, 15)
        reach = torch.floor(INT8_MAX / inner)
        bottom, top = (zero - reach).clamp_(min=0), (zero + reach).clamp_(max=15)
        return Grid(self, self.group, inner * scale[:, None], zero, bottom, top, scale)

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        assert grid.outer is not None
        inner = torch.round(grid.step / grid.outer[:, None]).to(torch.uint8)
        return [grid.codes(values).to(torch.uint8), inner, grid.zero.to(torch.uint8), grid.outer]


@dataclass(frozen=True, kw_only=True, eq=False)
class QoqChannel(WeightFormat):
    """value = (code - zero) * scale, with a scale and a zero point per row."""

    def quantize(self, w: Tensor) -> Parts:
        codes, scale, zero = asymmetric(w, 4)
        return [codes, zero.squeeze(-1), scale.squeeze(-1)]

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, zero, scale = parts
        return (codes.float() - zero[:, None]) * scale[:, None]

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        return fit_asymmetric(self, w.shape[1], w, ratio)

    def grid_of(self, parts: Parts) -> Grid | None:
        codes, zero, scale = parts
        bottom = torch.zeros_like(scale)[:, None]
        return Grid(self, codes.shape[1], scale[:, None], zero[:, None].float(), bottom, bottom + 15)

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        return [grid.codes(values).to(torch.uint8), grid.zero.to(torch.uint8)[:, 0], grid.step[:, 0]]


QOQ_G128 = QoqGroups(
    name="qoq_g128",
    bits=4,
    parts=(
        CODES,
        Part("group_scale", Per.GROUP, torch.uint8),
        GROUP_ZERO,
        Part("scale", Per.ROW, torch.float32),
    ),
    codes=NIBBLES,
    activations=INTEGERS,
    group=128,
    sum_group=128,
    ratios=FINE_RATIOS,
    source="QServe 3.1",
    gpu=GpuSupport(
        (
            GpuKernel(
                "qoq_g128",
                GpuPacking("qoq_g128", 128, 2, 256, words=GpuWords.STEPS, word_inputs=256, row_scale=True),
                *("nibbles_by_step", "i8", 64),
                words=0.5,
                gemv=True,
                few_rows=True,
                min_unroll=2,
            ),
        )
    ),
)
QOQ_CHANNEL = QoqChannel(
    name="qoq_channel",
    bits=4,
    parts=(CODES, Part("zero", Per.ROW, torch.uint8), Part("scale", Per.ROW, torch.float32)),
    codes=NIBBLES,
    activations=INTEGERS,
    ratios=FINE_RATIOS,
    source="QServe 3.1, one level",
    gpu=GpuSupport(
        (
            GpuKernel(
                "qoq_channel",
                GpuPacking("qoq_channel", 128, 2, 128, GpuCodes.SIGNED_NIBBLES, row_scale=True, row_zero=True),
                *("signed_nibbles", "i8", 64),
                gemv=True,
            ),
        )
    ),
)
