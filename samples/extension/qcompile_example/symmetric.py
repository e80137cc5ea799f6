"""w4_sym_g128: symmetric 4-bit integers with a scale per 128 inputs, for the kernels of w4_asym_g128.

A zero point of 8 everywhere makes symmetric codes asymmetric ones, so no kernel is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats.activations import ActivationFormat
from qcompile.formats.asymmetric import W4_ASYM_G128, AsymmetricGroups
from qcompile.formats.rounding import Parts
from qcompile.formats.weight import Grid, positive, ranges

ZERO = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricGroups(AsymmetricGroups):
    """value = (code - 8) * scale, codes from 1 to 15."""

    def quantize(self, w: Tensor) -> Parts:
        grid = self.fit(w.float(), 1.0)
        return self.encode(grid, grid.round(w.float()), w)

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        low, high = ranges(w, self.group, ratio)
        step = positive(torch.maximum(high, -low) / (15 - ZERO))
        zero = torch.full_like(step, ZERO)
        return Grid(self, self.group, step, zero, zero - 7, zero + 7)

    def cpu_kernel(self, activation: ActivationFormat) -> str:
        return W4_ASYM_G128.cpu_kernel(activation)


W4_SYM_G128 = SymmetricGroups(
    name="w4_sym_g128",
    bits=4,
    parts=W4_ASYM_G128.parts,
    codes=W4_ASYM_G128.codes,
    activations=W4_ASYM_G128.activations,
    group=W4_ASYM_G128.group,
    sum_group=W4_ASYM_G128.sum_group,
    ratios=W4_ASYM_G128.ratios,
    gpu=W4_ASYM_G128.gpu,
)
