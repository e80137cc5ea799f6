"""Launches of GEMMs, a variant for each class of rows (kernels: codegen/gpu/gemm)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qcompile import ops
from qcompile.codegen.calls import Gemm
from qcompile.codegen.gpu.context import PlanContext, amax_ref, weight_refs
from qcompile.codegen.gpu.gemm import render as gemm_render
from qcompile.codegen.gpu.gemm import spec as gemm
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.launches import SPLIT_ROWS, Launch, Variant
from qcompile.codegen.gpu.operands import CountRef, Grid, GridSize, InputRef, Operands, ScratchRef
from qcompile.codegen.gpu.router_launches import scores
from qcompile.codegen.gpu.sample import choosing
from qcompile.errors import UnsupportedError
from qcompile.formats.gpu import padded_outputs
from qcompile.formats.registry import gpu_packing, kernel_of, packing_of, weight_format


def gemm_launches(context: PlanContext, c: Gemm) -> Iterator[Launch]:
    """The launches of a GEMM, and for logits those that choose tokens."""
    if weight_format(c.format).gpu.row_major:
        yield from scores(context, c)
        return
    yield gemm_launch(context, c, kernel_specs(context, c))
    if c.out is None:
        yield from choosing(c.name, c.n, context.capability)


def kernel_specs(context: PlanContext, c: Gemm, measured: bool = False) -> dict[int, gemm.KernelSpec]:
    """The kernel for up to that many rows (0: any number).

    Kernels that can store the largest magnitudes of parts of each row do so if `measured`.
    """
    x = context.buffer(c.x)
    activation = x.activation if x.dtype == "q8" else x.dtype
    packed = c.packing or packing_of(c.format, activation)
    packing, k = kernel_of(packed, activation), gpu_packing(packed).padded_inputs(c.k)
    n = 16 * c.blocks or padded_outputs(c.n)
    if x.stride != k:
        raise UnsupportedError(f"{c.k} inputs are padded to {x.stride} for another weight, but this weight needs {k}")
    options = _options(context, c, n)
    specs: dict[int, gemm.KernelSpec] = {}
    for most in tiles.token_classes(packing):
        tile = tiles.choose_batch_invariant(packing, n, k, most or tiles.LARGE_M, context.rendered_for)
        if not context.inline_asm and tile.gemv:
            tile = replace(tile, rows=32)  # the interpreter runs programs one after the other, so fewer are faster
        spec = gemm.KernelSpec(packing, n, k, tile, **options)
        specs[most] = replace(spec, amax=measured and spec.amax_parts > 0)
    return specs


def _options(context: PlanContext, c: Gemm, n: int) -> dict[str, Any]:
    """KernelSpec's fields besides shape and tile; `n` is the number of packed rows."""
    x, gate = context.buffer(c.x), ops.GATED.get(c.epilogue, "")
    out = None if c.out is None else context.buffer(c.out)
    stored = c.n // 2 if gate else c.n
    width, biased = stored if gate or n != c.n or c.blocks else 0, 0
    if out is not None and out.stride != stored:
        # Columns after the outputs get zeros; kernels that scatter rows skip them.
        if gate or (not c.blocks and out.stride > n):
            raise UnsupportedError(
                f"{stored} outputs with a gate, padded to {out.stride}: GPU kernels take multiples of 32"
            )
        width, biased = out.stride, stored if c.bias is not None and not c.blocks else 0
    return {
        "bias": c.bias is not None,
        "residual": c.residual is not None,
        "inline_asm": context.inline_asm,
        "multiprocessors": context.rendered_for.multiprocessors,
        "out": "f32" if out is None else out.dtype,
        "width": width,
        "biased": biased,
        "gated": gate,
        "wide": c.wide,
        "x_groups": x.dtype == "q8" and x.kind.group > 0,
    }


def gemm_launch(context: PlanContext, c: Gemm, specs: dict[int, gemm.KernelSpec]) -> Launch:
    """The launch of a GEMM with these kernels."""
    x = context.buffer(c.x)
    args: Operands = {"x": context.ref(c.x), "M": CountRef(x.rows)}
    args |= weight_refs(**c.weights, bias=c.bias)
    args["out"] = InputRef("logits") if c.out is None else context.ref(c.out)
    if x.dtype == "q8":
        args |= {"x_scale": context.ref(c.x, "scale"), "x_sum": context.ref(c.x, "sums")}
    if c.residual is not None:
        args["residual"] = context.ref(c.residual)
    return Launch(c.name, x.rows, tuple(_variant(spec, most, x.rows, args) for most, spec in specs.items()))


def _variant(spec: gemm.KernelSpec, most: int, rows: str, args: Operands) -> Variant:
    """The variant for up to `most` rows (0: any number)."""
    grid: Grid = spec.grid(1) if spec.persistent else (GridSize(rows, spec.tile.tokens), *spec.grid(1)[1:])
    own = _workspace(spec, most)
    if spec.amax:
        own["amax"] = amax_ref(spec.amax_parts)
    return Variant(gemm_render.kernel(spec), grid, args | own, most)


def _workspace(spec: gemm.KernelSpec, most: int) -> Operands:
    """Scratch memory of split_k for up to `most` rows (0: any number, of which each row takes its share)."""
    # A split-K kernel resets integer sums to zero for the next launch, float ones not: two workspaces.
    names = {"sums": "float_sums" if spec.float_sum else "sums", "arrived": "arrived"}
    if 0 < most <= SPLIT_ROWS:
        workspace = spec.workspace(most).items()
        return {role: ScratchRef(names[role], items * dtype.itemsize) for role, (items, dtype) in workspace}
    workspace = spec.workspace(spec.tile.tokens).items()
    return {
        role: ScratchRef(f"{names[role]}_by_row", -(-items * dtype.itemsize // spec.tile.tokens), ("room",))
        for role, (items, dtype) in workspace
    }
