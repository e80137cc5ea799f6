"""GEMM kernels for NVIDIA GPUs: what a kernel is, rendered from templates/triton/gemm.py.jinja.

A KernelSpec says what to compute and how to tile it. What a kernel means is `reference`, with the arguments
of the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from qcompile.codegen import gpu_compile
from qcompile.codegen.gpu_compile import Argument, Compiled, Kernel, compile_kernel
from qcompile.codegen.gpu_pack import FADED, FAR_ROWS, check_shape
from qcompile.errors import UnsupportedError
from qcompile.numerics import ACTIVATION_GROUP
from qcompile.ops import GATE_BLOCK

DECODE_TOKENS = 16
"""Most rows of the decode class. Its float kernels sum in one order for every M."""

MULTIPROCESSORS = 132
"""Of an H100 or H200, the GPUs of sm_90."""

FEWEST_TOKENS = 16
"""Fewest rows of x of a tile for the tensor cores."""

FEW_TOKENS = 8
"""Fewest of one whose warps copy and multiply apart."""


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut up: one program does `tokens` x `rows` outputs over 1/splits of the inputs.

    `slices` parts of K are summed side by side by warps of one program, `splits` by programs apart, `turns` (of floats,
    for many rows) one after the other by one program, which adds the sums as `splits` are added; `unroll`
    blocks of inputs are taken a step; `stages` steps are in flight. With `joined` two planes of a block go into one
    instruction of the tensor cores (wgmma of sm_90; elsewhere it costs registers). With `ahead` (sm_90 on) a kernel
    starts while the one before it ends, fetches so many bytes of each 32 rows (a power of two) into L2, and
    waits before it touches anything else.

    Fewer than FEWEST_TOKENS tokens are taken without the tensor cores (but in pieces of 128), 8 to 32 rows of weights
    by all threads, `unroll` blocks a step, or where floats are summed one of each of the `slices`, 16 bytes of each row
    and block a thread.
    Registers hold the next `stages` steps; if `ahead` is not 0, they are asked for before it waits.

    With `piece` (sm_90) weights are unpacked for so many inputs at a time while the tensor cores work. For bf16
    activations (16, 32 or 64) they take those before; `stages` is 1: as many are in flight as `unroll` blocks have 64
    inputs, and these are what is fetched before it waits if `ahead` is not 0. With 128 they work for other warps of the
    program: `warps` multiply, four for each 64 rows, and four more copy, `stages` blocks ahead, whose weights are
    fetched before it waits if `ahead` is not 0; `unroll` is as many blocks as share a word of parameters. With `halves`
    tokens are multiplied in two halves, and sums of groups of one are scaled while the tensor cores work for the other.
    With `lasting` there is a program for each multiprocessor, which takes one tile of 128 by 128 after the other, or of
    256 tokens where activations are bf16: it copies the next one's inputs while it stores this one's outputs. The
    latter's last tiles are halved where they would leave most programs without one.
    """

    tokens: int
    rows: int
    slices: int = 1
    splits: int = 1
    unroll: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    joined: bool = True
    piece: int = 0
    turns: int = field(default=1, repr=False)  # sources without these stay as they were
    halves: bool = field(default=False, repr=False)
    lasting: bool = field(default=False, repr=False)

    @property
    def single(self) -> bool:
        """Whether a program does few rows of x, each by itself, without the tensor cores."""
        return self.tokens < FEWEST_TOKENS and not self.piece


@dataclass(frozen=True)
class _Layout:
    item: str  # type the packed codes are read as
    block: int  # inputs that are packed together
    planes: int  # dot products a block is taken in, each over inputs next to each other
    row_items: int  # items of one row and block
    words: float = 0  # 32-bit words of parameters a row and block
    float_x: bool = False  # bf16 activations; else int8
    float_sum: bool = False  # f32 sums; else int32
    low_plane: bool = False  # a second plane of codes, laid out as the first


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
    """Rows of weights are those of `count` experts, one after another, and each of `slots` slots a token has one.

    x is a row a slot (`by_slot`) or a token; out is f32, a slot's columns behind those of the one before, rows `stride`
    elements apart. Programs go by the blocks of gpu_router.BlocksSpec, or those for single rows by slots themselves, of
    which index[token, slot] are the experts, rows `index_stride` elements apart.
    """

    count: int
    slots: int
    by_slot: bool
    stride: int
    index_stride: int


