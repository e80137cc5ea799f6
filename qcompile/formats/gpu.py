"""How GPU kernels get a weight format: the packing of a weight, and what the kernels that read it do.

These are facts. The packing functions are in codegen/gpu/gemm/pack.py, which looks them up by `codes` and `words`; the
kernels are rendered from codegen/gpu/templates/gem*.jinja, with the unpacking of templates/unpack/NAME.jinja.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from qcompile.errors import UnsupportedError

BLOCK_ROWS = 32
"""Rows of a block of packed codes."""
MIX_ROWS = 64
"""The 8-bit rows of a mix_4_8 weight, and its 4-bit rows, are padded to a multiple of this number."""
_LARGE_N = 4096
"""Outputs from which a weight is padded to whole tiles of 128 rows."""
RANGE_ROWS = 64
"""Rows that share the flags (sign bits) of mxfp4_int8 ranges: those of one consumer warp group."""
MXFP4_DOWNSCALE = 32
"""log2 by which bf16 kernels scale mxfp4 weights down, so that one product both converts and scales a code."""


class Activations(Protocol):
    """What kernels ask of an activation format (activations.py): its type, and inputs per scale (0: the whole row)."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def group(self) -> int: ...

    @property
    def is_integer(self) -> bool: ...


class GpuCodes(Enum):
    """The order and the bits of packed codes (codegen/gpu/gemm/pack.py)."""

    BF16 = 16
    BYTES = 8
    NIBBLES = "two or four codes of equal distance in an item"
    SIGNED_NIBBLES = "as NIBBLES, in two's complement"
    PERMUTED_E2M1 = "four codes an item, permuted for byte permutations"

    @property
    def bits(self) -> int:
        """Bits per code."""
        return self.value if isinstance(self.value, int) else 4


class GpuWords(Enum):
    """What the 32-bit words of parameters of a group hold (codegen/gpu/gemm/pack.py)."""

    NONE = 0
    STEPS = 1
    BF16_SCALES = 2
    SCALES = 3
    BF16_POWERS = 4
    POWERS_AND_RANGES = 5
    E4M3_SCALES = 6


@dataclass(frozen=True)
class GpuPacking:
    """A packing: `block` inputs are packed together, in items of one code from each of `planes` planes.

    K is padded to a multiple of `inputs`. `words` says what the words of a group hold, of `word_inputs` inputs each;
    `row_scale` and `row_zero` whether there is a scale and a zero point per row; `low` whether there is a second plane
    of codes; `tensor_scale` whether there is a scale of the tensor, by which results are divided.
    """

    name: str
    block: int
    planes: int
    inputs: int
    codes: GpuCodes = GpuCodes.NIBBLES
    words: GpuWords = GpuWords.NONE
    word_inputs: int = 128
    row_scale: bool = False
    row_zero: bool = False
    low: bool = False
    tensor_scale: bool = False

    @property
    def has_ranges(self) -> bool:
        """Whether each group has a second word, the range of its scales."""
        return self.words is GpuWords.POWERS_AND_RANGES

    def padded_inputs(self, k: int) -> int:
        """Inputs of a packed weight of k inputs, in whole blocks; the activations at the padding are zero."""
        return -(-k // self.inputs) * self.inputs

    def check_shape(self, n: int, k: int) -> None:
        """UnsupportedError unless a weight [n, k] can be packed."""
        if n % BLOCK_ROWS or k % self.inputs:
            raise UnsupportedError(
                f"weight [{n}, {k}] in {self.name}: GPU kernels need a multiple of {BLOCK_ROWS} outputs "
                f"and {self.inputs} inputs"
            )


def padded_outputs(n: int) -> int:
    """Rows of a packed weight of n outputs: whole blocks, or whole tiles of 128 rows if n is large."""
    step = BLOCK_ROWS if n <= _LARGE_N else 4 * BLOCK_ROWS
    return n if n % BLOCK_ROWS == 0 else -(-n // step) * step


@dataclass(frozen=True)
class GpuKernel:
    """GEMM kernels, by the name of their format, for weights of a `packing`.

    - `unpack`: the template that unpacks codes. `item`: the type as which packed codes are read; `row_items`: items per
      row and block, which is also the number of inputs per plane.
    - `words`: 32-bit words of parameters per row and block.
    - `float_x`: activations are bf16, else int8. `float_sum`: sums are f32, else int32.
    - `gemv`: there are GEMV kernels. `warp_specialized`: there are warp-specialized ones (sm_90), and with `few_rows`
      also tiles of WS_MIN_TOKENS rows. `by_plane`: there are kernels that unpack one plane at a time to bf16.
    - `serial_few_rows`: summing the parts of K one after the other also pays with 128 rows or fewer.
    - `min_unroll`: least blocks of K per step. `mixed`: rows of two widths, stored at columns that the weight states.
    - `halves`: each plane has two groups of inputs, which are summed apart.
    """

    name: str
    packing: GpuPacking
    unpack: str
    item: str
    row_items: int
    words: float = 0
    float_x: bool = False
    float_sum: bool = False
    gemv: bool = False
    warp_specialized: bool = True
    few_rows: bool = False
    by_plane: bool = False
    serial_few_rows: bool = False
    min_unroll: int = 1
    mixed: bool = False
    halves: bool = False

    @property
    def block(self) -> int:
        """Inputs that are packed together."""
        return self.packing.block

    @property
    def planes(self) -> int:
        """Dot products (MMA steps along K) per block, each over `row_items` adjacent inputs."""
        return self.packing.planes

    @property
    def low_plane(self) -> bool:
        """Whether upper and lower nibbles of codes are separate tensors with the same layout."""
        return self.packing.low

    @property
    def tensor_scale(self) -> bool:
        """Whether results are divided by a scale of the tensor."""
        return self.packing.tensor_scale

    @property
    def grouped(self) -> bool:
        """Whether there are parameters per group."""
        return self.words > 0

    @property
    def has_ranges(self) -> bool:
        """Whether the scales of a group are small multiples of one power of two, its range."""
        return self.packing.has_ranges

    @property
    def row_zeros(self) -> bool:
        """Whether there is a zero point per row, which is subtracted from integer sums at the end."""
        return self.packing.row_zero

    @property
    def is_whole(self) -> bool:
        """Whether codes are operands of the tensor cores as they are."""
        return self.packing.planes == 1

    @property
    def item_bytes(self) -> int:
        """Bytes of an item."""
        return {"i8": 1, "i16": 2, "bf16": 2}[self.item]

    @property
    def row_bytes(self) -> int:
        """Bytes of codes per row and block."""
        return self.row_items * self.item_bytes

    def takes(self, activation: Activations) -> bool:
        """Whether the kernels take such activations; a scale per group needs sums per group."""
        if not activation.is_integer:
            return self.float_x and activation.dtype.itemsize == 2
        return not self.float_x and (self.float_sum or not activation.group)


@dataclass(frozen=True)
class GpuSupport:
    """The kernels of a weight format, each with its own packing, the preferred one first.

    `row_major`: kernels of another kind read the weight row by row (routers of experts, in f32).
    """

    kernels: tuple[GpuKernel, ...] = ()
    row_major: bool = False

    def kernel(self, activation: Activations) -> GpuKernel | None:
        """The kernels for such activations, or None."""
        return next((kernel for kernel in self.kernels if kernel.takes(activation)), None)

    def alternatives(self, activation: Activations) -> tuple[GpuKernel, ...]:
        """Other kernels for such activations, which read other packings."""
        return tuple(kernel for kernel in self.kernels if kernel.takes(activation))[1:]


NO_GPU = GpuSupport()
"""No GPU kernels."""
