"""GEMM and GEMV kernels for NVIDIA GPUs: their specification, and rendering from gpu/templates/gem*.jinja.

A KernelSpec says what to compute and how to tile it; `reference` computes the same in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu.compile import Argument, Compiled, Kernel, compile_kernel
from qcompile.codegen.gpu.gemm.pack import MXFP4_DOWNSCALE, RANGE_ROWS, check_shape
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS, MMA_MIN_TOKENS, WS_MIN_TOKENS, Tile
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import ACTIVATION_GROUP
from qcompile.ops import GATE_BLOCK
from qcompile.targets import TUNED_ON


@dataclass(frozen=True)
class _Layout:
    item: str  # type as which packed codes are read
    block: int  # inputs that are packed together
    planes: int  # dot products per block, each over row_items adjacent inputs
    row_items: int  # items per row and block
    words: float = 0  # 32-bit words of parameters per row and block
    float_x: bool = False  # bf16 activations; else int8
    float_sum: bool = False  # f32 sums; else int32
    low_plane: bool = False  # a second tensor of codes, laid out as the first


_LAYOUTS = {
    "qoq_channel": _Layout("i8", 128, 2, 64),
    "qoq_g128": _Layout("i8", 128, 2, 64, 0.5),
    "w8_sym_channel": _Layout("i8", 128, 1, 128),
    "w4_asym_g128": _Layout("i16", 256, 4, 64, 2, True, True),
    "w4_asym_g128_int8": _Layout("i8", 128, 2, 64, 1, False, True),
    "w4_asym_g128_a8": _Layout("i16", 256, 4, 64, 2, False, True),
    "mix_4_8": _Layout("i8", 128, 2, 64, 1, False, True),
    "nested_8_4": _Layout("i8", 128, 2, 64, 1, False, True, True),
    "mxfp4": _Layout("i16", 128, 4, 32, 1, True, True),
    "mxfp4_a8": _Layout("i16", 128, 4, 32, 1, False, True),
    "bf16": _Layout("bf16", 64, 1, 64, 0, True, True),
}


@dataclass(frozen=True)
class Experts:
    """A grouped GEMM: the weight has the rows of `count` experts, concatenated, and each token has `slots` experts.

    x has one row per slot (`by_slot`) or per token. out is f32 [tokens, slots * columns], rows `stride` elements apart.
    A program takes a block of gpu_router.BlocksSpec, or in a GEMV one slot, whose expert is index[token, slot], with
    rows `index_stride` elements apart.
    """

    count: int
    slots: int
    by_slot: bool
    stride: int
    index_stride: int


GEMV_FORMATS = ("qoq_channel", "qoq_g128", "w8_sym_channel", "w4_asym_g128_int8", "nested_8_4", "mxfp4_a8")
"""Formats with a GEMV kernel."""
BF16_UNPACK_FORMATS = ("w4_asym_g128", "mxfp4")
"""Formats that are unpacked to bf16 one plane at a time, overlapped with MMAs."""
_ITEM_BYTES = {"i8": 1, "i16": 2, "bf16": 2}


@dataclass(frozen=True)
class KernelSpec:
    """out[M, N] = x[M, K] . w[N, K]^T (+ bias) (+ residual) for a weight packed as `format` (gpu_pack).

    x is bf16 for bf16, mxfp4 and w4_asym_g128, else int8 with a scale per token, or with `x_groups` per group of 128
    inputs (only with float sums); mxfp4_a8 and w4_asym_g128_a8 are the int8 kernels of mxfp4 and w4_asym_g128 weights.
    out and residual have the type `out`. The first `width` columns are stored (0: all N).

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
    x_groups: bool = False
    wide: int = 0
    gated: str = ""
    limit: float | None = None
    offset: float = 0.0
    amax: bool = False
    experts: Experts | None = None
    multiprocessors: int = TUNED_ON.multiprocessors

    def __post_init__(self) -> None:
        if self.x_groups and (self.float_x or not self.float_sum):
            raise UnsupportedError(f"{self.format} takes no activations in groups of 128")
        check_shape(self.n, self.k, self.packing)
        whole = self.tile.rows in (8, 16, 32) if self.gemv else self.tile.rows % 32 == 0
        # In mix_4_8 kernels some warps of the last program may have no rows.
        rows = 64 if self.mixed and self.warp_specialized and self.tile.split_k == 1 else self.tile.rows
        even = self.gemv or (self.blocks % self.tile.unroll == 0 and (self.tile.sliced_k == 1 or not self.longer_parts))
        filled = self.part_blocks > 0 or (self.gemv and not self.float_sum)  # those GEMVs may pad a single step
        if not even or not filled or self.n % rows or not whole:
            raise UnsupportedError(f"weight [{self.n}, {self.k}] in {self.format} does not divide into {self.tile}")
        if self.tile.serial_k > 1 and not self._is_serial_k_supported():
            raise UnsupportedError(f"{self.format} has no kernel with serial_k = {self.tile.serial_k} for {self.tile}")
        if self.gemv and not self._is_gemv_supported():
            raise UnsupportedError(f"{self.format} has no GEMV kernel for {self.tile}: one program sums all of K")
        if self.amax and not (self.gated and self.amax_parts):
            raise UnsupportedError(f"{self.format} with {self.tile} stores no amax")
        if self.gated and (self.mixed or self.residual or not self.width):
            raise UnsupportedError(f"{self.format} with {self.width} columns stores no {self.gated} of pairs of rows")
        if (self.limit is not None or self.offset) and not (self.gated and self.experts):
            raise UnsupportedError("only experts clamp gates")
        if self.wide % (64 if self.warp_specialized else self.tile.rows) or (
            self.mixed and (self.pdl > self.warp_specialized or not self.width)
        ):
            raise UnsupportedError(f"{self.wide} rows of 8 bits, {self.width} columns, do not go with {self.tile}")
        if self.format == "mxfp4_a8" and not self.warp_specialized and self.tile.rows > RANGE_ROWS:
            raise UnsupportedError(f"{self.format} has no kernel for {self.tile}: powers are of {RANGE_ROWS} rows")
        if self.experts:
            self._check_experts(self.experts)
        part, prefetch_bytes = self.part_blocks * 32 * self.row_bytes, self.tile.prefetch_bytes
        if self.pdl and (prefetch_bytes > part or prefetch_bytes & (prefetch_bytes - 1)):
            raise UnsupportedError(f"a program of {self.tile} has {part} bytes of each 32 rows to prefetch")
        if (self.tile.unpack_k or self.tile.persistent) and not self._is_unpack_k_supported():
            raise UnsupportedError(f"{self.format} has no kernel that overlaps unpacking for {self.tile}")
        if _LAYOUTS[self.format].words * self.tile.unroll % 1:
            raise UnsupportedError(f"{self.format} takes two groups a step: {self.tile}")

    def _check_experts(self, experts: Experts) -> None:
        """UnsupportedError unless each program computes whole tiles of one expert."""
        if self.n % (experts.count * self.tile.rows):
            raise UnsupportedError(f"experts of {self.n // experts.count} outputs do not divide into {self.tile}")
        others = self.mixed or self.residual or self.out != "f32" or not self.width
        if others or self.tile.unpack_k or self.tile.split_k > 1 or self.tile.tokens in range(2, MMA_MIN_TOKENS):
            raise UnsupportedError(f"experts in {self.format} have no kernel for {self.tile}")

    def _is_gemv_supported(self) -> bool:
        """Whether there is a GEMV kernel for such a tile: integer sums, or float sums of integer sums over groups."""
        if self.tile.split_k > 1 or self.format not in GEMV_FORMATS:
            return False
        return self.tile.unroll == 1 if self.float_sum else self.tile.sliced_k == 1

    def _is_serial_k_supported(self) -> bool:
        """Whether there is a serial_k kernel for the tile."""
        pipelined = not self.tile.unpack_k and not self.mixed and self.format != "mxfp4_a8"  # by Triton
        whole = self.tile.split_k == self.tile.sliced_k == 1 and not self.gemv and not self.experts
        small = self.tile.rows * self.tile.tokens <= 2**14 and self.tile.warps == 8
        overlapped = self.tile.unpack_k in (16, 32, 64) and small  # registers hold sums of the parts before, too
        return self.float_sum and whole and (pipelined or self.warp_specialized or overlapped)

    def _is_unpack_k_supported(self) -> bool:
        """Whether a kernel that overlaps unpacking with MMAs (unpack_k) supports the tile."""
        tile = self.tile
        whole = tile.rows % (16 * tile.warps) == 0 and tile.warps % 4 == 0 and tile.sliced_k == 1
        if self.gemv or not whole:
            return False
        if self.warp_specialized:
            known = self.format in (*GEMV_FORMATS, *BF16_UNPACK_FORMATS, "mix_4_8", "w4_asym_g128_a8")
            shape = tile.rows == 16 * tile.warps <= 128 and WS_MIN_TOKENS <= tile.tokens <= 128
            in_groups = self.float_sum and not self.float_x and self.block == 128
            fits = not tile.token_halves or (in_groups and tile.tokens > 32)
            large = tile.rows == tile.tokens == 128 and tile.split_k == 1 and not tile.prefetch_bytes
            fits = fits and (not tile.persistent or (in_groups and large))
            whole = tile.unroll == (2 if self.block_words == 0.5 else 1)
            return known and shape and fits and whole and tile.stages > 1
        if self.format == "bf16":
            return tile.unpack_k == 64 and self._is_copied_tile()
        divides = tile.unpack_k in (16, 32, 64) and self.row_items % tile.unpack_k == 0
        divides = divides and self.block * tile.unroll >= 256 and tile.tokens >= MMA_MIN_TOKENS
        large = tile.tokens in (128, 256) and tile.split_k == 1 and not tile.prefetch_bytes
        fits = tile.stages == 1 and (large or not tile.persistent)
        return divides and fits and self.format in BF16_UNPACK_FORMATS

    def _is_copied_tile(self) -> bool:
        """Whether two warp groups of the kernel for weights that need no unpacking have registers for the tile."""
        tile = self.tile
        shape = tile.warps == 8 and tile.tokens in (128, 256) and tile.rows * tile.tokens <= 2**15
        alone = tile.split_k == 1 and not tile.prefetch_bytes
        return shape and tile.unroll == 1 and 3 <= tile.stages <= self.part_blocks and (alone or not tile.persistent)

    @property
    def warp_specialized(self) -> bool:
        """Whether producer warps copy to shared memory and consumer warps unpack and multiply."""
        return self.tile.warp_specialized

    @property
    def amax_parts(self) -> int:
        """Partial amax values per row that the kernel can store, one for each part that some warps own; or 0."""
        if self.gemv:
            return self.n // self.tile.rows
        return self.n // 64 if self.warp_specialized and self.decode and self.tile.split_k == 1 else 0

    @property
    def packing(self) -> str:
        """The packing of the weight (gpu_pack)."""
        return self.format.removesuffix("_a8")

    @property
    def name(self) -> str:
        """Name of the kernel."""
        small_m = self.tile.tokens < MMA_MIN_TOKENS
        kind = "" if self.gemv else "_small_m" if small_m else "_decode" if self.decode else "_prefill"
        kind += f"_{self.experts.count}x{self.experts.slots}" if self.experts else ""
        options = ("x_groups", "bias", "residual", "gated", "amax")
        extras = "".join(f"_{name}" for name in options if getattr(self, name))
        shape = f"{'gemv' if self.gemv else 'gemm'}_{self.format}_{self.n}x{self.k}"
        return f"{shape}{kind}{extras}{'_f32' if self.out == 'f32' else ''}"

    @property
    def pdl(self) -> bool:
        """Whether the kernel is launched by programmatic dependent launch."""
        return self.tile.prefetch_bytes > 0

    @property
    def title(self) -> str:
        """Title of the generated source."""
        kind = "bf16" if self.float_x else "int8 in groups" if self.x_groups else "int8 per token"
        return f"GEMM of {self.format} weights with {kind} activations, {self.tile}"

    @property
    def gemv(self) -> bool:
        """Whether this is a GEMV: each row of x separately, without tensor cores."""
        return self.tile.gemv

    @property
    def decode(self) -> bool:
        """Whether this is a kernel of the decode class."""
        return self.tile.tokens <= DECODE_TOKENS

    @property
    def block(self) -> int:
        """Inputs packed together."""
        return _LAYOUTS[self.format].block

    @property
    def blocks(self) -> int:
        """Number of blocks of inputs."""
        return self.k // self.block

    @property
    def parts(self) -> int:
        """Number of parts of K that are summed separately."""
        return self.tile.sliced_k * self.tile.split_k * self.tile.serial_k

    @property
    def part_unit(self) -> int:
        """Parts of K are multiples of this many blocks, which are whole steps of every kernel with unpack_k."""
        least = 256 // self.block if self.format in BF16_UNPACK_FORMATS and not self.k % 256 else 1
        return max(self.tile.unroll, least)

    @property
    def part_blocks(self) -> int:
        """Blocks per part of K, except the first `longer_parts`."""
        return self.blocks // (self.part_unit * self.parts) * self.part_unit

    @property
    def longer_parts(self) -> int:
        """Number of parts, the first ones, with `part_unit` blocks more."""
        return self.blocks // self.part_unit % self.parts

    @property
    def part_starts(self) -> tuple[int, ...]:
        """The first block of each part of K."""
        return tuple(i * self.part_blocks + min(i, self.longer_parts) * self.part_unit for i in range(self.parts))

    @property
    def planes(self) -> int:
        """Dot products (MMA steps along K) per block."""
        return _LAYOUTS[self.format].planes

    @property
    def row_items(self) -> int:
        """Items of packed codes per row and block, which is also the number of inputs per plane."""
        return _LAYOUTS[self.format].row_items

    @property
    def row_bytes(self) -> int:
        """Bytes of codes per row and block."""
        return self.row_items * _ITEM_BYTES[_LAYOUTS[self.format].item]

    @property
    def float_x(self) -> bool:
        """Whether activations are bf16 rather than int8."""
        return _LAYOUTS[self.format].float_x

    @property
    def float_sum(self) -> bool:
        """Whether sums are f32 rather than int32, so that they depend on the order."""
        return _LAYOUTS[self.format].float_sum

    @property
    def mixed(self) -> bool:
        """Whether the weight has both 8-bit and 4-bit rows."""
        return self.format == "mix_4_8"

    @property
    def low_plane(self) -> bool:
        """Whether upper and lower nibbles of codes are separate tensors."""
        return _LAYOUTS[self.format].low_plane

    @property
    def grouped(self) -> bool:
        """Whether there are parameters per group."""
        return _LAYOUTS[self.format].words > 0

    @property
    def block_words(self) -> float:
        """32-bit words of group parameters per row and block."""
        return _LAYOUTS[self.format].words

    @property
    def step_words(self) -> int:
        """32-bit words of group parameters per row and step."""
        return int(_LAYOUTS[self.format].words * self.tile.unroll)

    @property
    def step_bytes(self) -> int:
        """Bytes of shared memory for the weights and activations of one pipeline stage."""
        tile = self.tile
        if self.gemv:
            return 0
        if self.warp_specialized:
            codes = 128 if self.mixed else self.row_bytes * (1 + self.low_plane)
            x = self.block * (2 if self.float_x else 1)
            return tile.rows * (codes + math.ceil(4 * self.block_words)) + tile.tokens * (x + 4 * self.x_groups)
        if tile.unpack_k:
            weights = tile.rows * (self.row_bytes + 4 * self.block_words)
            return tile.unroll * int(weights + 2 * tile.tokens * self.block)
        each = tile.rows * self.row_bytes * (1 + self.low_plane) + tile.tokens * self.block * (2 if self.float_x else 1)
        return tile.sliced_k * tile.unroll * each

    @property
    def arguments(self) -> list[Argument]:
        """The kernel's arguments in order; all but M are pointers."""
        out = "*fp32" if self.out == "f32" else "*bf16"
        item = "i32" if self.gemv else _LAYOUTS[self.format].item
        found = [Argument("x", "*bf16" if self.float_x else "*i32" if self.gemv else "*i8")]
        found += [Argument("w", f"*{item}")] * (self.wide < self.n) + [Argument("out", out)]
        found += [Argument("x_scale", "*fp32")] * (not self.float_x)
        found += [Argument("w_scale", "*fp32")] * (not self.float_sum)
        if self.format == "qoq_channel":
            found += [Argument("x_sum", "*i32"), Argument("w_zero", "*i8")]
        if self.grouped:
            found.append(Argument("groups", "*i32"))
        found += [Argument("ranges", "*i32")] * (self.format == "mxfp4_a8")
        found += [Argument("low", f"*{item}")] * self.low_plane + [Argument("wide", "*i8")] * (self.wide > 0)
        found += [Argument("columns", "*i32")] * self.mixed
        found += [Argument("bias", "*fp32")] * self.bias + [Argument("residual", out)] * self.residual
        found += [Argument("amax", "*fp32")] * self.amax
        if self.experts:
            return [*found, *(Argument(n, "*i32") for n in (("index",) if self.gemv else ("order", "blocks")))]
        if self.tile.split_k > 1:
            found += [Argument("sums", "*fp32" if self.float_sum else "*i32"), Argument("arrived", "*i32")]
        return [*found, Argument("M", "i32")]

    @property
    def persistent(self) -> bool:
        """Whether this is a persistent kernel: one program per multiprocessor, which loops over tiles."""
        return self.tile.persistent and self.inline_asm

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


