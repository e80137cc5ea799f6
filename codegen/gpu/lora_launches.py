"""Launches of calls for adapters of requests (kernels: codegen/gpu/lora.py). Without an adapter in a step none run."""

from __future__ import annotations

from collections.abc import Iterator

from qcompile.codegen.gpu.context import PlanContext
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.lora import ExpandSpec, ShrinkSpec
from qcompile.codegen.gpu.operands import CountRef, GridSize, InputRef, Operands, WeightRef
from qcompile.codegen.gpu.row_launches import row_launch, row_spec
from qcompile.codegen.lora_calls import GateRows, LoraExpand, LoraShrink

_ROWS_ALONE = 64
"""The most rows of a step of which each has programs of its own: rows of different adapters share no factors."""
ADAPTED = "adapted"
"""The count by which these launches run: the rows of a step, 0 if none has an adapter."""


def _adapter_of_row(table: str) -> Operands:
    """What tells the adapter of a row."""
    inputs = {name: InputRef(name) for name in ("adapters", "row_sequence")}
    return {"table": WeightRef(table), "M": CountRef(ADAPTED), **inputs}


def lora_shrink(context: PlanContext, c: LoraShrink) -> Iterator[Launch]:
    """The launch of the first half of a change."""
    x, out = context.buffer(c.x), context.buffer(c.out)
    spec = ShrinkSpec(c.site, c.k, x.dtype, x.stride, out.stride, c.factors, x.scales, x.kind.group)
    args = _adapter_of_row(c.table) | {"x": context.ref(c.x), "out": context.ref(c.out)}
    if x.dtype == "q8":
        args["x_scale"] = context.ref(c.x, "scale")
    grid = (GridSize(ADAPTED), -(-out.width // ShrinkSpec.RANKS), 1)
    yield Launch(c.name, ADAPTED, (Variant(spec.kernel(context.capability), grid, args),), c.site)


def lora_expand(context: PlanContext, c: LoraExpand) -> Iterator[Launch]:
    """The launch of the second half: steps of many rows have programs of several rows."""
    x, out = context.buffer(c.x), context.buffer(c.out)
    args = _adapter_of_row(c.table) | {"x": context.ref(c.x), "out": context.ref(c.out)}
    variants = []
    for most, rows, ranks in ((_ROWS_ALONE, 1, 8), (0, 8, 2)):
        spec = ExpandSpec(c.site, out.width, x.stride, out.stride, c.factors, rows, ranks)
        grid = (GridSize(ADAPTED, rows), -(-out.width // ExpandSpec.COLUMNS), 1)
        variants.append(Variant(spec.kernel(context.capability), grid, args, most))
    yield Launch(c.name, ADAPTED, tuple(variants), c.site)


def gate_rows(context: PlanContext, c: GateRows) -> Iterator[Launch]:
    """The launch of a gate over what a GEMM and adapters computed."""
    spec = row_spec(context, c.x, c.out, gated=c.kind)
    yield row_launch(context, spec, c.name, context.ref(c.x), c.out, {})
