"""Blocks of 32 weights as GGUF stores them (ggml, ggml-common.h), made of the parts of our formats.

- Q4_1: float16 d and m, then 16 bytes; weight = d * code + m. Weights 0 to 15 are the low halves, the others the high.
  Groups of several blocks repeat d and m.
- Q8_0: float16 d, then 32 signed bytes; weight = d * code.
- MXFP4: the exponent of a power of two, plus 127, then 16 bytes of E2M1 codes in the order of Q4_1.

Codes are kept to the bit. The scales of Q4_1 and Q8_0 are rounded to float16, which moves a weight by one part in 2048.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError
from qcompile.formats.asymmetric import W4_ASYM_G32, W4_ASYM_G64, W4_ASYM_G128
from qcompile.formats.mxfp4 import MXFP4
from qcompile.formats.symmetric import W8_SYM_CHANNEL, W8_SYM_G32, W8_SYM_G64, W8_SYM_G128
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


def _q4_1(parts: dict[str, Tensor], group: int) -> Tensor:
    blocks = parts["codes"].shape[1] // BLOCK
    scale, zero = (_repeated(parts[role], group, blocks) for role in ("scale", "zero"))
    return _blocks([_float16(scale), _float16(-zero * scale), _halves(parts["codes"])])


def _q8_0(parts: dict[str, Tensor], group: int) -> Tensor:
    """group: inputs that share a scale; 0 is a row."""
    codes = parts["codes"].unflatten(1, (-1, BLOCK))
    blocks, scale = codes.shape[1], parts["scale"]
    scale = _repeated(scale, group, blocks) if group else scale[:, None].expand(-1, blocks)
    return _blocks([_float16(scale), codes.contiguous().view(torch.uint8)])


def _repeated(part: Tensor, group: int, blocks: int) -> Tensor:
    """A part [n, groups] of each of the blocks [n, blocks] in its groups."""
    return part.float().repeat_interleave(group // BLOCK, 1)[:, :blocks]


def _mxfp4(parts: dict[str, Tensor]) -> Tensor:
    return _blocks([parts["exponent"][..., None], _halves(parts["codes"])])


BLOCKS: dict[WeightFormat, BlockType] = {
    **{kind: BlockType("Q4_1", partial(_q4_1, group=kind.group)) for kind in (W4_ASYM_G128, W4_ASYM_G64, W4_ASYM_G32)},
    W8_SYM_CHANNEL: BlockType("Q8_0", partial(_q8_0, group=0)),
    **{kind: BlockType("Q8_0", partial(_q8_0, group=kind.group)) for kind in (W8_SYM_G128, W8_SYM_G64, W8_SYM_G32)},
    MXFP4: BlockType("MXFP4", _mxfp4),
}
"""The blocks that hold the codes of our formats."""
