"""Fusion for GPUs: a program with calls that one kernel computes together, before launches are planned.

Each rule takes a program and returns one; RULES lists the rules in order. Calls that only fused programs have are in
codegen/gpu/fused.py. A rule fires only under two conditions: no other call reads a value that the fused kernel does not
store, and no GPU program (thread block) of the fused kernel overwrites memory that another one has yet to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from qcompile import ops
from qcompile.codegen.calls import (
    AllReduce,
    Attention,
    Call,
    Combine,
    Elementwise,
    Gemm,
    Hadamard,
    Norm,
    NormHeads,
    QuantizeRows,
    RopeAppend,
    Route,
)
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.fuse_experts import prepare_slots
from qcompile.codegen.gpu.reads import Reads
from qcompile.codegen.lora_calls import GateRows
from qcompile.codegen.program import Program
from qcompile.codegen.state_calls import ConvStep
from qcompile.errors import PassError
from qcompile.formats.registry import weight_format

MIN_PART = 32
"""Fewest elements per program if several programs quantize one row: a power of two."""


def fuse(program: Program) -> Program:
    """`program` with fused calls. Raises PassError naming a call for which there are no GPU kernels."""
    check_rings(program)
    for rule in RULES:
        program = rule(program)
    return program


def check_rings(program: Program) -> None:
    """Raise PassError unless each attention over a hierarchical cache follows the append of its own layer.

    Prompts have their newest keys and values in one staging buffer, which attention copies to the ring.
    """
    staged: int | None = None
    for call in program.calls if program.kv.hierarchical else ():
        if isinstance(call, RopeAppend):
            staged = call.layer
        elif isinstance(call, Attention):
            if call.layer != staged:
                reason = "attention over a hierarchical cache must follow the append of its layer, and only once"
                raise PassError("codegen", call.name, reason)
            staged = None


# ---- gates of GEMMs with scattered rows ------------------------------------------------------------


def separate_gates(program: Program) -> Program:
    """Gated GEMMs with explicit output columns store gate and up in bf16; the call that reads both applies the gate.

    The rows of gate and up that belong together may be in different programs of such a GEMM.
    """
    acts: dict[str, str] = {}
    calls: list[Call] = []
    for call in program.calls:
        gated = [name for name in call.reads if name in acts]
        if gated:
            call = _with_gate(call, acts[gated[0]])
        elif isinstance(call, Gemm) and call.out and call.blocks and call.epilogue in ops.GATED:
            acts[call.out] = ops.GATED[call.epilogue]
            call = replace(call, epilogue="store")
        calls.append(call)
    pairs = {name: replace(program.buffer(name), dtype="bf16", width=2 * program.buffer(name).width) for name in acts}
    buffers = tuple(pairs.get(buffer.name, buffer) for buffer in program.buffers)
    return replace(program, buffers=buffers, calls=tuple(calls))


def _with_gate(call: Call, act: str) -> Call:
    if isinstance(call, QuantizeRows):
        return fused.GatedQuantize(call.name, call.x, call.out, act)
    if isinstance(call, Hadamard):
        return fused.GatedHadamard(call.name, call.x, call.out, call.block, call.core, call.core_order, act)
    raise PassError("codegen", call.name, "GPU kernels read a gated value only to transform or quantize it")


def quantize_gates(program: Program) -> Program:
    """The call that quantizes act(gate) * up next computes it, where adapters come between a GEMM and its gate."""
    reads, calls = Reads(program), list[Call]()
    quantizing: Call | None = None
    for call, after in _with_next(program):
        if call is quantizing:
            continue
        if isinstance(call, GateRows) and isinstance(after, QuantizeRows) and _only_quantized(reads, call, after):
            call, quantizing = fused.GatedQuantize(after.name, call.x, after.out, call.kind), after
        calls.append(call)
    return replace(program, calls=tuple(calls))


def _only_quantized(reads: Reads, gate: GateRows, quantize: QuantizeRows) -> bool:
    """Whether nothing but `quantize` reads the gate's result, and its own result overwrites nothing that the gate
    reads."""
    only = quantize.x == gate.out and reads.alone(quantize, gate.out)
    return only and reads.disjoint([quantize.out], [gate.x])


# ---- results of GEMMs and attention that are quantized next ----------------------------------------


def round_results(program: Program) -> Program:
    """GEMMs and attention write bf16 themselves if the next call only rounds their result to it."""
    reads, calls = Reads(program), list[Call]()
    rounding: Call | None = None
    for call, after in _with_next(program):
        if call is rounding:
            continue
        if isinstance(call, Gemm | Attention) and (out := rounded_buffer(program, reads, call, after)):
            call, rounding = replace(call, out=out), after
        calls.append(call)
    return replace(program, calls=tuple(calls))


def rounded_buffer(program: Program, reads: Reads, maker: Gemm | Attention, after: Call | None) -> str | None:
    """The buffer to which the kernels of `maker` can write their result in bf16, or None.

    They can if only the next call, `after`, reads the result, and only rounds it.
    """
    if not isinstance(after, QuantizeRows) or after.x != maker.out or program.buffer(after.out).dtype != "bf16":
        return None
    if isinstance(maker, Gemm):
        gated = maker.epilogue in ops.GATED
        kept = (gated or maker.epilogue == "store") and maker.residual is None
        kept = kept and not maker.blocks and not weight_format(maker.format).gpu.row_major
        read, width = maker.x, maker.n // 2 if gated else maker.n
    else:
        kept, read, width = True, maker.q, maker.heads * maker.value_dim
    whole = kept and program.buffer(after.out).stride == width
    return after.out if whole and reads.alone(after, after.x) and reads.disjoint([after.out], [read]) else None


def measure_results(program: Program) -> Program:
    """Gated GEMMs and attention store magnitudes for the call that quantizes their result next (MeasuredQuantize)."""
    calls: list[Call] = []
    quantizing: Call | None = None
    for call, after in _with_next(program):
        if call is quantizing:
            continue
        measures = isinstance(call, Attention) or (isinstance(call, Gemm) and call.epilogue in ops.GATED)
        if measures and isinstance(after, QuantizeRows) and _is_measured(program, call, after):
            assert isinstance(call, Gemm | Attention)
            call, quantizing = fused.MeasuredQuantize(call.name, call, after), after
        calls.append(call)
    return replace(program, calls=tuple(calls))


def _is_measured(program: Program, call: Call, quantize: QuantizeRows) -> bool:
    """Whether `quantize` finds one scale for each row of the result of `call`, and needs no sum over the row."""
    out = program.buffer(quantize.out)
    by_row = out.dtype != "q8" or not (out.kind.group or out.groups == 1)
    return quantize.x in call.writes and by_row and out.width % MIN_PART == 0


# ---- appends to the KV cache -----------------------------------------------------------------------


def normalize_in_append(program: Program) -> Program:
    """Norms of the heads of q and k become part of the append that follows them."""
    calls: list[Call] = []
    norms: list[NormHeads] = []
    for call in program.calls:
        if isinstance(call, NormHeads):
            norms.append(call)
            continue
        if isinstance(call, RopeAppend):
            parts = _fusable_norms(norms, call)
            norms = [norm for norm in norms if norm not in parts.values()]
            fused_append = fused.NormedAppend(call.name, call, parts.get("q"), parts.get("k"))
            call = fused_append if parts else call
        calls += [*norms, call]
        norms = []
    return replace(program, calls=(*calls, *norms))


def _fusable_norms(norms: Sequence[NormHeads], append: RopeAppend) -> dict[str, NormHeads]:
    """By part, q or k: the norm that the append can do. Norms that stay separate come before it."""
    parts: dict[str, NormHeads] = {}
    separate: list[NormHeads] = []
    for norm in reversed(norms):
        part = _normalized_part(norm, append)
        if part and part not in parts and not any(_overlaps(norm, later) for later in separate):
            parts[part] = norm
        else:
            separate.append(norm)
    return parts


def _normalized_part(norm: NormHeads, append: RopeAppend) -> str:
    """The part of an append's input, q or k, that the norm normalizes; "" if it is neither."""
    if append.qkv != norm.x or norm.width != append.head_dim:
        return ""
    parts = {"q": (append.q_offset, append.heads), "k": (append.k_offset, append.kv_heads)}
    return next((part for part, place in parts.items() if place == (norm.x_offset, norm.heads)), "")


