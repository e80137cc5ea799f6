"""What a GEMM or GEMV kernel for NVIDIA GPUs computes, and how: its specification.

A KernelSpec names the weight (format, N, K), the epilogue, and a tile. Its `kind` is the kernel that runs the tile.
Specifications without a kernel are refused when they are made. render.py writes the kernel's source; `reference`
computes the same in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qcompile.codegen.gpu.gemm.k_parts import KParts
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS, MMA_MIN_TOKENS, WS_MIN_TOKENS, Tile
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import ACTIVATION_GROUP
from qcompile.formats.gpu import RANGE_ROWS, GpuKernel
from qcompile.formats.registry import gpu_kernel
from qcompile.targets import TUNED_ON

Kind = Literal["gemv", "pipelined", "copied", "unpacked", "warp_specialized"]
"""A kernel: how it overlaps copies, unpacking and products.

gemv: each row of x by itself, without the tensor cores.
pipelined: Triton pipelines the copies; unpacking precedes the products.
copied: bf16 weights, which need no unpacking, are copied while the tensor cores multiply.
unpacked: each warp unpacks the next inputs while the tensor cores multiply.
warp_specialized: producer warps copy to shared memory, consumer warps unpack and multiply.
"""


@dataclass(frozen=True)
class Experts:
    """A grouped GEMM: the weight has the rows of `count` experts, concatenated, and each token has `slots` experts.

    x has one row per slot (`by_slot`) or per token. out is f32 [tokens, slots * columns], rows `stride` elements apart.
    A program takes a block of sorted_slots.BlocksSpec, or in a GEMV one slot. A slot's expert is index[token, slot];
    rows of the index are `index_stride` elements apart.
    """

    count: int
    slots: int
    by_slot: bool
    stride: int
    index_stride: int


@dataclass(frozen=True)
class KernelSpec:
    """out[M, N] = x[M, K] . w[N, K]^T (+ bias) (+ residual) for a weight packed as `format` (pack.py).

    x is bf16 for bf16, mxfp4 and w4_asym_g128, else int8 with a scale per token, or with `x_groups` per group of 128
    inputs (only with float sums); mxfp4_a8 and w4_asym_g128_a8 are the int8 kernels of mxfp4 and w4_asym_g128 weights.
    out and residual have the type `out`. The first `width` columns are stored (0: all N), of which the first `biased`
    have a bias (0: all).

    Epilogues: with `gated` (the name of an activation) rows of gate and of up alternate in blocks of ops.GATE_BLOCK,
    and act(gate) * up is stored, `width` columns; with experts gate is clamped to at most `limit`, up to +-limit, and
    `offset` is added to up. With `amax` (small M, gated) each program also stores the largest magnitude of its part of
    a row, [M, amax_parts], for quantization.

    mix_4_8 has n packed rows, the `wide` 8-bit rows first, and scatters `width` columns to their places. With `experts`
    (tiles without unpack_k and split_k) a row of x is multiplied by its experts, `width` columns each. `inline_asm`
    False renders the same kernel for Triton's interpreter, which has no inline assembly. `multiprocessors` are the
    GPU's.
    """

    format: str
    n: int
    k: int
    tile: Tile
    bias: bool = False
    residual: bool = False
    inline_asm: bool = True
    out: Literal["bf16", "f32"] = "bf16"
    width: int = 0
    biased: int = 0
    x_groups: bool = False
    wide: int = 0
    gated: str = ""
    limit: float | None = None
    offset: float = 0.0
    amax: bool = False
    experts: Experts | None = None
    multiprocessors: int = TUNED_ON.multiprocessors

    def __post_init__(self) -> None:
        _check(self)

    @property
    def bias_rows(self) -> int:
        """Leading rows of the packed weight that have a bias, 0 if all have."""
        return self.biased or (2 * self.width if self.gated else self.width)

    @property
    def layout(self) -> GpuKernel:
        """How the packed weight is read, and what kernels of the format do."""
        return gpu_kernel(self.format)

    @property
    def kind(self) -> Kind:
        """The kernel that runs the tile."""
        if self.tile.gemv:
            return "gemv"
        if self.tile.warp_specialized:
            return "warp_specialized"
        if not self.tile.unpack_k:
            return "pipelined"
        return "copied" if self.layout.is_whole and self.layout.float_x else "unpacked"

    @property
    def gemv(self) -> bool:
        """Whether each row of x is multiplied by itself, without the tensor cores."""
        return self.kind == "gemv"

    @property
    def warp_specialized(self) -> bool:
        """Whether producer warps copy to shared memory and consumer warps unpack and multiply."""
        return self.kind == "warp_specialized"

    @property
    def decode(self) -> bool:
        """Whether this is a kernel of the decode class."""
        return self.tile.tokens <= DECODE_TOKENS

    @property
    def pdl(self) -> bool:
        """Whether the kernel is launched by programmatic dependent launch."""
        return self.tile.prefetch_bytes > 0

    @property
    def persistent(self) -> bool:
        """Whether this is a persistent kernel: one program per multiprocessor, which loops over tiles."""
        return self.tile.persistent and self.inline_asm

    @property
    def mixed(self) -> bool:
        """Whether the weight has both 8-bit and 4-bit rows."""
        return self.layout.mixed

    @property
    def float_sum(self) -> bool:
        """Whether sums are f32 rather than int32, so that they depend on the order."""
        return self.layout.float_sum

    @property
    def packing(self) -> str:
        """The packing of the weight (pack.py)."""
        return self.layout.packing.name

    @property
    def parts(self) -> int:
        """Number of parts of K that are summed separately."""
        return self.tile.sliced_k * self.tile.split_k * self.tile.serial_k

    @property
    def k_parts(self) -> KParts:
        """The parts of K, multiples of blocks that are whole steps of every kernel with unpack_k."""
        block = self.layout.block
        least = 256 // block if self.layout.by_plane and not self.k % 256 else 1
        return KParts(self.k // block, max(self.tile.unroll, least), self.parts)

    @property
    def amax_parts(self) -> int:
        """Partial amax values per row that the kernel can store, one for each part that some warps own; or 0."""
        if self.gemv:
            return self.n // self.tile.rows
        return self.n // 64 if self.warp_specialized and self.decode and self.tile.split_k == 1 else 0

    @property
    def step_words(self) -> int:
        """32-bit words of group parameters per row and step."""
        return int(self.layout.words * self.tile.unroll)

    @property
    def step_bytes(self) -> int:
        """Bytes of shared memory for the weights and activations of one pipeline stage."""
        tile, layout = self.tile, self.layout
        if self.gemv:
            return 0
        if self.warp_specialized:
            codes = 128 if self.mixed else layout.row_bytes * (1 + layout.low_plane)
            x = layout.block * (2 if layout.float_x else 1)
            return tile.rows * (codes + math.ceil(4 * layout.words)) + tile.tokens * (x + 4 * self.x_groups)
        if tile.unpack_k:
            weights = tile.rows * (layout.row_bytes + 4 * layout.words)
            return tile.unroll * int(weights + 2 * tile.tokens * layout.block)
        weight_bytes = tile.rows * layout.row_bytes * (1 + layout.low_plane)
        x_bytes = tile.tokens * layout.block * (2 if layout.float_x else 1)
        return tile.sliced_k * tile.unroll * (weight_bytes + x_bytes)

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """Programs for `tokens` rows of x."""
        return (self.multiprocessors, 1, 1) if self.persistent else self.tile_grid(tokens)

    def tile_grid(self, tokens: int) -> tuple[int, int, int]:
        """Tiles for `tokens` rows of x, along M, N and K."""
        return -(-tokens // self.tile.tokens), -(-self.n // self.tile.rows), self.tile.split_k

    def workspace(self, tokens: int) -> dict[str, tuple[int, torch.dtype]]:
        """Items and type of each split_k buffer, initially zero; launches reset `arrived` and integer sums to zero."""
        if self.tile.split_k == 1:
            return {}
        rows = 64 if self.warp_specialized else self.tile.rows
        tiles = -(-tokens // self.tile.tokens) * (self.n // rows)
        each = rows * self.tile.tokens * (self.tile.split_k if self.float_sum else 1)
        dtype = torch.float32 if self.float_sum else torch.int32
        return {"sums": (tiles * each, dtype), "arrived": (tiles, torch.int32)}


def reference(x: list[Tensor], w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """What a GEMM computes, in float64: x as parts of quantize_activation, w [N, K] dequantized; returns [M, N]."""
    values = x[0].double()
    if len(x) > 1:
        scale = x[1].double()
        values = values * (scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(ACTIVATION_GROUP, 1))
    y = values @ w.double().T
    if bias is not None:
        y = y + bias.double()
    return y if residual is None else y + residual.double()


# ---- which specifications have a kernel ------------------------------------------------------------


def _check(spec: KernelSpec) -> None:
    """UnsupportedError unless the tile divides the weight and there is a kernel for both."""
    spec.layout.packing.check_shape(spec.n, spec.k)
    if spec.x_groups and (spec.layout.float_x or not spec.float_sum):
        raise UnsupportedError(f"{spec.format} takes no activations in groups of 128")
    _check_division(spec)
    tile = spec.tile
    if tile.serial_k > 1 and not _has_serial_k(spec):
        raise UnsupportedError(f"{spec.format} has no kernel with serial_k = {tile.serial_k} for {tile}")
    if spec.gemv and not _has_gemv(spec):
        raise UnsupportedError(f"{spec.format} has no GEMV kernel for {tile}: one program sums all of K")
    _check_epilogue(spec)
    if spec.layout.has_ranges and not spec.warp_specialized and tile.rows > RANGE_ROWS:
        raise UnsupportedError(f"{spec.format} has no kernel for {tile}: powers are of {RANGE_ROWS} rows")
    if spec.experts:
        _check_experts(spec, spec.experts)
    part, prefetch_bytes = spec.k_parts.part_blocks * 32 * spec.layout.row_bytes, tile.prefetch_bytes
    if spec.pdl and (prefetch_bytes > part or prefetch_bytes & (prefetch_bytes - 1)):
        raise UnsupportedError(f"a program of {tile} has {part} bytes of each 32 rows to prefetch")
    if (tile.unpack_k or tile.persistent) and not _overlaps_unpacking(spec):
        raise UnsupportedError(f"{spec.format} has no kernel that overlaps unpacking for {tile}")
    if spec.layout.words * tile.unroll % 1:
        raise UnsupportedError(f"{spec.format} takes two groups a step: {tile}")


def _check_division(spec: KernelSpec) -> None:
    """UnsupportedError unless the tile divides N, and each part of K into whole steps."""
    tile, k_parts = spec.tile, spec.k_parts
    whole = tile.rows in (8, 16, 32) if spec.gemv else tile.rows % 32 == 0
    # In mix_4_8 kernels some warps of the last program may have no rows.
    rows = 64 if spec.mixed and spec.warp_specialized and tile.split_k == 1 else tile.rows
    even = spec.gemv or (k_parts.blocks % tile.unroll == 0 and (tile.sliced_k == 1 or not k_parts.longer))
    filled = k_parts.part_blocks > 0 or (spec.gemv and not spec.float_sum)  # those GEMVs may pad a single step
    if not even or not filled or spec.n % rows or not whole:
        raise UnsupportedError(f"weight [{spec.n}, {spec.k}] in {spec.format} does not divide into {tile}")


def _check_epilogue(spec: KernelSpec) -> None:
    """UnsupportedError unless the kernel can store what is asked for, and to the columns asked for."""
    if spec.amax and not (spec.gated and spec.amax_parts):
        raise UnsupportedError(f"{spec.format} with {spec.tile} stores no amax")
    if spec.gated and (spec.mixed or spec.residual or not spec.width):
        raise UnsupportedError(f"{spec.format} with {spec.width} columns stores no {spec.gated} of pairs of rows")
    if (spec.limit is not None or spec.offset) and not (spec.gated and spec.experts):
        raise UnsupportedError("only experts clamp gates")
    odd_rows = spec.wide % (64 if spec.warp_specialized else spec.tile.rows)
    if odd_rows or (spec.mixed and (spec.pdl > spec.warp_specialized or not spec.width)):
        raise UnsupportedError(f"{spec.tile} has no kernel for {spec.wide} rows of 8 bits and {spec.width} columns")


def _check_experts(spec: KernelSpec, experts: Experts) -> None:
    """UnsupportedError unless each program computes whole tiles of one expert."""
    tile = spec.tile
    if spec.n % (experts.count * tile.rows):
        raise UnsupportedError(f"experts of {spec.n // experts.count} outputs do not divide into {tile}")
    others = spec.mixed or spec.residual or spec.out != "f32" or not spec.width
    if others or tile.unpack_k or tile.split_k > 1 or tile.tokens in range(2, MMA_MIN_TOKENS):
        raise UnsupportedError(f"experts in {spec.format} have no kernel for {tile}")


def _has_gemv(spec: KernelSpec) -> bool:
    """Whether there is a GEMV kernel for such a tile: integer sums, or float sums of integer sums over groups."""
    if spec.tile.split_k > 1 or not spec.layout.gemv:
        return False
    return spec.tile.unroll == 1 if spec.float_sum else spec.tile.sliced_k == 1


def _has_serial_k(spec: KernelSpec) -> bool:
    """Whether there is a serial_k kernel for the tile."""
    tile = spec.tile
    pipelined = not tile.unpack_k and not spec.mixed and not spec.layout.has_ranges
    whole = tile.split_k == tile.sliced_k == 1 and not spec.gemv and not spec.experts
    small = tile.rows * tile.tokens <= 2**14 and tile.warps == 8
    overlapped = tile.unpack_k in (16, 32, 64) and small  # registers hold the sums of the earlier parts, too
    return spec.float_sum and whole and (pipelined or spec.warp_specialized or overlapped)


def _overlaps_unpacking(spec: KernelSpec) -> bool:
    """Whether a kernel that overlaps unpacking with MMAs (unpack_k) supports the tile."""
    tile = spec.tile
    if tile.rows % (16 * tile.warps) or tile.warps % 4 or tile.sliced_k > 1:
        return False
    supported = {"warp_specialized": _has_warp_specialized, "copied": _has_copied, "unpacked": _has_unpacked}
    return spec.kind in supported and supported[spec.kind](spec)


def _has_warp_specialized(spec: KernelSpec) -> bool:
    """Whether the warp-specialized kernel supports the tile."""
    tile, layout = spec.tile, spec.layout
    # Registers hold sums of 256 tokens where nothing is added to them but products.
    many = not layout.float_sum and tile.rows == 128 and tile.tokens == 256 and tile.split_k == 1
    shape = tile.rows == 16 * tile.warps <= 128 and (WS_MIN_TOKENS <= tile.tokens <= 128 or many)
    in_groups = layout.float_sum and not layout.float_x and layout.block == 128
    halves = not tile.token_halves or (in_groups and tile.tokens > 32)
    large = tile.rows == 128 <= tile.tokens and tile.split_k == 1 and not tile.prefetch_bytes
    persistent = not tile.persistent or ((in_groups or not layout.float_sum) and large)
    whole = tile.unroll == (2 if layout.words == 0.5 else 1)
    return layout.warp_specialized and shape and halves and persistent and whole and tile.stages > 1


def _has_copied(spec: KernelSpec) -> bool:
    """Whether two warp groups of the kernel for weights that need no unpacking have registers for the tile."""
    tile = spec.tile
    shape = tile.warps == 8 and tile.tokens in (128, 256) and tile.rows * tile.tokens <= 2**15
    alone = tile.split_k == 1 and not tile.prefetch_bytes
    staged = tile.unroll == 1 and 3 <= tile.stages <= spec.k_parts.part_blocks
    return tile.unpack_k == 64 and shape and staged and (alone or not tile.persistent)


def _has_unpacked(spec: KernelSpec) -> bool:
    """Whether the kernel that unpacks the next inputs during a product supports the tile."""
    tile, layout = spec.tile, spec.layout
    divides = tile.unpack_k in (16, 32, 64) and layout.row_items % tile.unpack_k == 0
    divides = divides and layout.block * tile.unroll >= 256 and tile.tokens >= MMA_MIN_TOKENS
    large = tile.tokens in (128, 256) and tile.split_k == 1 and not tile.prefetch_bytes
    fits = tile.stages == 1 and (large or not tile.persistent)
    return divides and fits and layout.by_plane
