"""Packing of weights for CPU kernels: blocks of 16 rows.

Rows are grouped in blocks of 16 (one 512-bit register of int32 sums), inputs in blocks of 32; both are padded with zero
weights. All instruction sets use the same packing:

    f32     [row block][k][16 rows]
    bf16    [row block][k / 2][16 rows][2 inputs]
    int8    [row block][k / 4][16 rows][4 inputs], code + 128, since the dot product takes unsigned operands
    4 bits  [row block][k / 8][16 rows][4 bytes]: in byte j of b, input 8b + j is the low nibble, 8b + 4 + j the high
    3 bits  [row block][k / 32][3][16 rows][4 bytes]: the upper two bits of 4 such lines in two, the lowest in one

A weight with several codes per weight (nested) has one such plane for each. Other parts are [rows] per row, and [row
block][group][16 rows] per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats.rounding import Shape

ROW_BLOCK = 16
K_BLOCK = 32
BLOB_BYTES = 64
"""Blobs are zero-padded to multiples of this many bytes."""


def padded_rows(n: int) -> int:
    """Number of rows of a packed weight with n output features."""
    return -(-n // ROW_BLOCK) * ROW_BLOCK


def padded_inputs(k: int) -> int:
    """Number of inputs of a packed weight with k inputs, and of the activations it is multiplied with."""
    return -(-k // K_BLOCK) * K_BLOCK


def blob_bytes(size: int) -> int:
    """Size in bytes of a blob with `size` bytes of content."""
    return -(-size // BLOB_BYTES) * BLOB_BYTES


def as_blob(t: Tensor) -> Tensor:
    """The bytes of `t`, row-major, as flat uint8 zero-padded to a multiple of 64."""
    flat = t.contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOB_BYTES))


def pack_vector(value: Tensor) -> Tensor:
    """A vector [N] as an f32 blob padded to whole row blocks: biases, norm weights, rotary frequencies."""
    return as_blob(torch.nn.functional.pad(value.float(), (0, padded_rows(value.shape[0]) - value.shape[0])))


def packed_vector_bytes(n: int) -> int:
    """Size in bytes of pack_vector for n values."""
    return 4 * padded_rows(n)


@dataclass(frozen=True)
class CodeLayout:
    """The order of a plane of codes: `inputs` adjacent inputs of a row are contiguous. A byte is code + `offset`."""

    dtype: torch.dtype
    inputs: int
    offset: int = 0

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 8 * self.dtype.itemsize

    def bytes(self, n: int, k: int) -> int:
        """Bytes of the packed codes of a weight [n, k]."""
        return padded_rows(n) * padded_inputs(k) * self.bits // 8

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [N, K] in packed order, padded with zero weights."""
        if self.offset:
            codes = (codes.to(torch.int16) + self.offset).to(torch.uint8)
        return self._interleave(_padded(codes, self.offset).unflatten(0, (-1, ROW_BLOCK)))

    def unpack(self, blob: Tensor, n: int, k: int) -> Tensor:
        """Codes [n, k] from a blob of packed codes."""
        codes = self._separate(blob[: self.bytes(n, k)], padded_rows(n), padded_inputs(k))
        if self.offset:
            codes = (codes.to(torch.int16) - self.offset).to(self.dtype)
        return codes[:n, :k]

    def _interleave(self, blocks: Tensor) -> Tensor:
        """[row block, 16, K] -> packed order."""
        return blocks.unflatten(2, (-1, self.inputs)).transpose(1, 2)

    def _separate(self, flat: Tensor, rows: int, inputs: int) -> Tensor:
        """Bytes in packed order -> [rows, inputs]."""
        stored = flat.view(torch.uint8 if self.offset else self.dtype)
        return stored.view(-1, inputs // self.inputs, ROW_BLOCK, self.inputs).transpose(1, 2).reshape(rows, inputs)


@dataclass(frozen=True)
class NibbleLayout(CodeLayout):
    """The order of a plane of 4-bit codes: a byte holds two inputs that are four apart."""

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4

    def _interleave(self, blocks: Tensor) -> Tensor:
        nibbles = blocks.unflatten(2, (-1, 2, 4))  # [row block, 16, K/8, low or high, 4]
        return (nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)).transpose(1, 2)

    def _separate(self, flat: Tensor, rows: int, inputs: int) -> Tensor:
        packed = flat.view(-1, inputs // 8, ROW_BLOCK, 4).transpose(1, 2)
        return torch.stack((packed & 15, packed >> 4), -2).reshape(rows, inputs)


@dataclass(frozen=True)
class ThreeBitLayout(NibbleLayout):
    """The order of a plane of 3-bit codes: 4 lines of nibbles in 3.

    Of lines 0 and 1, the upper two bits of each nibble's code are bits 2 and 3, and bits 0 and 1, of a nibble of the
    first line; of lines 2 and 3 likewise of the second. The lowest bit of line l is bit l of a nibble of the third.
    """

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 3

    def _interleave(self, blocks: Tensor) -> Tensor:
        lines = super()._interleave(blocks).unflatten(1, (-1, 4))  # [row block, K/32, line, 16, 4]
        upper, lowest = (lines >> 1 & 0x33).unflatten(2, (2, 2)), lines & 0x11
        pairs = upper[:, :, :, 0] << 2 | upper[:, :, :, 1]
        single = lowest[:, :, 0] | lowest[:, :, 1] << 1 | lowest[:, :, 2] << 2 | lowest[:, :, 3] << 3
        return torch.cat((pairs, single.unsqueeze(2)), 2)

    def _separate(self, flat: Tensor, rows: int, inputs: int) -> Tensor:
        stored = flat.view(-1, 3, ROW_BLOCK, 4)  # [row block * K/32, line, 16, 4]
        lines = [
            (stored[:, line // 2] >> (0 if line % 2 else 2) & 0x33) << 1 | stored[:, 2] >> line & 0x11
            for line in range(4)
        ]
        return super()._separate(torch.stack(lines, 1).flatten(), rows, inputs)


F32_CODES = CodeLayout(torch.float32, 1)
BF16_CODES = CodeLayout(torch.bfloat16, 2)
BYTES = CodeLayout(torch.int8, 4, 128)
NIBBLES = NibbleLayout(torch.uint8, 8)
THREE_BITS = ThreeBitLayout(torch.uint8, 8)


def _padded(codes: Tensor, fill: int) -> Tensor:
    """Codes [N, K], padded with `fill` to whole blocks of rows and inputs."""
    n, k = codes.shape
    pad = (0, padded_inputs(k) - k, 0, padded_rows(n) - n)
    return torch.nn.functional.pad(codes, pad, value=fill) if any(pad) else codes


def pack_side(part: Tensor) -> Tensor:
    """[N] or [N, groups] -> per row or [row block][group][16]."""
    n = part.shape[0]
    pad = padded_rows(n) - n
    if part.dim() == 1:
        return torch.nn.functional.pad(part, (0, pad))
    return torch.nn.functional.pad(part, (0, 0, 0, pad)).unflatten(0, (-1, ROW_BLOCK)).transpose(1, 2)


def side_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of pack_side for a part of this shape and dtype."""
    return padded_rows(shape[0]) * (shape[1] if len(shape) > 1 else 1) * dtype.itemsize


def unpack_side(blob: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The part that pack_side packed into `blob`."""
    rows, groups = padded_rows(shape[0]), shape[1] if len(shape) > 1 else 1
    values = blob[: side_bytes(shape, dtype)].view(dtype)
    if len(shape) > 1:
        values = values.view(-1, groups, ROW_BLOCK).transpose(1, 2).reshape(rows, groups)
    return values[: shape[0]]