ALONE = ("qoq_channel", "qoq_g128", "w8_sym_channel", "w4_asym_g128_int8", "nested_8_4", "mxfp4_a8")
"""Formats of which single rows are multiplied without the tensor cores."""
PLANES = ("w4_asym_g128", "mxfp4")
"""Formats of which kernels unpack a plane at a time to bf16, while the tensor cores work."""
_ITEM_BYTES = {"i8": 1, "i16": 2, "bf16": 2}


@dataclass(frozen=True)
class KernelSpec:
    """out[M, N] = x[M, K] . w[N, K]^T (+ bias) (+ residual) for a weight packed as `format` (gpu_pack).

    x is int8 per token, or in groups of 128 with `x_groups` (where sums are floats), or bf16 for bf16, mxfp4 and
    w4_asym_g128; mxfp4_a8 and w4_asym_g128_a8 read the latter's packings with int8. out and residual are bf16, or f32
    with `out`. The first `width` columns are stored (0: all N). With `gated` (the name of an act) rows of gate and of
    up alternate in blocks of ops.GATE_BLOCK, and act(gate) * up is stored, `width` columns; of experts gate
    is at most `limit`, up from -limit to limit, and `offset` is added to it. mix_4_8 has n packed rows,
    `wide` of 8 bits first, and stores `width` columns where they belong. With `peaks`, where few rows are gated, a
    program also stores the largest magnitudes of what it does of a row, [M, tells]. With `experts` (whose tiles are
    neither in pieces nor in parts) a row of x meets those of its experts, of `width` columns
    each. `inline_asm` False renders the same for Triton's interpreter, which has none.
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
    peaks: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.x_groups and (self.float_x or not self.float_sum):
            raise UnsupportedError(f"{self.format} takes no activations in groups of 128")
        check_shape(self.n, self.k, self.packing)
        whole = self.tile.rows in (8, 16, 32) if self.single else self.tile.rows % 32 == 0
        # The last program may lack the rows of some of its warps, where those of others are of another width.
        rows = 64 if self.mixed and self.apart and self.tile.splits == 1 else self.tile.rows
        even = self.single or (self.blocks % self.tile.unroll == 0 and (self.tile.slices == 1 or not self.longer))
        held = self.part > 0 or (self.single and not self.float_sum)  # of one step not all blocks need be there
        if not even or not held or self.n % rows or not whole:
            raise UnsupportedError(f"weight [{self.n}, {self.k}] in {self.format} does not divide into {self.tile}")
        if self.tile.turns > 1 and not self._takes_turns():
            raise UnsupportedError(f"{self.format} is not summed in {self.tile.turns} turns by {self.tile}")
        if self.single and not self._taken_alone():
            raise UnsupportedError(f"{self.format} is not summed by {self.tile}: rows are taken whole, by one program")
        if self.peaks and not (self.gated and self.tells):
            raise UnsupportedError(f"{self.format} cut by {self.tile} tells no peaks")
        if self.gated and (self.mixed or self.residual or not self.width):
            raise UnsupportedError(f"{self.format} with {self.width} columns stores no {self.gated} of pairs of rows")
        if (self.limit is not None or self.offset) and not (self.gated and self.experts):
            raise UnsupportedError("gates are kept within limits where experts choose them")
        if self.wide % (64 if self.apart else self.tile.rows) or (
            self.mixed and (self.prelaunch > self.apart or not self.width)
        ):
            raise UnsupportedError(f"{self.wide} rows of 8 bits, {self.width} columns, do not go with {self.tile}")
        if self.format == "mxfp4_a8" and not self.apart and self.tile.rows > FAR_ROWS:
            raise UnsupportedError(f"{self.format} has no kernel cut by {self.tile}: powers are of {FAR_ROWS} rows")
        if self.experts:
            self._check_experts(self.experts)
        part = self.part * 32 * self.row_bytes
        if self.prelaunch and (self.tile.ahead > part or self.tile.ahead & (self.tile.ahead - 1)):
            raise UnsupportedError(f"a program of {self.tile} has {part} bytes of each 32 rows to fetch")
        if (self.tile.piece or self.tile.lasting) and not self._overlaps():
            raise UnsupportedError(f"{self.format} is not unpacked in pieces by {self.tile}")
        if _LAYOUTS[self.format].words * self.tile.unroll % 1:
            raise UnsupportedError(f"{self.format} takes two groups a step: {self.tile}")

    def _check_experts(self, experts: Experts) -> None:
        """UnsupportedError unless the kernel does whole tiles of an expert by itself."""
        if self.n % (experts.count * self.tile.rows):
            raise UnsupportedError(f"experts of {self.n // experts.count} outputs do not divide into {self.tile}")
        others = self.mixed or self.residual or self.out != "f32" or not self.width
        if others or self.tile.piece or self.tile.splits > 1 or self.tile.tokens in range(2, FEWEST_TOKENS):
            raise UnsupportedError(f"experts in {self.format} have no kernel cut by {self.tile}")

    def _taken_alone(self) -> bool:
        """Whether the kernel for single rows has such a tile: sums are integers, or floats of groups of those."""
        if self.tile.splits > 1 or self.format not in ALONE:
            return False
        return self.tile.unroll == 1 if self.float_sum else self.tile.slices == 1

    def _takes_turns(self) -> bool:
        """Whether programs of such a tile sum parts one after the other."""
        plain = not self.tile.piece and not self.mixed and self.format != "mxfp4_a8"
        alone = self.tile.splits == self.tile.slices == 1 and not self.single and not self.experts
        return self.float_sum and alone and (plain or self.apart)

    def _overlaps(self) -> bool:
        """Whether the kernel that unpacks in pieces has such a tile."""
        tile = self.tile
        whole = tile.rows % (16 * tile.warps) == 0 and tile.warps % 4 == 0 and tile.slices == 1
        if self.single or not whole:
            return False
        if self.apart:
            known = self.format in (*ALONE, *PLANES, "mix_4_8", "w4_asym_g128_a8")
            cut = tile.rows == 16 * tile.warps <= 128 and FEW_TOKENS <= tile.tokens <= 128
            in_groups = self.float_sum and not self.float_x and self.block == 128
            fits = not tile.halves or (in_groups and tile.tokens > 32)
            alone = tile.rows == tile.tokens == 128 and tile.splits == 1 and not tile.ahead
            fits = fits and (not tile.lasting or (in_groups and alone))
            whole = tile.unroll == (2 if self.block_words == 0.5 else 1)
            return known and cut and fits and whole and tile.stages > 1
        pieces = tile.piece in (16, 32, 64) and self.row_items % tile.piece == 0 and self.block * tile.unroll >= 256
        pieces = pieces and tile.tokens >= FEWEST_TOKENS
        pieces = pieces and (not tile.lasting or (tile.tokens == 256 and tile.splits == 1 and not tile.ahead))
        return pieces and tile.stages == 1 and self.format in PLANES

    @property
    def apart(self) -> bool:
        """Whether warps that copy and groups of warps that multiply go on apart."""
        return self.tile.piece == 128

    @property
    def tells(self) -> int:
        """Magnitudes of a row that the kernel can tell: of each part of it that some warps have to themselves; or 0."""
        if self.single:
            return self.n // self.tile.rows
        return self.n // 64 if self.apart and self.decode and self.tile.splits == 1 else 0

    @property
    def packing(self) -> str:
        """How the weight is packed."""
        return self.format.removesuffix("_a8")

    @property
    def name(self) -> str:
        """Name of the kernel."""
        few = self.tile.tokens < FEWEST_TOKENS
        kind = "" if self.single else "_few" if few else "_decode" if self.decode else "_prefill"
        kind += f"_{self.experts.count}x{self.experts.slots}" if self.experts else ""
        told = ("x_groups", "bias", "residual", "gated", "peaks")
        extras = "".join(f"_{name}" for name in told if getattr(self, name))
        shape = f"{'gemv' if self.single else 'gemm'}_{self.format}_{self.n}x{self.k}"
        return f"{shape}{kind}{extras}{'_f32' if self.out == 'f32' else ''}"

    @property
    def prelaunch(self) -> bool:
        """Whether the kernel may start before the one before it has ended."""
        return self.tile.ahead > 0

    @property
    def title(self) -> str:
        """What the source says it is."""
        kind = "bf16" if self.float_x else "int8 in groups" if self.x_groups else "int8 per token"
        return f"GEMM of {self.format} weights with {kind} activations, {self.tile}"

    @property
    def single(self) -> bool:
        """Whether a program does few rows of x, each by itself, without the tensor cores."""
        return self.tile.single

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
        """Blocks of inputs."""
        return self.k // self.block

    @property
    def parts(self) -> int:
        """Parts of the inputs that are summed apart."""
        return self.tile.slices * self.tile.splits * self.tile.turns

    @property
    def unit(self) -> int:
        """Blocks that are in one part: whole steps, of any kernel that unpacks in pieces."""
        least = 256 // self.block if self.format in PLANES and not self.k % 256 else 1
        return max(self.tile.unroll, least)

    @property
    def part(self) -> int:
        """Blocks of inputs of each of these parts, but for the first `longer` ones."""
        return self.blocks // (self.unit * self.parts) * self.unit

    @property
    def longer(self) -> int:
        """So many parts have a unit more."""
        return self.blocks // self.unit % self.parts

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each part."""
        return tuple(i * self.part + min(i, self.longer) * self.unit for i in range(self.parts))

    @property
    def planes(self) -> int:
        """Dot products a block is taken in."""
        return _LAYOUTS[self.format].planes

    @property
    def row_items(self) -> int:
        """Items of packed codes in one row and block; also the inputs of one plane."""
        return _LAYOUTS[self.format].row_items

    @property
    def row_bytes(self) -> int:
        """Bytes of codes of one row and block."""
        return self.row_items * _ITEM_BYTES[_LAYOUTS[self.format].item]

    @property
    def float_x(self) -> bool:
        """Whether activations are bf16 rather than int8 per token."""
        return _LAYOUTS[self.format].float_x

    @property
    def float_sum(self) -> bool:
        """Whether sums are f32 rather than int32: then they depend on the order."""
        return _LAYOUTS[self.format].float_sum

    @property
    def mixed(self) -> bool:
        """Whether rows have 8 bits or 4."""
        return self.format == "mix_4_8"

    @property
    def low_plane(self) -> bool:
        """Whether codes come in two planes, of upper and of lower nibbles."""
        return _LAYOUTS[self.format].low_plane

    @property
    def grouped(self) -> bool:
        """Whether there are parameters per group."""
        return _LAYOUTS[self.format].words > 0

    @property
    def block_words(self) -> float:
        """32-bit words of group parameters of a row and block."""
        return _LAYOUTS[self.format].words

    @property
    def step_words(self) -> int:
        """32-bit words of group parameters of a row in one step."""
        return int(_LAYOUTS[self.format].words * self.tile.unroll)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights and activations a program takes in one step, for each of the stages in flight."""
        tile = self.tile
        if self.single:
            return 0
        if self.apart:
            codes = 128 if self.mixed else self.row_bytes * (1 + self.low_plane)
            x = self.block * (2 if self.float_x else 1)
            return tile.rows * (codes + math.ceil(4 * self.block_words)) + tile.tokens * (x + 4 * self.x_groups)
        if tile.piece:
            weights = tile.rows * (self.row_bytes + 4 * self.block_words)
            return tile.unroll * int(weights + 2 * tile.tokens * self.block)
        each = tile.rows * self.row_bytes * (1 + self.low_plane) + tile.tokens * self.block * (2 if self.float_x else 1)
        return tile.slices * tile.unroll * each

    @property
    def arguments(self) -> list[Argument]:
        """The kernel's arguments in order; all but M are pointers."""
        out = "*fp32" if self.out == "f32" else "*bf16"
        item = "i32" if self.single else _LAYOUTS[self.format].item
        found = [Argument("x", "*bf16" if self.float_x else "*i32" if self.single else "*i8")]
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
        found += [Argument("peaks", "*fp32")] * self.peaks
        if self.experts:
            return [*found, *(Argument(n, "*i32") for n in (("index",) if self.single else ("order", "blocks")))]
        if self.tile.splits > 1:
            found += [Argument("sums", "*fp32" if self.float_sum else "*i32"), Argument("arrived", "*i32")]
        return [*found, Argument("M", "i32")]

    @property
    def lasting(self) -> bool:
        """Whether programs take one tile after the other, as many programs as there are multiprocessors."""
        return self.tile.lasting and self.inline_asm

    def grid(self, tokens: int, lasting: bool = True) -> tuple[int, int, int]:
        """Programs for `tokens` rows of x, or tiles where those that last are not to count as one."""
        if self.lasting and lasting:
            return MULTIPROCESSORS, 1, 1
        return -(-tokens // self.tile.tokens), -(-self.n // self.tile.rows), self.tile.splits

    def workspace(self, tokens: int) -> dict[str, tuple[int, torch.dtype]]:
        """Items and type of each buffer that must be zero before the first launch; launches leave it so."""
        if self.tile.splits == 1:
            return {}
        rows = 64 if self.apart else self.tile.rows
        tiles = -(-tokens // self.tile.tokens) * (self.n // rows)
        each = rows * self.tile.tokens * (self.tile.splits if self.float_sum else 1)
        dtype = torch.float32 if self.float_sum else torch.int32
        return {"sums": (tiles * each, dtype), "arrived": (tiles, torch.int32)}


def reference(x: list[Tensor], w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """What a GEMM kernel computes, in float64: x as quantize_activation's parts, w [N, K] dequantized -> [M, N]."""
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
    many = "gemm_apart.py.jinja" if spec.apart else "gemm_wide.py.jinja"
    pieces = spec.tile.piece and spec.inline_asm
    template = "gemv.py.jinja" if spec.single else many if pieces else "gemm.py.jinja"
    values = {"tile": spec.tile, "words": spec.row_bytes // 4, "gate_block": GATE_BLOCK}
    values |= {"far_rows": FAR_ROWS, "faded": FADED, "any_capability": gpu_compile.ANY_CAPABILITY}
    return gpu_compile.render_template(template, spec=spec, registers=_registers(spec)[1], **values)


def _registers(spec: KernelSpec) -> tuple[int, list[int]]:
    """Most registers of a thread, 0 for all; where warps go on apart, on average, and of groups but the first.

    Of programs of 64 weights two share a multiprocessor of sm_90, or four where there are more. Room for more than
    there are is no gain: a kernel that begins early would crowd where the one before it ends first. Of programs of one
    warp for single rows, which begin early too, 16 fit, so that most weights are taken at once.
    """
    if not spec.apart:
        return 128 if spec.single and spec.prelaunch and spec.tile.warps == 1 else 0, []
    if spec.tile.warps > 4:
        return 0, [216, 72]
    crowded = spec.decode and spec.n // spec.tile.rows * spec.tile.splits > 2 * MULTIPROCESSORS
    return (64, [48]) if crowded else (128, [56])


def kernel(spec: KernelSpec) -> Kernel:
    """The kernel as it is compiled."""
    tile = spec.tile
    # Where warps go on apart Triton is told of the first four.
    how = (4 if spec.apart else tile.warps, tile.stages, spec.prelaunch)
    most, _ = _registers(spec)
    return Kernel(spec.name, render(spec), tuple(spec.arguments), *how, most_registers=most)


def load(spec: KernelSpec) -> Any:
    """The kernel as a Triton function, to be launched with `spec.arguments` or compiled."""
    return gpu_compile.load(kernel(spec))


def compile_for(spec: KernelSpec, capability: int) -> Compiled:
    """`spec` compiled for compute capability `capability` (80, 89, 90, 100), as an artifact carries it."""
    return compile_kernel(kernel(spec), capability)
