"""Render GEMM kernels to Triton source and compile them ahead of time, with or without a GPU.

A KernelSpec says what to compute and how to tile it; templates/triton/gemm.py.jinja says it in Triton. What
a kernel means is `reference`, with the arguments of the kernel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor

from qcompile.codegen.gpu_pack import check_shape
from qcompile.errors import ResourceError, UnsupportedError

_TEMPLATES = Path(__file__).parent / "templates" / "triton"
DECODE_TOKENS = 16
"""Most rows of the decode class. Its float kernels sum in one order for every M."""


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut up: one program does `tokens` x `rows` outputs over 1/splits of the inputs.

    `slices` parts of K are summed side by side by warps of one program, `splits` by programs apart; `unroll`
    blocks of inputs are taken a step; `stages` steps are in flight. With `ahead` (sm_90 on) a kernel
    starts while the one before it ends, fetches so many bytes of each 32 rows (a power of two) into L2, and
    waits before it touches anything else.
    """

    tokens: int
    rows: int
    slices: int = 1
    splits: int = 1
    unroll: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0


class Argument(NamedTuple):
    """A kernel argument: its name and its type as Triton writes it."""

    name: str
    type: str


@dataclass(frozen=True)
class _Layout:
    item: str  # type the packed codes are read as
    block: int  # inputs that are packed together
    planes: int  # dot products a block is taken in, each over inputs next to each other
    row_items: int  # items of one row and block
    float_sum: bool  # bf16 activations and f32 sums; else int8 and int32
    words: float  # 32-bit words of parameters a row and block


_LAYOUTS = {
    "qoq_channel": _Layout("i8", 128, 2, 64, False, 0),
    "qoq_g128": _Layout("i8", 128, 2, 64, False, 0.5),
    "w8_sym_channel": _Layout("i8", 128, 1, 128, False, 0),
    "w4_asym_g128": _Layout("i16", 256, 4, 64, True, 2),
}


