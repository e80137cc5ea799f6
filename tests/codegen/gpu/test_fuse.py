"""Fusion of programs for GPUs: each rule fires where it may, nowhere else, and does not change what is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qcompile.codegen.buffers import Buffer
from qcompile.codegen.calls import (
    AllReduce,
    Attention,
    Call,
    Combine,
    Elementwise,
    ExpertGemm,
    Gemm,
    Hadamard,
    Norm,
    NormHeads,
    QuantizeRows,
    RopeAppend,
    Route,
    TakeRows,
)
from qcompile.codegen.gpu import fuse, fused
from qcompile.codegen.gpu.fuse_experts import prepare_slots
from qcompile.codegen.gpu.plan import launches_of, make_plan
from qcompile.codegen.gpu.row_launches import SPREAD_ROWS
from qcompile.codegen.kv_layout import KVLayout
from qcompile.codegen.program import Program
from qcompile.errors import PassError
from qcompile.targets import TARGETS
from tests.support.graphs import step_inputs
from tests.support.interpreted import interpreted
from tests.support.tiny import Chunk

WIDTH = 256
"""Columns of each buffer of the programs below."""


def program(*calls: Call, cache: Any = "kv16", **dtypes: Any) -> Program:
    """A program with separate buffers; those in `dtypes` have that type, others are f32. q8: no sums over rows."""
    names = dict.fromkeys(name for call in calls for name in (*call.reads, *call.writes))
    groups = {name: 128 if dtypes.get(name) == "q8" else 0 for name in names}
    buffers = (
        Buffer(name, dtypes.get(name, "f32"), WIDTH, groups[name], offset=8 * WIDTH * place)
        for place, name in enumerate(names)
    )
    return Program(40, 64, tuple(buffers), calls, (), KVLayout(cache, 2, 1, 64))


def names(result: Program) -> list[str]:
    """The kind of each call."""
    return [call.kernel for call in result.calls]


def gemm(name: str, x: str, out: str, **more: Any) -> Gemm:
    return Gemm(name, x, "bf16", more.pop("n", WIDTH), WIDTH, {"w": "w"}, out=out, **more)


# ---- gates of GEMMs with scattered rows ------------------------------------------------------------

SCATTERED = gemm("gate_up", "x", "h", n=2 * WIDTH, epilogue="silu_mul", blocks=32)


def test_the_reader_of_scattered_rows_applies_the_gate() -> None:
    for reader in (QuantizeRows("q", "h", "y"), Hadamard("t", "h", "y", 128, "core", 1)):
        result = fuse.separate_gates(program(SCATTERED, reader, x="bf16", y="q8"))
        assert names(result) == ["gemm", f"gated_{reader.kernel}"]
        made, read = result.calls
        assert isinstance(made, Gemm) and made.epilogue == "store" and getattr(read, "act", "") == "silu"
        assert (result.buffer("h").dtype, result.buffer("h").width) == ("bf16", 2 * WIDTH)
        assert result.buffer("h").row_bytes == program(SCATTERED).buffer("h").row_bytes


def test_gates_stay_where_rows_are_in_order() -> None:
    before = program(replace(SCATTERED, blocks=0), QuantizeRows("q", "h", "y"), x="bf16", y="q8")
    assert fuse.separate_gates(before) == before


def test_other_readers_of_scattered_rows_are_refused() -> None:
    with pytest.raises(PassError, match="node other: GPU kernels read a gated value only to transform or quantize it"):
        fuse.separate_gates(program(SCATTERED, Elementwise("other", "add", "x2", "y", other="h")))


# ---- results that are quantized next ---------------------------------------------------------------

GATED = gemm("gate_up", "x", "h", n=2 * WIDTH, epilogue="silu_mul")
ATTENTION = Attention("attention", "qkv", 0, "h", 4, 1, 64, 1.0, 0)


@pytest.mark.parametrize("maker", [GATED, ATTENTION, gemm("plain", "x", "h")], ids=lambda call: call.name)
def test_a_result_that_is_only_rounded_is_written_in_bf16(maker: Any) -> None:
    """test_rounded.py has the cases in which it is not."""
    before = program(maker, QuantizeRows("round", "h", "y"), gemm("next", "y", "z"), x="bf16", y="bf16")
    result = fuse.round_results(before)
    assert [(call.name, call.writes) for call in result.calls] == [(maker.name, ("y",)), ("next", ("z",))]
    again = replace(before, calls=(*before.calls, TakeRows("take", "h", "last")))
    again = replace(again, buffers=(*again.buffers, replace(again.buffer("z"), name="last", offset=1 << 20)))
    assert fuse.round_results(again) == again  # the f32 result is read again


@pytest.mark.parametrize("maker", [GATED, ATTENTION], ids=lambda call: call.name)
def test_a_result_that_is_quantized_is_measured(maker: Any) -> None:
    quantize = QuantizeRows("quantize", "h", "y")
    result = fuse.measure_results(program(maker, quantize, x="bf16", y="q8"))
    assert result.calls == (fused.MeasuredQuantize(maker.name, maker, quantize),)
    assert result.calls[0].reads == (*maker.reads, "h") and result.calls[0].writes == ("h", "y")


@pytest.mark.parametrize(
    ("maker", "changes"),
    [
        (gemm("plain", "x", "h"), {}),  # its kernels measure nothing
        (GATED, {"group": 256}),  # one sum over the row, which parts would have to add up
        (GATED, {"activation": "int8_g128"}),  # a scale per group, so no magnitude of the row
        (GATED, {"width": 240}),  # no whole parts
        (GATED, {"x": "other"}),  # of another buffer
    ],
)
def test_a_result_that_is_not_measured(maker: Gemm, changes: dict[str, Any]) -> None:
    quantize = QuantizeRows("quantize", changes.pop("x", "h"), "y")
    before = program(maker, quantize, x="bf16", y="q8")
    buffers = tuple(replace(b, **changes) if b.name == "y" else b for b in before.buffers)
    before = replace(before, buffers=buffers)
    assert fuse.measure_results(before) == before


# ---- appends ---------------------------------------------------------------------------------------

APPEND = RopeAppend("append", "qkv", 0, 128, 192, 2, 1, 64, 0)
NORM_Q = NormHeads("norm_q", "rms", "qkv", 0, 2, 64, 1e-5)
NORM_K = NormHeads("norm_k", "rms", "qkv", 128, 1, 64, 1e-5)


def test_norms_of_heads_are_part_of_the_append() -> None:
    result = fuse.normalize_in_append(program(NORM_Q, NORM_K, APPEND, APPEND))
    assert result.calls == (fused.NormedAppend("append", APPEND, NORM_Q, NORM_K), APPEND)
    assert result.calls[0].reads == result.calls[0].writes == ("qkv",)
    result = fuse.normalize_in_append(program(NORM_K, APPEND))
    assert result.calls == (fused.NormedAppend("append", APPEND, None, NORM_K),)


@pytest.mark.parametrize(
    "changes",
    [{"x": "other"}, {"width": 32, "heads": 4}, {"heads": 1}, {"x_offset": 64}],
    ids=["another buffer", "parts of heads", "some heads", "q and k"],
)
def test_norms_of_other_columns_stay(changes: dict[str, Any]) -> None:
    before = program(replace(NORM_Q, **changes), APPEND)
    assert fuse.normalize_in_append(before) == before


def test_the_order_of_norms_stays() -> None:
    """Of two norms of the same columns the last one is the append's; none overtakes a norm that changes its columns."""
    twice = fuse.normalize_in_append(program(NORM_Q, replace(NORM_Q, name="again"), APPEND))
    assert twice.calls == (NORM_Q, fused.NormedAppend("append", APPEND, replace(NORM_Q, name="again")))
    before = program(NORM_Q, replace(NORM_Q, name="all", heads=1, width=256), APPEND)
    assert fuse.normalize_in_append(before) == before
    between = program(NORM_Q, Elementwise("twice", "scale", "qkv", "qkv", factor=2.0), APPEND)
    assert fuse.normalize_in_append(between) == between


