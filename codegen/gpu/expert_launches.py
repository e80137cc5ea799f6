"""Launches of GEMMs of experts over slots sorted by expert, and of what prepares their inputs.

A slot is one (token, chosen expert) pair. codegen/gpu/fuse_experts.py decides which calls share what is prepared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qcompile import ops
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.context import PlanContext, single_launch, weight_refs
from qcompile.codegen.gpu.gemm import render as gemm_render
from qcompile.codegen.gpu.gemm import spec as gemm
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS
from qcompile.codegen.gpu.launches import MOST_ROWS, Launch, Variant
from qcompile.codegen.gpu.operands import CountRef, GridSize, Operand, Operands, ScratchRef
from qcompile.codegen.gpu.row_launches import norm_fields, row_launch, row_spec
from qcompile.codegen.gpu.rows import RowSpec
from qcompile.codegen.gpu.sorted_slots import BlocksSpec
from qcompile.codegen.sizes import power_of_two
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import kernel_of, packing_of
from qcompile.formats.rounding import groups_of

SMALL_BLOCK, LARGE_BLOCK = DECODE_TOKENS, 64
"""Slots per program of the grouped GEMM: while an expert gets at most SMALL_BLOCK on average, and beyond that."""
MEDIUM_ROWS = 64
"""Most rows of an intermediate class, because programs that sort slots scan the most rows of their class."""
LARGE_ROWS = 512
"""Most rows of the class before the largest, for the same reason."""
GEMV_ROWS = 4
"""Most rows of a step that runs one GEMV per slot, as few slots share an expert."""


# ---- quantized inputs ------------------------------------------------------------------------------


def quantize_slots(context: PlanContext, c: fused.QuantizeSlots) -> Iterator[Launch]:
    """The launch that quantizes the inputs of experts."""
    spec = replace(_rounding(c), x_stride=context.buffer(c.x).stride if c.x_slots == 1 else c.k)
    kernel, grid = spec.kernel(context.capability), (GridSize("tokens", times=c.x_slots), 1, 1)
    yield single_launch(c.name, "tokens", kernel, grid, _rounded_to(c) | {"x": context.ref(c.x)})


def norm_slots(context: PlanContext, c: fused.NormSlots) -> Iterator[Launch]:
    """The launch of a norm that also quantizes its result for experts."""
    norm = c.norm
    plain = row_spec(context, norm.x, norm.out, **norm_fields(norm))
    fields = norm_fields(norm)
    spec = replace(_rounding(c.slots), x_stride=plain.x_stride, plain_stride=plain.out_stride, **fields)
    args = weight_refs(weight=norm.weight, bias=norm.bias) | {"plain": context.ref(norm.out)} | _rounded_to(c.slots)
    yield row_launch(context, spec, c.name, context.ref(norm.x, column=norm.x_offset), norm.out, args)


def _rounding(c: fused.QuantizeSlots) -> RowSpec:
    """A kernel that quantizes rows of c.k elements for the experts; the caller sets the stride of the rows."""
    kind, k = activation_format(c.activation), c.padded_k
    if not kind.top:
        return RowSpec(c.k, 0, k, out=c.activation)
    scales = groups_of(k, kind.group)
    filled = scales if scales != groups_of(c.k, kind.group) else 0
    codes: dict[str, Any] = {"top": kind.top, "group": kind.group, "last_top": kind.last_top, "reach": kind.reach}
    return RowSpec(c.k, 0, k, out="q8", sums=not kind.group, row_scales=filled, **codes)


def _rounded_to(c: fused.QuantizeSlots) -> Operands:
    """Arguments of a kernel that writes quantized inputs."""
    into = _quantized(c)
    return {"out": into["x"]} | {f"out_{part}": into[f"x_{part}"] for part in ("scale", "sum") if f"x_{part}" in into}


def _quantized(c: fused.QuantizeSlots) -> dict[str, Operand]:
    """The quantized inputs, rows of padded_k; nothing writes the padding, so it stays zero."""
    kind, k = activation_format(c.activation), c.padded_k
    name = f"expert_x_{c.k}_{k}_{c.activation}"
    refs: dict[str, Operand] = {"x": ScratchRef(name, c.x_slots * k * kind.dtype.itemsize, ("tokens",))}
    if kind.top:
        scales = groups_of(k, kind.group)
        refs["x_scale"] = ScratchRef(f"{name}_scale", 4 * c.x_slots * scales, ("tokens",))
        refs["x_sum"] = ScratchRef("expert_x_sum", 4 * c.x_slots, ("tokens",))
    return refs


# ---- sorted slots ----------------------------------------------------------------------------------


def sort_slots(context: PlanContext, c: fused.SortSlots) -> Iterator[Launch]:
    """The launch that sorts slots by expert, after two that count those of chunks if there are many."""
    specs = _block_classes(context, c)
    args: Operands = {"index": context.ref(c.index), "M": CountRef("tokens"), **_order(context, c)}
    numbers = max((spec.chunks for spec in specs if spec.in_chunks), default=0) * power_of_two(c.experts)
    args |= {name: ScratchRef(f"slots_{name}", 4 * numbers) for name in ("counts", "before")}
    args["totals"] = ScratchRef("slots_totals", 4 * power_of_two(c.experts))
    stages: list[list[Variant]] = [[], [], []]
    for spec in specs:
        whole = ((None, (0, 0, 0)), (None, (0, 0, 0)), (spec.kernel(context.capability), (c.experts, 1, 1)))
        kernels = spec.chunk_kernels(context.capability) if spec.in_chunks else whole
        for variants, (kernel, grid) in zip(stages, kernels, strict=True):
            variants.append(Variant(kernel, grid, args if kernel else {}, spec.most % MOST_ROWS))
    if c.gemv:
        stages[-1].insert(0, Variant(None, (0, 0, 0), {}, GEMV_ROWS))
    for name, variants in zip((f"{c.name}.counts", f"{c.name}.sums", c.name), stages, strict=True):
        if any(variant.code for variant in variants):
            yield Launch(name, "tokens", tuple(variants))


def _block_classes(context: PlanContext, c: fused.SortSlots) -> list[BlocksSpec]:
    """Kernels that sort slots, by most rows of a step, with the block size that the GEMM uses."""
    few = max(SMALL_BLOCK, min(SMALL_BLOCK * c.experts // c.slots, LARGE_ROWS))
    blocks = {SMALL_BLOCK: SMALL_BLOCK, min(MEDIUM_ROWS, few): SMALL_BLOCK, few: SMALL_BLOCK}
    if few < LARGE_ROWS:
        blocks[LARGE_ROWS] = LARGE_BLOCK
    blocks[MOST_ROWS] = LARGE_BLOCK
    stride = context.buffer(c.index).stride
    return [BlocksSpec(c.experts, c.slots, stride, tokens, most, c.every) for most, tokens in blocks.items()]


def _order(context: PlanContext, c: fused.SortSlots) -> Operands:
    """Scratch memory for sorted slots and their blocks."""
    longest = max(spec.list for spec in _block_classes(context, c))
    return {"order": ScratchRef("order", 4 * c.slots, ("tokens",)), "blocks": ScratchRef("blocks", 12 * longest)}


# ---- GEMMs -----------------------------------------------------------------------------------------


def slot_gemm(context: PlanContext, c: fused.SlotGemm) -> Iterator[Launch]:
    """The launch of a grouped GEMM over sorted slots; with few tokens, of GEMVs."""
    call, order = c.gemm, c.order
    args: Operands = {**_quantized(c.inputs), **weight_refs(**call.weights, bias=call.bias)}
    args |= {"out": context.ref(call.out), "index": context.ref(call.index), **_order(context, order)}
    blocks = [(spec.most, spec.tokens, spec.grid) for spec in _block_classes(context, order)]
    gemv = [(GEMV_ROWS, 1, GridSize("tokens", times=call.slots))] if order.gemv else []
    variants = []
    for most, tokens, programs in gemv + blocks:
        spec = _slot_kernel(context, c, tokens)
        grid = (programs, call.rows // spec.tile.rows, 1)
        variants.append(Variant(gemm_render.kernel(spec), grid, args, most % MOST_ROWS))
    yield Launch(c.name, "tokens", tuple(variants))


def _slot_kernel(context: PlanContext, c: fused.SlotGemm, tokens: int) -> gemm.KernelSpec:
    """The kernel with `tokens` slots per program; 1: a GEMV."""
    call = c.gemm
    format = kernel_of(packing_of(call.format, call.activation), call.activation)
    tile = tiles.choose_for_experts(format, call.rows, c.inputs.padded_k, tokens, context.rendered_for)
    if not context.inline_asm and tokens == 1:  # the interpreter runs programs serially
        tile = replace(tile, rows=32)
    strides = context.buffer(call.out).stride, context.buffer(call.index).stride
    return gemm.KernelSpec(
        format,
        call.experts * call.rows,
        c.inputs.padded_k,
        tile,
        bias=call.bias is not None,
        inline_asm=context.inline_asm,
        multiprocessors=context.rendered_for.multiprocessors,
        out="f32",
        width=call.n,
        x_groups=activation_format(call.activation).group > 0,
        gated=ops.GATED.get(call.epilogue, ""),
        limit=call.limit,
        offset=call.offset,
        experts=gemm.Experts(call.experts, call.slots, call.x_slots > 1, *strides),
    )
