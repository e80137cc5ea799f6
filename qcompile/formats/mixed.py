"""mix_4_8: weights with symmetric 8-bit and asymmetric 4-bit output features, in groups of 128 inputs.

Source: MixLLM 3.1 and 3.3. Which rows have 8 bits is decided before rounding: a mask is part of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError
from qcompile.formats.activations import INTEGERS
from qcompile.formats.asymmetric import W4_ASYM_G128, AsymmetricGroups
from qcompile.formats.blocks import NIBBLES
from qcompile.formats.gpu import GpuKernel, GpuPacking, GpuSupport, GpuWords
from qcompile.formats.rounding import Parts, by_group, symmetric
from qcompile.formats.weight import (
    CODES,
    FINE_RATIOS,
    GROUP_SCALE,
    GROUP_ZERO,
    INT8_MAX,
    Grid,
    Part,
    Per,
    Rounding,
    positive,
    ranges,
)

EIGHT_BIT_ZERO = 128
"""Zero point of 8-bit codes, which are stored unsigned, as the dot product requires."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixed(AsymmetricGroups):
    """value = (code - zero) * scale in both widths: 8-bit rows have codes 1..255 and zero 128."""

    def quantize(self, w: Tensor) -> Parts:
        """UnsupportedError: which rows have 8 bits must be known."""
        raise UnsupportedError(f"weights in {self.name} are rounded with a mask of their 8-bit rows")

    def quantize_rows(self, w: Tensor, wide: Tensor) -> Parts:
        """w [N, K], wide bool [N] -> codes uint8 [N, K], scale f32 [N, groups], zero uint8 [N, groups], wide."""
        codes, scale, zero = W4_ASYM_G128.quantize(w)
        eight, eight_scale = symmetric(by_group(w.float(), self.group), INT8_MAX)
        eight_codes = (eight.to(torch.int16) + EIGHT_BIT_ZERO).to(torch.uint8).flatten(1)[:, : w.shape[1]]
        marked = wide[:, None]
        return [
            torch.where(marked, eight_codes, codes),
            torch.where(marked, eight_scale.squeeze(-1), scale),
            torch.where(marked, torch.full_like(zero, EIGHT_BIT_ZERO), zero),
            wide,
        ]

    def rounding(self, wide: Tensor | None = None) -> Rounding:
        if wide is None:
            raise UnsupportedError(f"weights in {self.name} are rounded with a mask of their 8-bit rows")
        return Rounding(partial(self._fit_rows, wide), self.ratios)

    def _fit_rows(self, wide: Tensor, w: Tensor, ratio: Tensor | float) -> Grid:
        """Rows marked `wide` are symmetric 8-bit, stored with zero point 128; the others asymmetric 4-bit."""
        narrow = W4_ASYM_G128.fit(w, ratio)
        low, high = ranges(w, self.group, ratio)
        step = positive(torch.maximum(high, -low) / INT8_MAX)
        rows = wide[:, None]
        return Grid(
            self,
            self.group,
            torch.where(rows, step, narrow.step),
            narrow.zero.masked_fill(rows, EIGHT_BIT_ZERO),
            narrow.low.masked_fill(rows, EIGHT_BIT_ZERO - INT8_MAX),
            narrow.high.masked_fill(rows, EIGHT_BIT_ZERO + INT8_MAX),
            wide,
        )

    def grid_of(self, parts: Parts) -> Grid | None:
        _, scale, zero, wide = parts
        bottom = torch.zeros_like(scale)
        low = bottom.masked_fill(wide[:, None], EIGHT_BIT_ZERO - INT8_MAX)
        high = (bottom + 15).masked_fill(wide[:, None], EIGHT_BIT_ZERO + INT8_MAX)
        return Grid(self, self.group, scale, zero.float(), low, high, wide)

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        assert grid.outer is not None
        return [*super().encode(grid, values, w), grid.outer]

    def packed_bytes(self, n: int, k: int) -> dict[str, int]:
        """UnsupportedError: sizes depend on the mask (formats/mixed_layout.py)."""
        raise UnsupportedError(f"the size of weights in {self.name} depends on the mask of their 8-bit rows")

    def pack(self, parts: Parts) -> dict[str, Tensor]:
        """UnsupportedError: rows are packed in another order (formats/mixed_layout.py)."""
        raise UnsupportedError(f"weights in {self.name} are packed by a layout of their rows")

    def unpack(self, blobs: dict[str, Tensor], n: int, k: int) -> Parts:
        """UnsupportedError: the order of the rows is not known."""
        raise UnsupportedError(f"weights in {self.name} cannot be unpacked without the mask of their 8-bit rows")


def worst_rows(w: Tensor, fraction: float) -> Tensor:
    """bool [N]: the `fraction` of w's rows [N, K] with the largest squared 4-bit rounding error; needs no data."""
    error = W4_ASYM_G128.dequantize(W4_ASYM_G128.quantize(w), w.shape[1]) - w
    marked = torch.zeros(w.shape[0], dtype=torch.bool, device=w.device)
    marked[error.square().sum(1).topk(round(fraction * w.shape[0])).indices] = True
    return marked


MIX_4_8 = Mixed(
    name="mix_4_8",
    bits=8,
    parts=(CODES, GROUP_SCALE, GROUP_ZERO, Part("wide", Per.ROW, torch.bool)),
    codes=NIBBLES,
    activations=INTEGERS,
    group=128,
    sum_group=128,
    ratios=FINE_RATIOS,
    source="MixLLM 3.1",
    marks_rows=True,
    expert_fallback=W4_ASYM_G128.name,
    gpu=GpuSupport(
        (
            GpuKernel(
                "mix_4_8",
                GpuPacking("mix_4_8", 128, 2, 128, words=GpuWords.SCALES),
                *("nibbles", "i8", 64),
                words=1,
                float_sum=True,
                few_rows=True,
                mixed=True,
            ),
        )
    ),
)