def test_attention_over_a_ring_follows_its_append() -> None:
    attend = replace(ATTENTION, layer=0)
    fuse.check_rings(program(APPEND, attend, cache="kv_hier"))
    fuse.check_rings(program(attend, attend))
    for calls in ((attend,), (APPEND, attend, attend), (replace(APPEND, layer=1), attend)):
        with pytest.raises(PassError, match="node attention: attention over a hierarchical cache must follow"):
            fuse.check_rings(program(*calls, cache="kv_hier"))


# ---- routers and sums over slots -------------------------------------------------------------------

COMBINE = Combine("combine", "slots", "sum", 2, scores="scores")
ADD = Elementwise("add", "add", "stream", "next", other="sum")


def test_the_sum_over_slots_is_added_at_once() -> None:
    want = fused.CombineAdd("combine", "slots", "next", "stream", 2, "scores")
    assert fuse.add_in_combine(program(COMBINE, ADD)).calls == (want,)
    assert fuse.add_in_combine(program(COMBINE, replace(ADD, x="sum", other="stream"))).calls == (want,)
    assert want.reads == ("slots", "scores", "stream") and want.writes == ("next",)


def test_nothing_is_added_to_several_sums_over_slots() -> None:
    before = program(replace(COMBINE, results=2), ADD)
    assert fuse.add_in_combine(before) == before


