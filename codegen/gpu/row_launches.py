"""Launches of calls that treat rows independently (kernels: codegen/gpu/rows.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from qcompile import ops
from qcompile.codegen.calls import (
    Elementwise,
    Embed,
    Gather,
    Hadamard,
    Logits,
    Mean,
    Norm,
    NormHeads,
    QuantizeRows,
    TakeRows,
)
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.context import PlanContext, amax_ref, single_launch, weight_refs
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import (
    GridSize,
    InputRef,
    Operand,
    Operands,
    ScratchRef,
    WeightRef,
)
from qcompile.codegen.gpu.rows import MAX_WIDTH, Columns, GatherSpec, HadamardSpec, RowSpec, in_blocks
from qcompile.codegen.gpu.sample import choosing
from qcompile.errors import UnsupportedError
from qcompile.formats.rounding import groups_of
from qcompile.formats.symmetric import GPU_BYTES

SPREAD_ROWS = 256
"""Most rows of a step for which each head of a norm has a program."""
QUANTIZE_PART = 1024
"""Most elements per program if several programs quantize one row: a power of two."""


def row_launch(context: PlanContext, spec: RowSpec, name: str, x: Operand, out: str, more: Operands) -> Launch:
    """A launch of a row kernel, spec.blocks programs for each row of the buffer `out`."""
    b = context.buffer(out)
    args: Operands = {"x": x, "out": context.ref(out)}
    if b.dtype == "q8":
        args |= {"out_scale": context.ref(out, "scale"), "out_sum": context.ref(out, "sums")}
    kernel = spec.kernel(context.capability)
    return single_launch(name, b.rows, kernel, (GridSize(b.rows), spec.blocks, 1), args | more)


def written_to(context: PlanContext, out: str, base: RowSpec) -> RowSpec:
    """`base`, writing to the buffer `out` in its dtype, with the sum of codes if the row has only one."""
    b = context.buffer(out)
    if b.dtype != "q8":
        return replace(base, out=b.dtype, out_stride=b.stride)
    # GEMMs with one scale per row subtract zero points at the end by this sum; those with groups do not need it.
    kind, sums = b.kind, b.whole_sum
    more: dict[str, Any] = {"top": kind.top, "group": kind.group, "last_top": kind.last_top, "reach": kind.reach}
    more["row_scales"] = b.scales if b.scales != groups_of(b.width, kind.group) else 0
    return replace(base, out="q8", out_stride=b.stride, sums=sums, **more)


def row_spec(context: PlanContext, x: str, out: str, width: int = 0, **more: Any) -> RowSpec:
    """A row kernel from buffer x to buffer out, `width` elements (0: as many as out has)."""
    b = context.buffer(x)
    if b.dtype != "f32":
        raise UnsupportedError(f"GPU row kernels read f32, not {b.dtype}")
    return written_to(context, out, RowSpec(width or context.buffer(out).width, b.stride, 0, **more))


# ---- embeddings, norms, columns --------------------------------------------------------------------


def embed(context: PlanContext, c: Embed) -> Iterator[Launch]:
    """The launch of an embedding."""
    width = context.buffer(c.out).width
    index, last = {"tokens": ("token_ids", 0), "positions": ("positions", c.vocab - 1)}[c.index]
    stride = GPU_BYTES.padded_inputs(width) if c.row_scale else width
    spec = RowSpec(width, stride, 0, c.table_dtype, indexed=True, last=last, given=c.given, factor=c.scale)
    operands: Operands = {"index": InputRef(index), **weight_refs(row_scale=c.row_scale)}
    if c.given:
        operands["embeds"] = InputRef("embeds")
    yield row_launch(context, written_to(context, c.out, spec), c.name, WeightRef(c.table), c.out, operands)


def norm_fields(c: Norm | NormHeads) -> dict[str, Any]:
    """RowSpec's fields for a norm."""
    return {"norm": c.kind, "eps": c.eps, "weight": c.weight is not None, "bias": c.bias is not None}


def norm(context: PlanContext, c: Norm) -> Iterator[Launch]:
    """The launch of a norm."""
    spec, weights = row_spec(context, c.x, c.out, **norm_fields(c)), weight_refs(weight=c.weight, bias=c.bias)
    yield row_launch(context, spec, c.name, context.ref(c.x, column=c.x_offset), c.out, weights)


