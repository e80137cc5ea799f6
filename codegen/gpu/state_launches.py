"""Launches of steps over recurrent states (kernels: codegen/gpu/states.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.context import PlanContext, weight_refs
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import Grid, GridSize, InputRef, Operands, SlotsRef
from qcompile.codegen.gpu.states import FEW_ROWS, FUSED_ROWS, ConvSpec, LogSpec, RecurrenceSpec, log_spec, prompt_spec
from qcompile.codegen.state_calls import ConvStep, RecurrenceStep
from qcompile.errors import UnsupportedError
from qcompile.formats.states import ROUND_TOKENS


def conv_step(context: PlanContext, call: ConvStep | fused.ActivatedConv) -> Iterator[Launch]:
    """The launches of a convolution: one if sequences have few rows, else one that computes and one that stores."""
    c, act = (call.conv, call.act) if isinstance(call, fused.ActivatedConv) else (call, "")
    _check_f32(context, c.x, c.out)
    x, out = context.buffer(c.x), context.buffer(c.out)
    slot_numbers = context.program.states.slot_numbers
    spec = ConvSpec(c.layer, x.stride, out.stride, c.state, slot_numbers, c.bias is not None, act=act)
    args: Operands = {"x": context.ref(c.x, column=c.x_offset), "out": context.ref(c.out), "states": SlotsRef()}
    args |= weight_refs(weight=c.weight, bias=c.bias)
    args |= {name: InputRef(name) for name in ("row_sequence", "positions", "query_start", "state_slots")}
    grid: Grid = (GridSize("tokens"), spec.programs, 1)

    def variant(spec: ConvSpec, most: int = 0) -> Variant:
        return Variant(spec.kernel(context.capability), grid, args, most)

    whole = variant(replace(spec, keeps=False))
    yield Launch(c.name, "queries", (variant(spec, FUSED_ROWS), whole))
    nothing = Variant(None, (0, 0, 0), {}, FUSED_ROWS)
    yield Launch(f"{c.name}.keep", "queries", (nothing, variant(replace(spec, computes=False))))


def recurrence_step(context: PlanContext, c: RecurrenceStep) -> Iterator[Launch]:
    """The launches of a recurrence: programs for each sequence, and with a state in fewer bits one for its log."""
    operands = {name: str(getattr(c, name)) for name in c.read_fields if getattr(c, name) is not None}
    _check_f32(context, *operands.values(), c.out)
    rates: Literal["", "heads", "keys"] = "" if c.rates is None else "keys" if c.rates_by_key else "heads"
    spec = RecurrenceSpec(
        c.layer,
        {name: context.buffer(buffer).stride for name, buffer in operands.items()},
        context.buffer(c.out).stride,
        c.state,
        context.program.states.slot_numbers,
        c.delta,
        rates,
    )
    args: Operands = {
        name: context.ref(buffer, column=getattr(c, f"{name}_offset")) for name, buffer in operands.items()
    }
    args |= {"out": context.ref(c.out), "states": SlotsRef(), **weight_refs(rates=c.rates)}
    args |= {"codes": SlotsRef()} if c.stored != "f32" else {}
    args |= {name: InputRef(name) for name in ("positions", "query_start", "state_slots", "certain")}

    def variant(spec: RecurrenceSpec, most: int = 0) -> Variant:
        return Variant(spec.kernel(context.capability), (*spec.programs, GridSize("sequences")), args, most)

    prompt = prompt_spec(spec, context.target.multiprocessors)
    last = variant(prompt) if prompt else None
    if c.stored == "f32":
        if last:
            yield Launch(c.name, "queries", (variant(spec, FEW_ROWS), last))
        else:
            yield Launch(c.name, "sequences", (variant(spec),))
        return
    apart = replace(spec, logs_shared=False)
    more = (variant(apart, FEW_ROWS), last) if last else (variant(apart),)
    yield Launch(c.name, "queries", (variant(spec, ROUND_TOKENS), *more))
    yield _log(context, c, log_spec(spec), args)


def _log(context: PlanContext, c: RecurrenceStep, spec: LogSpec, given: Operands) -> Launch:
    """The launch that logs keys and decay of steps with many rows of a sequence."""
    args: Operands = {name: given[name] for name in ("k", "decay", "states")}
    args |= {name: InputRef(name) for name in ("row_sequence", "positions", "state_slots")}
    log = Variant(spec.kernel(context.capability), (GridSize("tokens"), spec.programs, 1), args, 0)
    return Launch(f"{c.name}.log", "queries", (Variant(None, (0, 0, 0), {}, ROUND_TOKENS), log))


def _check_f32(context: PlanContext, *buffers: str) -> None:
    """Raise UnsupportedError unless the buffers are f32."""
    for name in buffers:
        if (dtype := context.buffer(name).dtype) != "f32":
            raise UnsupportedError(f"recurrent states take f32 operands, {name} is {dtype}")