@pytest.mark.parametrize(
    "after",
    [
        (replace(ADD, kind="mul"),),
        (replace(ADD, x="sum"),),  # twice the sum
        (replace(ADD, x_offset=8),),
        (replace(ADD, other=None, x="sum", weight="bias"),),
        (replace(ADD, out="slots"),),  # which other programs have yet to read
        (TakeRows("take", "scores", "taken"), ADD),  # not the next call
        (ADD, TakeRows("take", "sum", "taken")),  # the sum is read again
    ],
)
def test_what_is_not_added_to_sums_over_slots(after: tuple[Call, ...]) -> None:
    before = program(COMBINE, *after)
    assert fuse.add_in_combine(before) == before


SOFTMAX = Route("softmax", "softmax", "x", "scores", 64)
TOP_K = Route("top_k", "top_k", "scores", "index", 64)
PICK = Route("pick", "pick", "scores", "picked", 64, index="index")
READERS = (TakeRows("a", "index", "a"), TakeRows("b", "picked", "b"))


SUM = AllReduce("sum_over_ranks", "part", "sum", 2)


def test_a_sum_over_ranks_adds_the_residual_stream() -> None:
    want = fused.SumAdd("sum_over_ranks", "part", "next", "stream", 2)
    assert fuse.add_in_sums(program(SUM, ADD)).calls == (want,)
    result = program(SUM, ADD)
    offsets = {buffer.name: buffer.offset for buffer in result.buffers}
    placed = [replace(b, offset=offsets["part"]) if b.name == "next" else b for b in result.buffers]
    assert fuse.add_in_sums(replace(result, buffers=tuple(placed))).calls == (want,)  # where the part was


def test_a_sum_over_ranks_stays_where_its_result_is_wanted_or_would_overlap() -> None:
    again = replace(ADD, name="again", out="later")
    for calls in ((SUM, ADD, again), (SUM, replace(ADD, kind="mul")), (SUM, replace(ADD, weight="w", other=None))):
        assert fuse.add_in_sums(program(*calls)).calls == calls
    result = program(SUM, ADD)
    offsets = {buffer.name: buffer.offset for buffer in result.buffers}
    shifted = [replace(b, offset=offsets["part"] + 8) if b.name == "next" else b for b in result.buffers]
    assert names(fuse.add_in_sums(replace(result, buffers=tuple(shifted)))) == ["all_reduce", "elementwise"]


def test_a_sum_over_ranks_is_one_call_with_its_norm() -> None:
    norm = Norm("norm", "rms", "next", "codes", 1e-5)
    before = fuse.add_in_sums(program(SUM, ADD, norm, codes="q8"))
    want = fused.SumNorm("sum_over_ranks", before.calls[0], norm)
    assert fuse.norm_in_sums(before).calls == (want,)
    assert want.reads == ("part", "stream") and want.writes == ("next", "codes") and want.total == "next"
    alone = replace(norm, x=SUM.out)
    assert fuse.norm_in_sums(program(SUM, alone)).calls == (fused.SumNorm("sum_over_ranks", SUM, alone),)


def test_a_norm_of_a_sum_stays_where_it_is_another_call_s_or_would_overlap() -> None:
    norm = Norm("norm", "rms", SUM.out, "codes", 1e-5)
    between = TakeRows("take", "other", "rows")
    for calls in ((SUM, replace(norm, x_offset=8)), (SUM, replace(norm, x="other")), (SUM, between, norm)):
        assert fuse.norm_in_sums(program(*calls)).calls == calls
    result = program(SUM, norm)
    offsets = {buffer.name: buffer.offset for buffer in result.buffers}
    for name in (SUM.x, SUM.out):  # another program may have yet to read that row
        placed = [replace(b, offset=offsets[name] + 8) if b.name == "codes" else b for b in result.buffers]
        assert names(fuse.norm_in_sums(replace(result, buffers=tuple(placed)))) == ["all_reduce", "norm"]