def norm_heads(context: PlanContext, c: NormHeads) -> Iterator[Launch]:
    """The launch of a norm of heads that no append can do."""
    if c.by_head:
        raise UnsupportedError("a norm by head has no GPU kernel but in what appends those heads")
    spec = row_spec(context, c.x, c.x, c.width, blocks=c.heads, **norm_fields(c))
    place, rows = context.ref(c.x, column=c.x_offset), context.buffer(c.x).rows
    args: Operands = {"x": place, "out": place, **weight_refs(weight=c.weight, bias=c.bias)}
    specs = [(SPREAD_ROWS, spec), (0, replace(spec, looped=True))] if c.heads > 1 else [(0, spec)]
    variants = [
        Variant(each.kernel(context.capability), (GridSize(rows), each.programs, 1), args, most) for most, each in specs
    ]
    yield Launch(c.name, rows, tuple(variants))


def gather(context: PlanContext, c: Gather) -> Iterator[Launch]:
    """The launch of a gather of columns."""
    out = context.buffer(c.out)
    strides = [context.buffer(name).stride for name in c.sources]
    spec = GatherSpec(out.width, out.stride, tuple(map(Columns, c.widths, strides)))
    args: Operands = {"out": context.ref(c.out), "index": WeightRef(c.index)}
    for number, (name, column) in enumerate(zip(c.sources, c.offsets, strict=True)):
        args[f"x{number}"] = context.ref(name, column=column)
    kernel = spec.kernel(context.capability)
    yield single_launch(c.name, out.rows, kernel, (GridSize(out.rows), spec.programs, 1), args)


def take_rows(context: PlanContext, c: TakeRows) -> Iterator[Launch]:
    """The launch that takes the rows with outputs."""
    spec = row_spec(context, c.x, c.out, indexed=True)
    yield row_launch(context, spec, c.name, context.ref(c.x), c.out, {"index": InputRef("output_rows")})


def logits(context: PlanContext, c: Logits) -> Iterator[Launch]:
    """The launches that store logits and choose tokens."""
    b = context.buffer(c.x)
    spec = RowSpec(x_stride=b.stride, out_stride=b.width, **in_blocks(b.width))
    args: Operands = {"x": context.ref(c.x), "out": InputRef("logits")}
    kernel = spec.kernel(context.capability)
    yield single_launch(c.name, b.rows, kernel, (GridSize(b.rows), spec.blocks, 1), args)
    yield from choosing(c.name, b.width, context.capability)


# ---- elementwise maps ------------------------------------------------------------------------------


def elementwise(context: PlanContext, c: Elementwise) -> Iterator[Launch]:
    """The launch of an elementwise map."""
    fields, operands = _map(context, c)
    if "binary" not in fields:
        fields |= in_blocks(context.buffer(c.out).width, MAX_WIDTH)
    spec = row_spec(context, c.x, c.out, **fields)
    yield row_launch(context, spec, c.name, context.ref(c.x, column=c.x_offset), c.out, operands)


def _map(context: PlanContext, c: Elementwise) -> tuple[dict[str, Any], Operands]:
    """RowSpec's fields for an elementwise map, and its operands besides x."""
    if c.kind in ("scale", "shift"):
        return {"factor" if c.kind == "scale" else "offset": c.factor}, {}
    if c.kind == "clamp":
        return {"low": c.low, "high": c.high}, {}
    if c.kind == "power":
        return {"power": c.factor}, {}
    if c.kind in ("add", "mul", "add_row", "mul_row"):
        if c.other is None:
            return {"binary": c.kind, "weight": c.weight is not None}, weight_refs(weight=c.weight)
        fields = {"binary": c.kind, "weight": False, "other_stride": context.buffer(c.other).stride}
        return fields, {"other": context.ref(c.other, column=c.other_offset)}
    if c.kind not in (*ops.UNARY, *ops.CURVES):
        raise UnsupportedError(f"there is no GPU kernel {c.kind}")
    return {"unary": c.kind}, weight_refs(curve=c.weight)