def _overlaps(a: NormHeads, b: NormHeads) -> bool:
    """Whether two norms change columns in common."""
    before = a.x_offset + a.heads * a.width <= b.x_offset or b.x_offset + b.heads * b.width <= a.x_offset
    return a.x == b.x and not before


# ---- routers and sums over slots -------------------------------------------------------------------


def add_in_combine(program: Program) -> Program:
    """Sums over slots add the buffer that the next call would add."""
    reads, calls = Reads(program), list[Call]()
    adding: Call | None = None
    for call, after in _with_next(program):
        if call is adding:
            continue
        if isinstance(call, Combine) and call.results == 1 and (other := _addend(reads, call, after)):
            assert isinstance(after, Elementwise)
            call, adding = fused.CombineAdd(call.name, call.x, after.out, other, call.slots, call.scores), after
        calls.append(call)
    return replace(program, calls=tuple(calls))


def add_in_sums(program: Program) -> Program:
    """Sums over ranks add the buffer that the next call would add."""
    reads, calls = Reads(program), list[Call]()
    adding: Call | None = None
    for call, after in _with_next(program):
        if call is adding:
            continue
        if isinstance(call, AllReduce) and (other := _addend(reads, call, after)):
            assert isinstance(after, Elementwise)
            call, adding = fused.SumAdd(call.name, call.x, after.out, other, call.ranks), after
        calls.append(call)
    return replace(program, calls=tuple(calls))