def render(spec: KernelSpec) -> str:
    """Triton source of the kernel."""
    overlapped = "gemm_warp_specialized.py.jinja" if spec.warp_specialized else "gemm_overlapped.py.jinja"
    unpack_k = spec.tile.unpack_k and spec.inline_asm
    template = "gemv.py.jinja" if spec.gemv else overlapped if unpack_k else "gemm.py.jinja"
    values = {"tile": spec.tile, "words": spec.row_bytes // 4, "gate_block": GATE_BLOCK}
    values |= {"range_rows": RANGE_ROWS, "downscale": MXFP4_DOWNSCALE, "any_capability": gpu_compile.ANY_CAPABILITY}
    return gpu_compile.render_template(template, spec=spec, registers=_registers(spec)[1], **values)


def _registers(spec: KernelSpec) -> tuple[int, list[int]]:
    """Maximum registers per thread (0: no limit), and for a warp-specialized kernel those of each later warp group.

    There the former is the average over all warps. The limits let two programs of 64 rows share an sm_90
    multiprocessor, or four if the grid has more programs. Room for more than the grid has is no gain: with programmatic
    dependent launch, the next kernel would crowd onto the multiprocessors that this one leaves first. Of GEMV programs
    of one warp, which use it too, 16 fit, so that most weights are being loaded at once.
    """
    if not spec.warp_specialized:
        return 128 if spec.gemv and spec.pdl and spec.tile.warps == 1 else 0, []
    if spec.tile.warps > 4:
        return 0, [216, 72]
    crowded = spec.decode and spec.n // spec.tile.rows * spec.tile.split_k > 2 * spec.multiprocessors
    return (64, [48]) if crowded else (128, [56])


def kernel(spec: KernelSpec) -> Kernel:
    """The kernel as it is compiled."""
    tile = spec.tile
    # For a warp-specialized kernel, Triton's num_warps is that of the first warp group.
    how = (4 if spec.warp_specialized else tile.warps, tile.stages, spec.pdl)
    most, _ = _registers(spec)
    return Kernel(spec.name, render(spec), tuple(spec.arguments), *how, most_registers=most)


def load(spec: KernelSpec) -> Any:
    """The kernel as a Triton function, to be launched with `spec.arguments` or compiled."""
    return gpu_compile.load(kernel(spec))


def compile_for(spec: KernelSpec, capability: int) -> Compiled:
    """`spec` compiled for compute capability `capability` (80, 89, 90, 100), as stored in artifacts."""
    return compile_kernel(kernel(spec), capability)