def mean(context: PlanContext, c: Mean) -> Iterator[Launch]:
    """The launch of means over columns."""
    spec = row_spec(context, c.x, c.out, c.width, blocks=context.buffer(c.out).width, mean=True)
    yield row_launch(context, spec, c.name, context.ref(c.x, column=c.x_offset), c.out, {})


# ---- quantization ----------------------------------------------------------------------------------


def quantize(context: PlanContext, c: QuantizeRows) -> Iterator[Launch]:
    """The launch of a quantization."""
    spec = row_spec(context, c.x, c.out)
    launch = row_launch(context, spec, c.name, context.ref(c.x), c.out, {})
    yield replace(launch, variants=(*_group_variants(context, launch, spec), *launch.variants))


def gated_quantize(context: PlanContext, c: fused.GatedQuantize) -> Iterator[Launch]:
    """The launch of a quantization of act(gate) * up."""
    x = context.buffer(c.x)
    spec = RowSpec(context.buffer(c.out).width, x.stride, 0, "f32" if x.dtype == "f32" else "bf16", gated=c.act)
    yield row_launch(context, written_to(context, c.out, spec), c.name, context.ref(c.x), c.out, {})


def measured_quantize(
    context: PlanContext, c: QuantizeRows, magnitudes: Mapping[int, int], decode_only: bool
) -> Iterator[Launch]:
    """The launches of a quantization for which earlier kernels store magnitudes of parts of each row.

    `magnitudes` has the number of parts for up to that many rows of a step. With `decode_only`, only steps without
    prompts have them.
    """
    spec = row_spec(context, c.x, c.out)
    whole = row_launch(context, spec, c.name, context.ref(c.x), c.out, {})
    known = [_parts_variant(context, whole, spec, most, count) for most, count in magnitudes.items()]
    launch = replace(whole, variants=(*known, *_group_variants(context, whole, spec), *whole.variants))
    yield from [replace(launch, by="decode_tokens"), replace(whole, by="other_tokens")] if decode_only else [launch]


def _group_variants(context: PlanContext, launch: Launch, spec: RowSpec) -> list[Variant]:
    """The variant of few rows with several programs per row, if groups with a scale of their own divide a row."""
    part = math.gcd(spec.width, QUANTIZE_PART)
    divides = spec.group and part < spec.width and part % spec.group == 0 and spec.last_top == spec.top
    return [_parts_variant(context, launch, spec, DECODE_TOKENS)] if divides else []


def _parts_variant(context: PlanContext, launch: Launch, spec: RowSpec, most: int, amax_parts: int = 0) -> Variant:
    """For up to `most` rows, several programs per row: parts are whole groups, or the row's magnitudes are known."""
    parts = spec.width // math.gcd(spec.width, QUANTIZE_PART)
    spec = replace(spec, width=spec.width // parts, blocks=parts, amax_parts=amax_parts)
    whole = launch.variants[0]
    args = whole.args | ({"amax": amax_ref(amax_parts)} if amax_parts else {})
    return Variant(spec.kernel(context.capability), (whole.grid[0], parts, 1), args, most)


# ---- Hadamard transforms ---------------------------------------------------------------------------


def hadamard(context: PlanContext, c: Hadamard | fused.GatedHadamard) -> Iterator[Launch]:
    """The launch of a Hadamard transform, and that of the quantization of its result."""
    b, act = context.buffer(c.out), c.act if isinstance(c, fused.GatedHadamard) else ""
    direct = b.dtype == "f32"
    if direct and b.stride != b.width:
        raise UnsupportedError(f"{b.width} columns are not whole blocks")
    spec = HadamardSpec(b.width, context.buffer(c.x).stride, c.block, c.core_order, act)
    out = context.ref(c.out) if direct else ScratchRef("rotated", 4 * b.width, (b.rows,))
    args: Operands = {"x": context.ref(c.x), "out": out, "core": WeightRef(c.core)}
    kernel = spec.kernel(context.capability)
    yield single_launch(c.name, b.rows, kernel, (GridSize(b.rows), 1, 1), args)
    if not direct:
        spec_of_rows = written_to(context, c.out, RowSpec(b.width, b.width, 0))
        yield row_launch(context, spec_of_rows, f"{c.name}.quantize", out, c.out, {})
