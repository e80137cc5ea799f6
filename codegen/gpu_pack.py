"""Packing of weights for the GPU's GEMM templates, from the parts of qcompile.numerics.quantize_weight.

Codes lie in blocks of 32 rows by B inputs: [N / 32][K / B][32 rows][bytes of a row], so that what a program
streams is contiguous. B is 128, for w4_asym_g128 256. Within one row of a block, bit 0 the lowest:

    qoq_channel     byte j (0..63): bits 0-3 q[j] - 8, bits 4-7 q[j + 64] - 8, two's complement
    qoq_g128        byte j (0..63): bits 0-3 q[j], bits 4-7 q[j + 64]
    w4_asym_g128    16 bits j (0..63), little endian: bits 4i .. 4i + 3 are q[j + 64 i]
    w8_sym_channel  byte j (0..127): q[j]

Per group, one 32-bit word each, with rows innermost so that a program's rows are contiguous:

    qoq_g128        [K / 256][N]: bits 0-7 step, 8-15 zero * step of the even group; 16-23, 24-31 of the odd one
    w4_asym_g128    [K / 128][N]: bits 0-15 -(128 + zero) as bf16, which is exact; 16-31 the scale rounded to bf16

Per row: scales f32 [N]; of qoq_channel also zero - 8 as int8 [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError
from qcompile.numerics import FORMATS, Parts

BLOCK_ROWS = 32
BLOCK_INPUTS = {"qoq_channel": 128, "qoq_g128": 128, "w4_asym_g128": 256, "w8_sym_channel": 128}
_PLANES = {"qoq_channel": 2, "qoq_g128": 2, "w4_asym_g128": 4, "w8_sym_channel": 1}


def check_shape(n: int, k: int, format: str) -> None:
    """UnsupportedError unless the GPU kernels have a packing for a weight [n, k] in `format`."""
    if format not in _PLANES:
        raise UnsupportedError(f"format {format} has no GPU packing; there are {', '.join(_PLANES)}")
    inputs = 256 if "g128" in format else 128
    if n % BLOCK_ROWS or k % inputs:
        raise UnsupportedError(
            f"weight [{n}, {k}] in {format}: GPU kernels need a multiple of {BLOCK_ROWS} outputs and {inputs} inputs"
        )


def pack_gpu(parts: Parts, format: str) -> dict[str, Tensor]:
    """The parts of a weight by the names of the kernels' arguments: w, w_scale, w_zero, groups."""
    named = dict(zip(FORMATS[format].roles, parts, strict=True))
    codes = named["codes"]
    check_shape(codes.shape[0], codes.shape[1], format)
    packed = {"w": _pack_codes(codes, format)}
    if format == "w4_asym_g128":
        packed["groups"] = _scale_words(named["scale"], named["zero"])
        return packed
    packed["w_scale"] = named["scale"].float().contiguous()
    if format == "qoq_channel":
        packed["w_zero"] = (named["zero"].to(torch.int16) - 8).to(torch.int8)
    elif format == "qoq_g128":
        packed["groups"] = _step_words(named["group_scale"], named["zero"])
    return packed


def _pack_codes(codes: Tensor, format: str) -> Tensor:
    planes = _PLANES[format]
    n, k = codes.shape
    inputs = BLOCK_INPUTS[format]
    blocks = codes.view(n // BLOCK_ROWS, BLOCK_ROWS, k // inputs, planes, inputs // planes).transpose(1, 2).contiguous()
    if format == "w8_sym_channel":
        return blocks.squeeze(3)
    if format == "qoq_channel":
        blocks = blocks ^ 8  # q - 8 in two's complement
    if planes == 2:
        return (blocks[..., 0, :] | (blocks[..., 1, :] << 4)).view(torch.int8)
    low = blocks[..., 0, :] | (blocks[..., 1, :] << 4)
    high = blocks[..., 2, :] | (blocks[..., 3, :] << 4)
    return torch.stack((low, high), -1).view(torch.int16).squeeze(-1)


def _scale_words(scale: Tensor, zero: Tensor) -> Tensor:
    high = scale.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int32) << 16
    low = (-128 - zero.float()).to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return (high | low).t().contiguous()


def _step_words(step: Tensor, zero: Tensor) -> Tensor:
    half = step.to(torch.int32) | (zero.to(torch.int32) * step.to(torch.int32)) << 8
    return (half[:, 0::2] | half[:, 1::2] << 16).t().contiguous()


def unpack_gpu(packed: dict[str, Tensor], format: str) -> Parts:
    """The parts that pack_gpu was given (tests and inspection); scales of w4_asym_g128 as rounded for the kernels."""
    codes = _unpack_codes(packed["w"], format)
    if format == "w8_sym_channel":
        return [codes, packed["w_scale"]]
    if format == "qoq_channel":
        return [codes, (packed["w_zero"].to(torch.int16) + 8).to(torch.uint8), packed["w_scale"]]
    words = packed["groups"].t().contiguous()
    if format == "w4_asym_g128":
        return [codes, (words & -65536).view(torch.float32), (words & 127).to(torch.uint8)]
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), -1).flatten(1)
    step, shift = halves & 255, halves >> 8
    return [codes, step.to(torch.uint8), (shift // step).to(torch.uint8), packed["w_scale"]]


def _unpack_codes(blocks: Tensor, format: str) -> Tensor:
    if format != "w8_sym_channel":
        bytes_ = blocks.view(torch.uint8).unflatten(-1, (-1, _PLANES[format] // 2))
        nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)  # [..., items, planes]
        blocks = nibbles.transpose(-1, -2).flatten(-2)
        if format == "qoq_channel":
            blocks = blocks ^ 8
    return blocks.transpose(1, 2).flatten(0, 1).flatten(1).contiguous()
