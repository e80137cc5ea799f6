"""f32 and bf16: weights that are stored as floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats import activations
from qcompile.formats.blocks import BF16_CODES, F32_CODES
from qcompile.formats.gpu import GpuCodes, GpuKernel, GpuPacking, GpuSupport
from qcompile.formats.rounding import Parts
from qcompile.formats.weight import Part, Per, WeightFormat

TABLE_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""Types of the numbers of embedding tables; rows of these tables are not packed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Floats(WeightFormat):
    """Floating-point numbers of the type of the codes."""

    def quantize(self, w: Tensor) -> Parts:
        return [w.to(self.codes.dtype)]

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        return parts[0].float()


F32 = Floats(
    name="f32",
    bits=32,
    parts=(Part("codes", Per.WEIGHT, torch.float32),),
    codes=F32_CODES,
    activations=(activations.F32,),
    gpu=GpuSupport(row_major=True),
)
BF16 = Floats(
    name="bf16",
    bits=16,
    parts=(Part("codes", Per.WEIGHT, torch.bfloat16),),
    codes=BF16_CODES,
    activations=(activations.BF16,),
    gpu=GpuSupport(
        (
            GpuKernel(
                "bf16",
                GpuPacking("bf16", 64, 1, 64, GpuCodes.BF16),
                *("whole", "bf16", 64),
                float_x=True,
                float_sum=True,
                warp_specialized=False,
                serial_few_rows=True,
            ),
        )
    ),
)