def _addend(reads: Reads, combine: Combine | AllReduce, after: Call | None) -> str | None:
    """The buffer that `after` adds to a sum over a token's slots or over ranks, if one kernel can do both; else None.

    Nothing else may read the sum, and the result must not overlap in memory what is summed, unless it replaces it.
    """
    if not isinstance(after, Elementwise) or after.kind != "add" or after.weight is not None:
        return None
    other = after.other if after.x == combine.out else after.x
    shifted = after.x_offset or after.other_offset
    if other is None or other == combine.out or combine.out not in after.reads or shifted:
        return None
    # A sum over ranks stores each element where it has read it before; one over slots reads elements of several rows.
    placed = isinstance(combine, AllReduce) and reads.in_place(after.out, combine.x)
    fits = placed or reads.disjoint([after.out], combine.reads)
    return other if reads.alone(after, combine.out) and fits else None


def norm_in_sums(program: Program) -> Program:
    """The kernel of a sum over ranks also computes the norm that reads the sum next."""
    reads, calls = Reads(program), list[Call]()
    norm: Call | None = None
    for call, after in _with_next(program):
        if call is norm:
            continue
        sums = isinstance(call, AllReduce | fused.SumAdd)
        if sums and isinstance(after, Norm) and _normalizes(program, reads, call, after):
            assert isinstance(call, AllReduce | fused.SumAdd)
            call, norm = fused.SumNorm(call.name, call, after), after
        calls.append(call)
    return replace(program, calls=tuple(calls))


def _normalizes(program: Program, reads: Reads, call: Call, norm: Norm) -> bool:
    """Whether `norm` is one of the whole rows of the sum `call`, and its result overlaps in memory nothing that other
    programs have yet to read."""
    total = call.writes[0]
    whole = norm.x == total and not norm.x_offset and program.buffer(norm.out).width == program.buffer(total).width
    return whole and reads.disjoint([norm.out], [*call.reads, total] if total not in call.reads else call.reads)


def activate_convolutions(program: Program) -> Program:
    """A convolution applies the activation that follows it, if nothing else reads the values before the activation."""
    reads, calls = Reads(program), list[Call]()
    fused_away: Call | None = None
    for call, after in zip_longest(program.calls, program.calls[1:]):
        if call is fused_away:
            continue
        if isinstance(call, ConvStep) and isinstance(after, Elementwise) and _activates(program, reads, call, after):
            call, fused_away = fused.ActivatedConv(call.name, replace(call, out=after.out), after.kind), after
        calls.append(call)
    return replace(program, calls=tuple(calls))


def _activates(program: Program, reads: Reads, conv: ConvStep, after: Elementwise) -> bool:
    """Whether `after` applies a function to the whole result of the convolution, which can store that instead."""
    whole = after.x == conv.out and after.x_offset == 0 and program.buffer(after.out).width == conv.features
    alone = after.out != conv.out and reads.alone(after, conv.out) and reads.disjoint([after.out], conv.reads)
    return after.kind in ops.UNARY and whole and alone


def chain_routes(program: Program) -> Program:
    """Consecutive steps of a router become one call, if none stores to memory that another program has yet to read."""
    reads, calls = Reads(program), list[Call]()
    for routes, run in groupby(enumerate(program.calls), lambda pair: isinstance(pair[1], Route)):
        if not routes:
            calls += [call for _, call in run]
            continue
        chain: list[Route] = []
        for place, call in run:
            assert isinstance(call, Route)
            if chain and not _is_one_kernel(reads, [*chain, call], place):
                calls.append(_chained(reads, chain, place - 1))
                chain = []
            chain.append(call)
        calls.append(_chained(reads, chain, place))
    return replace(program, calls=tuple(calls))


def _chained(reads: Reads, chain: Sequence[Route], last: int) -> fused.RouteChain:
    """A chain of steps, of which the last one is call number `last`."""
    return fused.RouteChain(chain[0].name, tuple(chain), tuple(reads.last(step.out) > last for step in chain))


def _is_one_kernel(reads: Reads, chain: Sequence[Route], last: int) -> bool:
    """Whether the steps, the last one being call number `last`, fit one kernel."""
    one = _chained(reads, chain, last)
    made = {step.out for step in chain}
    read = [name for step in chain for name in step.reads if name not in made]
    whole = not any(step.x in made and step.x_offset for step in chain)
    return whole and len(made) == len(chain) and reads.disjoint(one.writes, read)


def _with_next(program: Program) -> Iterator[tuple[Call, Call | None]]:
    """Each call and the one after it."""
    return zip_longest(program.calls, program.calls[1:])


RULES: tuple[Callable[[Program], Program], ...] = (
    separate_gates,
    quantize_gates,
    round_results,
    measure_results,
    normalize_in_append,
    add_in_combine,
    add_in_sums,
    activate_convolutions,
    chain_routes,
    prepare_slots,
    norm_in_sums,
)
