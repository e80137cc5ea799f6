"""Triton source of a GEMM or GEMV kernel, from templates/gem*.jinja, and the kernel as it is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu.compile import Compiled, compile_kernel
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import MMA_MIN_TOKENS
from qcompile.codegen.gpu.kernel import ANY_CAPABILITY, Argument, Kernel, render_template
from qcompile.formats.gpu import MXFP4_DOWNSCALE, RANGE_ROWS
from qcompile.ops import GATE_BLOCK

_TEMPLATES = {
    "gemv": "gemv.py.jinja",
    "pipelined": "gemm.py.jinja",
    "copied": "gemm_overlapped.py.jinja",
    "unpacked": "gemm_overlapped.py.jinja",
    "warp_specialized": "gemm_warp_specialized.py.jinja",
}
"""Templates by kind of kernel."""


class Signature(NamedTuple):
    """The name of a kernel, the title of its source, and its arguments in order."""

    name: str
    title: str
    arguments: list[Argument]


def signature_of(spec: KernelSpec) -> Signature:
    """The signature of the kernel."""
    return Signature(name_of(spec), _title(spec), arguments_of(spec))


def name_of(spec: KernelSpec) -> str:
    """Name of the kernel."""
    small_m = spec.tile.tokens < MMA_MIN_TOKENS
    kind = "" if spec.gemv else "_small_m" if small_m else "_decode" if spec.decode else "_prefill"
    kind += f"_{spec.experts.count}x{spec.experts.slots}" if spec.experts else ""
    options = ("x_groups", "bias", "residual", "gated", "amax")
    extras = "".join(f"_{name}" for name in options if getattr(spec, name))
    shape = f"{'gemv' if spec.gemv else 'gemm'}_{spec.format}_{spec.n}x{spec.k}"
    return f"{shape}{kind}{extras}{'_f32' if spec.out == 'f32' else ''}"


def _title(spec: KernelSpec) -> str:
    """Title of the generated source."""
    kind = "bf16" if spec.layout.float_x else "int8 in groups" if spec.x_groups else "int8 per token"
    return f"GEMM of {spec.format} weights with {kind} activations, {spec.tile}"


def arguments_of(spec: KernelSpec) -> list[Argument]:
    """The kernel's arguments in order; all but M are pointers."""
    out = "*fp32" if spec.out == "f32" else "*bf16"
    layout = spec.layout
    item = "i32" if spec.gemv else layout.item
    arguments = [Argument("x", "*bf16" if layout.float_x else "*i32" if spec.gemv else "*i8")]
    arguments += [Argument("w", f"*{item}")] * (spec.wide < spec.n) + [Argument("out", out)]
    arguments += [Argument("x_scale", "*fp32")] * (not layout.float_x)
    arguments += [Argument("w_scale", "*fp32")] * (not spec.float_sum)
    if layout.row_zeros:
        arguments += [Argument("x_sum", "*i32"), Argument("w_zero", "*i8")]
    if layout.grouped:
        arguments.append(Argument("groups", "*i32"))
    arguments += [Argument("ranges", "*i32")] * layout.has_ranges
    arguments += [Argument("tensor_scale", "*fp32")] * layout.tensor_scale
    arguments += [Argument("low", f"*{item}")] * layout.low_plane + [Argument("wide", "*i8")] * (spec.wide > 0)
    arguments += [Argument("columns", "*i32")] * spec.mixed
    arguments += [Argument("bias", "*fp32")] * spec.bias + [Argument("residual", out)] * spec.residual
    arguments += [Argument("amax", "*fp32")] * spec.amax
    if spec.experts:
        return [*arguments, *(Argument(n, "*i32") for n in (("index",) if spec.gemv else ("order", "blocks")))]
    if spec.tile.split_k > 1:
        arguments += [Argument("sums", "*fp32" if spec.float_sum else "*i32"), Argument("arrived", "*i32")]
    return [*arguments, Argument("M", "i32")]


def render(spec: KernelSpec) -> str:
    """Triton source of the kernel."""
    # Triton's interpreter runs the pipelined kernel for every tile of the tensor cores.
    template = _TEMPLATES[spec.kind if spec.gemv or spec.inline_asm else "pipelined"]
    values: dict[str, Any] = {"signature": signature_of(spec), "tile": spec.tile, "words": spec.layout.row_bytes // 4}
    values |= {"gate_block": GATE_BLOCK}
    values |= {"range_rows": RANGE_ROWS, "downscale": MXFP4_DOWNSCALE, "any_capability": ANY_CAPABILITY}
    return render_template(template, spec=spec, registers=_registers(spec)[1], **values)


def _registers(spec: KernelSpec) -> tuple[int, list[int]]:
    """Maximum registers per thread (0: no limit), and for a warp-specialized kernel those of each later warp group.

    There the former is the average over all warps. The limits let two programs of 64 rows share an sm_90
    multiprocessor, or four if the grid has more programs. Room for more than the grid has is no gain: with programmatic
    dependent launch, the next kernel would crowd onto the multiprocessors that this one leaves first. Of GEMV programs
    of one warp, which use it too, 16 fit, so that most weights are being loaded at once.
    """
    if not spec.warp_specialized:
        return 128 if spec.gemv and spec.pdl and spec.tile.warps == 1 else 0, []
    if spec.tile.tokens > 128:  # twice as many addresses of activations, which producers keep
        return 0, [208, 88]
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
    return Kernel(name_of(spec), render(spec), tuple(arguments_of(spec)), *how, most_registers=most)


def load(spec: KernelSpec) -> Any:
    """The kernel as a Triton function, to be launched with `arguments_of(spec)` or compiled."""
    return gpu_compile.load(kernel(spec))


def compile_for(spec: KernelSpec, capability: int) -> Compiled:
    """`spec` compiled for compute capability `capability` (80, 89, 90, 100), as stored in artifacts."""
    return compile_kernel(kernel(spec), capability)
