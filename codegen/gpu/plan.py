"""Plans launches: kernels, grids and operands for each call of a program, by formats and shapes.

A call's launches depend on the call and on facts of the whole program (PlanContext), not on other calls: fusion has
decided before which calls share a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qcompile.codegen.calls import (
    AllGather,
    AllReduce,
    Attention,
    Call,
    Combine,
    Elementwise,
    Embed,
    EveryExpert,
    Gather,
    Gemm,
    Hadamard,
    Logits,
    Mean,
    Norm,
    NormHeads,
    QuantizeRows,
    RopeAppend,
    RopeHeads,
    TakeRows,
)
from qcompile.codegen.feature_calls import ReadFeatures, WriteFeatures, only_for_features
from qcompile.codegen.gpu import (
    all_gather,
    all_reduce,
    attention_launches,
    expert_launches,
    features,
    fused,
    gemm_launches,
    lora_launches,
    router_launches,
    row_launches,
    state_launches,
)
from qcompile.codegen.gpu.attention_splits import MIN_LEAF_POSITIONS
from qcompile.codegen.gpu.context import PlanContext
from qcompile.codegen.gpu.embeds import embeds_of, for_one_gpu
from qcompile.codegen.gpu.fuse import fuse
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS
from qcompile.codegen.gpu.hidden import hidden_of
from qcompile.codegen.gpu.kv_pages import LEAVES, GpuKV
from qcompile.codegen.gpu.launches import Launch, LaunchPlan
from qcompile.codegen.gpu.planned_sums import sums_of
from qcompile.codegen.gpu.rounds import feedback_launch, follow_launch, head_draft_launches
from qcompile.codegen.lora_calls import GateRows, LoraExpand, LoraShrink
from qcompile.codegen.program import Program
from qcompile.codegen.state_calls import ConvStep, RecurrenceStep
from qcompile.errors import PassError, UnsupportedError
from qcompile.targets import Target

MOST_APART = 128
"""Most features of a head with registers for the sums of a leaf beside those of a split."""
WITHOUT_ATTENTION = GpuKV("kv16", 1, 4)
"""Stands for the layout of pages where no layer has any."""


def kv_of(program: Program, layer: int) -> GpuKV:
    """The layout of the KV pages of a layer for GPU kernels. UnsupportedError for formats without kernels."""
    kv = program.kv
    return GpuKV(kv.format, *kv.heads_of(layer), kv.page_tokens, value=kv.value)


def chains_leaves(program: Program, layers: Sequence[GpuKV]) -> bool:
    """Whether attention sums the leaves of a split one after the other, in all layers alike.

    For large heads, attention of prompts then takes two thirds of the time, but attention of one sequence that decodes
    two to four times as long (docs/gpu_kernels.md): so only beside recurrent states, where few layers have attention.
    """
    large = any(kv.dim > MOST_APART for kv in layers)
    hierarchical = any(kv.hierarchical for kv in layers)
    return large and program.states.slot_bytes > 0 and not hierarchical


def make_plan(program: Program, target: Target, split: int = 0, inline_asm: bool = True) -> LaunchPlan:
    """The plan of a program for a GPU.

    Attention splits have `split` positions; 0 takes the number from codegen/gpu/gemm/tiles.py. `inline_asm` False gives
    kernels for Triton's interpreter. Raises UnsupportedError naming the call that has no GPU kernel.
    """
    layers = [kv_of(program, layer) for layer in range(program.kv.layers)] or [WITHOUT_ATTENTION]
    layers = [replace(kv, chained=chains_leaves(program, layers) and not kv.value) for kv in layers]
    split = split or min(tiles.split_positions(kv) for kv in layers)
    leaves = max(1, min(LEAVES, split // MIN_LEAF_POSITIONS))
    kvs = tuple(replace(kv, most_leaves=min(kv.most_leaves, leaves)) for kv in layers)
    program = fuse(for_one_gpu(program))
    context = PlanContext(program, kvs, split, target, inline_asm)
    featured = only_for_features(program.calls)
    launches: list[Launch] = []
    for number, call in enumerate(program.calls):
        planned = launches_of(context, call)
        launches += map(features.if_featured, planned) if number in featured else planned
    around = (feedback_launch(),), (follow_launch(),)
    facts: dict[str, Any] = {
        "sums": sums_of(context),
        "hidden": hidden_of(context),
        "embeds": embeds_of(program),
        "features": program.features,
    }
    facts["drafting"] = head_draft_launches() if program.reads_features else ()
    return LaunchPlan(target, kvs, split, tuple(launches), *around, slot_bytes=program.states.slot_bytes, **facts)


def launches_of(context: PlanContext, call: Call) -> tuple[Launch, ...]:
    """The launches of one call of a fused program. Raises PassError naming a call without a kernel."""
    make = _LAUNCHES.get(type(call))
    try:
        if make is None:
            raise UnsupportedError(f"operator {call.kernel} has no GPU kernel yet")
        return tuple(make(context, call))
    except UnsupportedError as error:
        raise PassError("codegen", call.name, str(error)) from error


def measured_quantize(context: PlanContext, c: fused.MeasuredQuantize) -> Iterator[Launch]:
    """The launches of a GEMM or attention that also stores the largest magnitudes of parts of each row, and of the
    quantization that reads them."""
    maker = c.maker
    if isinstance(maker, Attention):
        yield from attention_launches.attention(context, maker, measured=True)
        magnitudes = {DECODE_TOKENS: 2 * maker.heads}
    else:
        specs = gemm_launches.kernel_specs(context, maker, measured=True)
        yield gemm_launches.gemm_launch(context, maker, specs)
        magnitudes = {most: spec.amax_parts for most, spec in specs.items() if spec.amax}
    merged = isinstance(maker, Attention)  # kernels for prompts store no magnitudes
    yield from row_launches.measured_quantize(context, c.quantize, magnitudes, decode_only=merged)


_LAUNCHES: Mapping[type[Call], Callable[[PlanContext, Any], Iterator[Launch]]] = {
    Embed: row_launches.embed,
    Norm: row_launches.norm,
    NormHeads: row_launches.norm_heads,
    QuantizeRows: row_launches.quantize,
    Hadamard: row_launches.hadamard,
    Gather: row_launches.gather,
    TakeRows: row_launches.take_rows,
    Elementwise: row_launches.elementwise,
    Mean: row_launches.mean,
    Logits: row_launches.logits,
    Gemm: gemm_launches.gemm_launches,
    RopeAppend: attention_launches.append,
    RopeHeads: attention_launches.rope_heads,
    Attention: attention_launches.attention,
    Combine: router_launches.combine,
    EveryExpert: router_launches.every_expert,
    ConvStep: state_launches.conv_step,
    AllGather: all_gather.all_gather,
    AllReduce: all_reduce.all_reduce,
    RecurrenceStep: state_launches.recurrence_step,
    LoraShrink: lora_launches.lora_shrink,
    LoraExpand: lora_launches.lora_expand,
    GateRows: lora_launches.gate_rows,
    ReadFeatures: features.read_features,
    WriteFeatures: features.write_features,
    fused.GatedQuantize: row_launches.gated_quantize,
    fused.GatedHadamard: row_launches.hadamard,
    fused.MeasuredQuantize: measured_quantize,
    fused.NormedAppend: attention_launches.append,
    fused.CombineAdd: router_launches.combine,
    fused.SumAdd: all_reduce.all_reduce,
    fused.SumNorm: all_reduce.all_reduce,
    fused.ActivatedConv: state_launches.conv_step,
    fused.RouteChain: router_launches.route_chain,
    fused.QuantizeSlots: expert_launches.quantize_slots,
    fused.NormSlots: expert_launches.norm_slots,
    fused.SortSlots: expert_launches.sort_slots,
    fused.SlotGemm: expert_launches.slot_gemm,
}
"""What plans the launches of each kind of call."""
