"""Blocks of 32 weights as GGUF stores them (ggml, ggml-common.h), made of the parts of our formats.

- Q4_1: float16 d and m, then 16 bytes; weight = d * code + m. Weights 0 to 15 are the low halves, the others the high.
- Q8_0: float16 d, then 32 signed bytes; weight = d * code.
- MXFP4: the exponent of a power of two, plus 127, then 16 bytes of E2M1 codes in the order of Q4_1.

Codes are kept to the bit. The scales of Q4_1 and Q8_0 are rounded to float16, which moves a weight by one part in 2048.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError
from qcompile.formats.asymmetric import W4_ASYM_G128
from qcompile.formats.mxfp4 import MXFP4
from qcompile.formats.symmetric import W8_SYM_CHANNEL
from qcompile.formats.weight import WeightFormat

BLOCK = 32


@dataclass(frozen=True)
class BlockType:
    """A type of blocks by GGUF's name, and how its bytes uint8 [n, bytes] are made of the parts of a weight by role."""

    name: str
    encode: Callable[[dict[str, Tensor]], Tensor]


def _halves(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [n, k] -> [n, blocks, 16], the first 16 of a block in the low halves."""
    blocks = codes.unflatten(1, (-1, 2, BLOCK // 2))
    return blocks[:, :, 0] | (blocks[:, :, 1] << 4)


def _float16(value: Tensor) -> Tensor:
    """f32 [n, blocks] as the bytes [n, blocks, 2] of float16. Raises UnsupportedError for numbers outside its range."""
    short = value.to(torch.float16)
    if not bool(short.isfinite().all()) or bool(((short == 0) & (value != 0)).any()):
        raise UnsupportedError("export: a scale is too large or too small for the float16 of gguf")
    return short.contiguous()[..., None].view(torch.uint8)


def _blocks(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, -1).flatten(1).contiguous()


def _q4_1(parts: dict[str, Tensor]) -> Tensor:
    count = W4_ASYM_G128.group // BLOCK
    blocks = parts["codes"].shape[1] // BLOCK
    scale, zero = (parts[role].float().repeat_interleave(count, 1)[:, :blocks] for role in ("scale", "zero"))
    return _blocks([_float16(scale), _float16(-zero * scale), _halves(parts["codes"])])


def _q8_0(parts: dict[str, Tensor]) -> Tensor:
    codes = parts["codes"].unflatten(1, (-1, BLOCK))
    scale = parts["scale"][:, None].expand(codes.shape[:2])
    return _blocks([_float16(scale), codes.contiguous().view(torch.uint8)])


def _mxfp4(parts: dict[str, Tensor]) -> Tensor:
    return _blocks([parts["exponent"][..., None], _halves(parts["codes"])])


BLOCKS: dict[WeightFormat, BlockType] = {
    W4_ASYM_G128: BlockType("Q4_1", _q4_1),
    W8_SYM_CHANNEL: BlockType("Q8_0", _q8_0),
    MXFP4: BlockType("MXFP4", _mxfp4),
}
"""The blocks that hold the codes of our formats."""