def test_steps_of_a_router_are_one_call() -> None:
    chain = fuse.chain_routes(program(SOFTMAX, TOP_K, PICK, *READERS)).calls[0]
    assert chain == fused.RouteChain("softmax", (SOFTMAX, TOP_K, PICK), (False, True, True))
    assert chain.reads == ("x",) and chain.writes == ("index", "picked")
    before = program(SOFTMAX, TakeRows("c", "x", "c"), TOP_K, PICK, *READERS)
    result = fuse.chain_routes(before)
    assert names(result)[:3] == ["route_chain", "take_rows", "route_chain"]
    assert [call.writes for call in result.calls[:3:2]] == [("scores",), ("index", "picked")]


@pytest.mark.parametrize(
    "steps",
    [
        (SOFTMAX, replace(TOP_K, x_offset=8)),  # columns of a result that only one program has
        (SOFTMAX, replace(SOFTMAX, name="again")),  # two results in one buffer
    ],
)
def test_steps_of_a_router_that_stay_apart(steps: tuple[Call, ...]) -> None:
    result = fuse.chain_routes(program(*steps, TakeRows("a", steps[-1].writes[0], "a")))
    assert names(result) == ["route_chain", "route_chain", "take_rows"]


def test_a_router_stores_nothing_where_other_programs_have_yet_to_read() -> None:
    before = program(SOFTMAX, TOP_K, READERS[0])
    over = replace(before.buffer("index"), offset=before.buffer("x").offset + 64)
    result = fuse.chain_routes(replace(before, buffers=(before.buffer("x"), before.buffer("scores"), over)))
    assert names(result) == ["route_chain", "route_chain", "take_rows"]


# ---- experts ---------------------------------------------------------------------------------------


def expert_gemm(name: str, x: str, out: str, **more: Any) -> ExpertGemm:
    how = {"format": "bf16", "activation": "bf16", "group": 0, "n": 128, "rows": 128, "k": WIDTH, "experts": 4}
    return ExpertGemm(
        name, x, more.pop("index", "index"), out, slots=2, x_slots=1, weights={"w": "w"}, strides={}, **(how | more)
    )


NORM = Norm("norm", "rms", "stream", "x", 1e-5)
GATE, UP = expert_gemm("gate", "x", "g"), expert_gemm("up", "x", "u")


def test_experts_share_inputs_and_order() -> None:
    result = prepare_slots(program(GATE, UP))
    assert [call.name for call in result.calls] == ["gate.round", "gate.order", "gate", "up"]
    assert names(result) == ["quantize_slots", "sort_slots", "slot_gemm", "slot_gemm"]
    inputs, order, gate, _ = result.calls
    assert inputs.reads == ("x",) and order.reads == ("index",) and inputs.writes == order.writes == ()
    assert gate.reads == GATE.reads and gate.writes == GATE.writes
    result = prepare_slots(program(NORM, GATE, UP))
    assert names(result) == ["norm_slots", "sort_slots", "slot_gemm", "slot_gemm"]
    assert result.calls[0].reads == ("stream",) and result.calls[0].writes == ("x",)


@pytest.mark.parametrize(
    ("between", "up", "again"),
    [
        (Elementwise("c", "scale", "x", "x"), UP, ["up.round"]),
        (Route("c", "top_k", "r", "index", 4), UP, ["up.order"]),
        (Elementwise("c", "scale", "y", "y"), replace(UP, x="y"), ["up.round"]),
        (Elementwise("c", "scale", "y", "y"), replace(UP, index="other"), ["up.order"]),
        (Elementwise("c", "scale", "y", "y"), replace(UP, k=128), ["up.round"]),
        (Elementwise("c", "scale", "y", "y"), replace(UP, x="y", index="other"), ["up.round", "up.order"]),
    ],
)
def test_experts_prepare_anew_what_has_changed(between: Call, up: Call, again: list[str]) -> None:
    result = prepare_slots(program(NORM, GATE, between, up))
    assert [call.name for call in result.calls] == ["norm", "gate.order", "gate", "c", *again, "up"]


