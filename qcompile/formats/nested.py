"""nested_8_4: 8-bit weights with upper nibbles that alone are a w4_asym_g128 weight (QuantSpec IV, on weights)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcompile.formats.activations import INTEGERS
from qcompile.formats.asymmetric import W4_ASYM_G128, AsymmetricGroups
from qcompile.formats.blocks import NIBBLES
from qcompile.formats.gpu import GpuKernel, GpuPacking, GpuSupport, GpuWords
from qcompile.formats.rounding import Parts, spread
from qcompile.formats.weight import CODES, GROUP_SCALE, GROUP_ZERO, Grid, Part, Per

NESTED_STEPS = 8
"""Steps of a nested weight's lower nibble per step of its upper nibble."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Nested(AsymmetricGroups):
    """value = (upper nibble - zero + (lower nibble - 8) / 8) * scale."""

    def quantize(self, w: Tensor) -> Parts:
        upper = W4_ASYM_G128.quantize(w)
        return [*upper, self.lower_nibbles(w, *upper)]

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, scale, zero, low = parts
        return super().dequantize([codes.float() + (low.float() - 8) / NESTED_STEPS, scale, zero], k)

    def lower_nibbles(self, w: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The lower nibbles uint8 [N, K] that bring a w4_asym_g128 weight closest to w [N, K].

        A lower nibble l adds (l - 8) / 8 of the upper nibble's step, so it reaches one step down and 7/8 of a step up.
        The upper nibble may be rounded away from the nearest code, as in GPTQ, and the 8-bit value can still be nearest
        to w.
        """
        step = spread(scale, self.group, w.shape[1])
        left = w.float() / step - (codes.float() - spread(zero.float(), self.group, w.shape[1]))
        return (torch.round(left * NESTED_STEPS).clamp_(-8, 7) + 8).to(torch.uint8)

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        """The grid is that of the upper nibble; the lower nibble corrects the value toward w."""
        upper = super().encode(grid, values, w)
        return [*upper, self.lower_nibbles(w, *upper)]

    def limits(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Only codes from which a lower nibble can still reach w."""
        code = w / step + zero
        reach = 1 - 1 / NESTED_STEPS
        return torch.ceil(code - reach).clamp(low, high), torch.floor(code + 1).clamp(low, high)


NESTED_8_4 = Nested(
    name="nested_8_4",
    bits=8,
    parts=(CODES, GROUP_SCALE, GROUP_ZERO, Part("low", Per.WEIGHT, torch.uint8)),
    codes=NIBBLES,
    activations=INTEGERS,
    group=128,
    sum_group=128,
    ratios=(1.0, 0.98, 0.96, 0.94, 0.92, 0.9),  # clipping also affects the 8-bit value
    source="QuantSpec IV, on weights",
    upper=W4_ASYM_G128,
    gpu=GpuSupport(
        (
            GpuKernel(
                "nested_8_4",
                GpuPacking("nested_8_4", 128, 2, 128, words=GpuWords.SCALES, low=True),
                *("nested", "i8", 64),
                words=1,
                float_sum=True,
                gemv=True,
            ),
        )
    ),
)
NESTED_4 = replace(W4_ASYM_G128, name="nested_4", stored=NESTED_8_4, read=W4_ASYM_G128)
"""The upper nibbles of a nested_8_4 weight."""
