"""How GEMM kernels read packed weights: blocks of inputs, planes, and the types of items, sums and activations."""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.errors import UnsupportedError

GEMV_FORMATS = ("qoq_channel", "qoq_g128", "w8_sym_channel", "w4_asym_g128_int8", "nested_8_4", "mxfp4_a8")
"""Formats with a GEMV kernel."""
BF16_UNPACK_FORMATS = ("w4_asym_g128", "mxfp4")
"""Formats that are unpacked to bf16 one plane at a time, overlapped with MMAs."""
_ITEM_BYTES = {"i8": 1, "i16": 2, "bf16": 2}


@dataclass(frozen=True)
class Layout:
    """The layout of a kernel format.

    item: type as which packed codes are read.
    block: inputs that are packed together.
    planes: dot products (MMA steps along K) per block, each over `row_items` adjacent inputs.
    row_items: items of packed codes per row and block.
    words: 32-bit words of group parameters per row and block; 0 if there are no groups.
    float_x: activations are bf16, else int8.
    float_sum: sums are f32, so that they depend on the order; else int32.
    low_plane: upper and lower nibbles of codes are separate tensors with the same layout.
    """

    item: str
    block: int
    planes: int
    row_items: int
    words: float = 0
    float_x: bool = False
    float_sum: bool = False
    low_plane: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of codes per row and block."""
        return self.row_items * _ITEM_BYTES[self.item]

    @property
    def grouped(self) -> bool:
        """Whether there are parameters per group."""
        return self.words > 0


_LAYOUTS = {
    "qoq_channel": Layout("i8", 128, 2, 64),
    "qoq_g128": Layout("i8", 128, 2, 64, 0.5),
    "w8_sym_channel": Layout("i8", 128, 1, 128),
    "w4_asym_g128": Layout("i16", 256, 4, 64, 2, True, True),
    "w4_asym_g128_int8": Layout("i8", 128, 2, 64, 1, False, True),
    "w4_asym_g128_a8": Layout("i16", 256, 4, 64, 2, False, True),
    "mix_4_8": Layout("i8", 128, 2, 64, 1, False, True),
    "nested_8_4": Layout("i8", 128, 2, 64, 1, False, True, True),
    "mxfp4": Layout("i16", 128, 4, 32, 1, True, True),
    "mxfp4_a8": Layout("i16", 128, 4, 32, 1, False, True),
    "bf16": Layout("bf16", 64, 1, 64, 0, True, True),
}


def layout_of(format: str) -> Layout:
    """The layout of a kernel format. UnsupportedError if there is none."""
    if format not in _LAYOUTS:
        raise UnsupportedError(f"format {format} has no GPU GEMM kernel")
    return _LAYOUTS[format]