@dataclass(frozen=True)
class KernelSpec:
    """out[M, N] bf16 = x[M, K] . w[N, K]^T (+ bias) (+ residual) for a weight in `format`.

    x is int8 per token, or bf16 for w4_asym_g128. `inline_asm` False renders the same
    arithmetic for Triton's interpreter, which has none.
    """

    format: str
    n: int
    k: int
    tile: Tile
    bias: bool = False
    residual: bool = False
    inline_asm: bool = True

    def __post_init__(self) -> None:
        check_shape(self.n, self.k, self.format)
        step = self.tile.slices * self.tile.splits * self.tile.unroll
        if self.blocks % step or self.n % self.tile.rows or self.tile.rows % 32:
            raise UnsupportedError(f"weight [{self.n}, {self.k}] in {self.format} does not divide into {self.tile}")
        part = self.blocks // self.tile.splits * 32 * self.row_bytes
        if self.prelaunch and (self.tile.ahead > part or self.tile.ahead & (self.tile.ahead - 1)):
            raise UnsupportedError(f"a program of {self.tile} has {part} bytes of each 32 rows to fetch")
        if _LAYOUTS[self.format].words * self.tile.unroll % 1:
            raise UnsupportedError(f"{self.format} takes two groups a step: {self.tile}")

    @property
    def name(self) -> str:
        """Name of the kernel."""
        kind = "decode" if self.decode else "prefill"
        extras = "".join(f"_{name}" for name in ("bias", "residual") if getattr(self, name))
        return f"gemm_{self.format}_{self.n}x{self.k}_{kind}{extras}"

    @property
    def prelaunch(self) -> bool:
        """Whether the kernel may start before the one before it has ended."""
        return self.tile.ahead > 0

    @property
    def title(self) -> str:
        """What the source says it is."""
        kind = "bf16" if self.float_sum else "int8 per token"
        return f"GEMM of {self.format} weights with {kind} activations, {self.tile}"

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
        return self.row_items * (2 if _LAYOUTS[self.format].item == "i16" else 1)

    @property
    def float_sum(self) -> bool:
        """Whether sums are f32 (bf16 activations) rather than int32."""
        return _LAYOUTS[self.format].float_sum

    @property
    def grouped(self) -> bool:
        """Whether there are parameters per group."""
        return _LAYOUTS[self.format].words > 0

    @property
    def step_words(self) -> int:
        """32-bit words of group parameters of a row in one step."""
        return int(_LAYOUTS[self.format].words * self.tile.unroll)

    @property
    def arguments(self) -> list[Argument]:
        """The kernel's arguments in order; all but M are pointers."""
        item = _LAYOUTS[self.format].item
        x = "*bf16" if self.float_sum else "*i8"
        found = [Argument("x", x), Argument("w", f"*{item}"), Argument("out", "*bf16")]
        if not self.float_sum:
            found += [Argument("x_scale", "*fp32"), Argument("w_scale", "*fp32")]
        if self.format == "qoq_channel":
            found += [Argument("x_sum", "*i32"), Argument("w_zero", "*i8")]
        if self.grouped:
            found.append(Argument("groups", "*i32"))
        found += [Argument("bias", "*fp32")] * self.bias + [Argument("residual", "*bf16")] * self.residual
        if self.tile.splits > 1:
            found += [Argument("sums", "*fp32" if self.float_sum else "*i32"), Argument("arrived", "*i32")]
        return [*found, Argument("M", "i32")]

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """Programs for `tokens` rows of x."""
        return -(-tokens // self.tile.tokens), self.n // self.tile.rows, self.tile.splits

    def workspace(self, tokens: int) -> dict[str, tuple[int, torch.dtype]]:
        """Items and type of each buffer that must be zero before the first launch; launches leave it so."""
        if self.tile.splits == 1:
            return {}
        tiles = -(-tokens // self.tile.tokens) * (self.n // self.tile.rows)
        each = self.tile.rows * self.tile.tokens * (self.tile.splits if self.float_sum else 1)
        dtype = torch.float32 if self.float_sum else torch.int32
        return {"sums": (tiles * each, dtype), "arrived": (tiles, torch.int32)}


def reference(x: list[Tensor], w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """What a GEMM kernel computes, in float64: x as quantize_activation's parts, w [N, K] dequantized -> [M, N]."""
    y = x[0].double() @ w.double().T
    if len(x) > 1:
        y = y * x[1].double()[:, None]
    if bias is not None:
        y = y + bias.double()
    return y if residual is None else y + residual.double()


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(spec: KernelSpec) -> str:
    """Triton source of the kernel."""
    return _environment().get_template("gemm.py.jinja").render(spec=spec, tile=spec.tile)


def load(spec: KernelSpec) -> Any:
    """The kernel as a Triton function, to be launched with `spec.arguments` or compiled."""
    return getattr(_module(render(spec)), spec.name)


@cache
def _module(source: str) -> ModuleType:
    # Triton reads a kernel's source from its file.
    name = f"qcompile_kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = Path(tempfile.mkdtemp(prefix="qcompile-")) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec and module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one GPU. `matrix` names the matrix instructions found in its PTX."""

    cubin: bytes
    ptx: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    matrix: tuple[str, ...]


_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")


def build(spec: KernelSpec, capability: int) -> Any:
    """`spec` compiled by Triton for compute capability `capability`; `build(...)[grid](*arguments)` launches it.

    Needs no GPU. Raises ResourceError when Triton is not installed.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise ResourceError("GPU targets need Triton: pip install 'qcompile[gpu]'") from error
    signature = {argument.name: argument.type for argument in spec.arguments}
    # As the launcher specializes: pointers are aligned to 16 bytes.
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(spec.arguments) if a.type.startswith("*")}
    source = ASTSource(load(spec), signature, {}, aligned)
    options = {"num_warps": spec.tile.warps, "num_stages": spec.tile.stages, "launch_pdl": spec.prelaunch}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_for(spec: KernelSpec, capability: int) -> Compiled:
    """`spec` compiled for compute capability `capability` (80, 89, 90, 100), as an artifact carries it."""
    built = build(spec, capability)
    ptx, cubin = built.asm["ptx"], built.asm["cubin"]
    registers, spilled = _resources(cubin)
    found = tuple(sorted(set(_MATRIX.findall(ptx))))
    return Compiled(cubin, ptx, registers, built.metadata.shared, spilled, found)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread of the cubin's kernel takes."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout)
    if not found:
        raise ResourceError(f"cuobjdump gives no resource usage: {done.stderr.strip()[:200]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
