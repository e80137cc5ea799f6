"""nvfp4: E2M1 elements with an E4M3 scale per 16 inputs and one f32 scale per tensor (NVIDIA; compressed-tensors)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats.activations import BF16, INTEGERS
from qcompile.formats.blocks import NIBBLES
from qcompile.formats.elements import E2M1, e2m1_codes, e2m1_round, e2m1_values
from qcompile.formats.gpu import GpuKernel, GpuPacking, GpuSupport, GpuWords
from qcompile.formats.rounding import Parts, by_group, spread
from qcompile.formats.weight import CODES, Grid, Part, Per, WeightFormat, positive

E4M3_MAX = 448.0
_TOP = E2M1[-1]
_PROBED = 64
"""Groups that are tested first for an exact grid; ordinary weights already miss it there."""


def e4m3_bits(x: Tensor) -> Tensor:
    """f32 in 0..448 -> the nearest E4M3 number's bits, uint8."""
    return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_values(bits: Tensor) -> Tensor:
    """The f32 values of E4M3 bits, uint8."""
    return bits.view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, kw_only=True, eq=False)
class Nvfp4(WeightFormat):
    """value = E2M1 element * (group scale / tensor scale), in f32, as compressed-tensors computes it."""

    def quantize(self, w: Tensor) -> Parts:
        """w [N, K] rounded to nearest. Weights that already lie on such a grid keep their values exactly."""
        w = w.float()
        exact = self._exact(w)
        if exact is not None:
            return exact
        grid = self.fit(w, 1.0)
        return self.encode(grid, grid.round(w), w)

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, group_scale, scale = parts
        return e2m1_values(codes) * spread(e4m3_values(group_scale) / scale, self.group, k)

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        largest = by_group(w.float(), self.group).abs().amax(-1)
        scale = positive(E4M3_MAX * _TOP / positive(largest.max())).reshape(1)
        step = e4m3_values(e4m3_bits(largest * ratio / _TOP * scale)) / scale
        step = positive(step)
        none = torch.zeros_like(step)
        return Grid(self, self.group, step, none, none, none, scale)

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        assert grid.outer is not None
        codes = e2m1_codes(values / grid.spread(grid.step, values.shape[1]))
        return [codes, e4m3_bits(grid.step * grid.outer), grid.outer]

    def nearest(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return e2m1_round(w / step) * step

    def _exact(self, w: Tensor) -> Parts | None:
        """Parts that represent w exactly, with a largest group scale above 224; None if there are no such parts.

        The tensor scale is a quotient of a product of an element and a group scale by the largest weight. Its
        neighbours are tried too, because that product was rounded.
        """
        grouped = by_group(w, self.group)
        largest = grouped.abs().amax(-1)
        most = largest.max()
        if not bool(most > 0) or not bool(torch.isfinite(most)):
            return None
        probed = largest.flatten()[:_PROBED].nonzero().flatten()
        few = grouped.flatten(0, 1)[probed].unsqueeze(0)
        for top in (_TOP, 4.0):
            for bits in range(0x76, 0x7F):
                near = top * e4m3_values(torch.tensor([bits], dtype=torch.uint8, device=w.device)) / most
                for scale in _neighbours(near):
                    if self._exact_groups(few, scale) is None:
                        continue
                    exact = self._exact_groups(grouped, scale)
                    if exact is not None:
                        codes, group_scale = exact
                        return [codes.flatten(1)[:, : w.shape[1]].contiguous(), group_scale, scale]
        return None

    def _exact_groups(self, grouped: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
        """Codes and group scales of groups [N, groups, group] for a tensor scale, or None if one has no exact ones."""
        largest = grouped.abs().amax(-1)
        codes = torch.zeros_like(grouped, dtype=torch.uint8)
        group_scale = e4m3_bits(torch.zeros_like(largest))
        open_groups = largest > 0
        for top in sorted(E2M1[1:], reverse=True):
            bits = e4m3_bits(largest / top * scale)
            step = e4m3_values(bits) / scale
            tried = e2m1_codes(grouped / positive(step)[..., None])
            exact = (e2m1_values(tried) * step[..., None] == grouped).all(-1) & open_groups
            codes = torch.where(exact[..., None], tried, codes)
            group_scale = torch.where(exact, bits, group_scale)
            open_groups = open_groups & ~exact
            if not bool(open_groups.any()):
                return codes, group_scale
        return None


def _neighbours(scale: Tensor) -> list[Tensor]:
    """f32 [1] -> it and the two numbers on either side of it."""
    bits = scale.view(torch.int32)
    return [(bits + step).view(torch.float32) for step in (0, 1, -1, 2, -2)]


_GPU_ITEMS = GpuPacking("nvfp4", 128, 4, 128, words=GpuWords.E4M3_SCALES, word_inputs=64, tensor_scale=True)
_GPU_KERNELS = (
    GpuKernel(
        "nvfp4_a8",
        _GPU_ITEMS,
        *("e2m1_halves", "i16", 32),
        words=2,
        float_sum=True,
        warp_specialized=False,
        halves=True,
    ),
    GpuKernel(
        "nvfp4",
        _GPU_ITEMS,
        *("e2m1_by_e4m3", "i16", 32),
        words=2,
        float_x=True,
        float_sum=True,
        warp_specialized=False,
    ),
)
NVFP4 = Nvfp4(
    name="nvfp4",
    bits=4,
    parts=(CODES, Part("group_scale", Per.GROUP, torch.uint8), Part("scale", Per.TENSOR, torch.float32)),
    codes=NIBBLES,
    activations=(*INTEGERS, BF16),
    group=16,
    sum_group=32,
    ratios=(1.0, 0.95, 0.9, 0.85, 0.8, 1.5),
    source="NVIDIA; compressed-tensors",
    expert_fallback="mxfp4",
    cpu_headers=("gemm_nvfp4.h",),
    gpu=GpuSupport(_GPU_KERNELS),
)