def test_a_norm_rounds_only_rows_that_the_next_experts_read() -> None:
    for norm, gate in ((NORM, replace(GATE, x="y")), (NORM, replace(GATE, k=128)), (replace(NORM, out="y"), GATE)):
        assert names(prepare_slots(program(norm, gate)))[:2] == ["norm", "quantize_slots"]


# ---- fused programs compute what unfused ones do ---------------------------------------------------


def test_launches_depend_on_the_call_alone() -> None:
    from qcompile.codegen.gpu.context import PlanContext
    from qcompile.codegen.gpu.plan import kv_of

    before = program(NORM_Q, NORM_K, APPEND, ATTENTION, QuantizeRows("quantize", "h", "y"), y="q8")
    result = fuse.fuse(before)
    assert names(result) == ["normed_append", "measured_quantize"]
    context = PlanContext(result, (kv_of(result, 0),), 64, TARGETS["h200"])
    forward = [launches_of(context, call) for call in result.calls]
    assert forward == [launches_of(context, call) for call in reversed(result.calls)][::-1]
    assert names(before) == ["norm_heads", "norm_heads", "rope_append", "attention", "quantize"]


def test_a_long_step_begins_one_program_a_row_for_norms_of_heads() -> None:
    from qcompile.codegen.gpu.context import PlanContext
    from qcompile.codegen.gpu.plan import kv_of

    before = program(NORM_Q, NORM_K, APPEND, ATTENTION)
    context = PlanContext(before, (kv_of(before, 0),), 64, TARGETS["h200"])
    [two], [one] = (list(launches_of(context, norm)) for norm in (NORM_Q, NORM_K))
    assert [(variant.most, variant.grid[1]) for variant in two.variants] == [(SPREAD_ROWS, 2), (0, 1)]
    assert [(variant.most, variant.grid[1]) for variant in one.variants] == [(0, 1)]


def interpret_sums() -> None:
    """Sums over slots that are added at once, and in two launches."""
    from tests.support.gpu_interpreter import Interpreter

    before = program(COMBINE, ADD)
    buffers = tuple(replace(b, width=2 * WIDTH) if b.name == "slots" else b for b in before.buffers)
    before, outs, rules = replace(before, buffers=buffers), [], fuse.RULES
    given = torch.randn(64 * before.arena_bytes("tokens") // 4, generator=torch.Generator().manual_seed(1))
    for fuse.RULES in (rules, ()):
        machine = Interpreter(before, make_plan(before, TARGETS["h200"], split=64, inline_asm=False), {})
        machine.arena["tokens"], machine.counts = given.clone().view(torch.uint8), {"tokens": 3}
        for launch in machine.plan.launches:
            machine.launch(launch)
        start = 64 * before.buffer("next").offset
        outs.append(machine.arena["tokens"][start:].view(torch.float32)[: 3 * WIDTH])
        assert len(machine.plan.launches) == (1 if fuse.RULES else 2)
    assert torch.equal(*outs) and not outs[0].isnan().any()


def test_sums_over_slots_interpreted() -> None:
    interpreted(__name__, "interpret_sums()")


def interpret_without(rule: str, recipe: str, most: float, **shape: Any) -> None:
    """A prompt and a step behind it, with all rules and without one of them: logits differ by at most `most`."""
    from tests.codegen.gpu.test_step import lowered
    from tests.support.gpu_interpreter import Interpreter

    graph, before, blobs = lowered(recipe, **shape)
    ids = torch.randint(0, 60, (1, 9), generator=torch.Generator().manual_seed(1))
    pages = step_inputs(ids, None, graph)[3].tolist()[0]
    rules, logits, kinds = fuse.RULES, [], []
    for fuse.RULES in (rules, tuple(each for each in rules if each.__name__ != rule)):
        kinds.append(names(fuse.fuse(before)))
        machine = Interpreter(before, make_plan(before, TARGETS["h200"], split=64, inline_asm=False), blobs)
        parts = [machine.step([Chunk(ids[0, a:b].tolist(), a, pages)])[0] for a, b in ((0, 8), (8, 9))]
        logits.append(torch.cat(parts))
    assert kinds[0] != kinds[1]
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error <= most, (rule, error)


@pytest.mark.parametrize(
    "given",
    ["'measure_results', 'qserve', 0.0", "'normalize_in_append', 'bf16', 1e-2, head_norm='heads'"],
)
def test_a_rule_does_not_change_what_is_computed_interpreted(given: str) -> None:
    interpreted(__name__, f"interpret_without({given})")
