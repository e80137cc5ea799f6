"""Passes from precision to memory plan: each fires, does not fire where it must not, and keeps the function."""

from __future__ import annotations

import pytest
import torch

from qcompile import check, ops
from qcompile.codegen.lower import lower
from qcompile.codegen.lowering_state import Lowering
from qcompile.codegen.packing import WeightTable
from qcompile.errors import PassError, UsageError
from qcompile.formats.blocks import padded_inputs
from qcompile.formats.registry import STORED_FORMATS, weight_format
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass, apply
from qcompile.passes.cache import Cache
from qcompile.passes.fuse import Fuse
from qcompile.passes.merge import Merge
from qcompile.passes.plan_memory import PlanMemory
from qcompile.passes.quantize import Quantize
from tests.support.graphs import decoder, latent, recurrent, sequence_inputs, step_inputs

# For sums of the same float32 numbers in two different orders.
REORDERED = 2e-6


def through(graph: Graph, *passes: Pass) -> Graph:
    for rewrite in passes:
        graph = apply(rewrite, graph).graph
    return graph


def step_logits(graph: Graph, batch: int = 2, tokens: int = 7) -> torch.Tensor:
    ids, _ = sequence_inputs(tokens, batch)
    return graph.run(*step_inputs(ids, None, graph))[0].view(batch, tokens, -1)


def test_precision_separates_the_head() -> None:
    graph = through(decoder(), AssignPrecision("w4_asym_g128", "int8", "w8_sym_channel", "int8"))
    formats = [node.meta["precision"]["weight"] for node in graph.calls("linear")]
    assert formats == ["w4_asym_g128"] * 14 + ["w8_sym_channel"]


def test_precision_refuses_what_has_no_kernel() -> None:
    with pytest.raises(UsageError, match="qoq_g128 have no kernel for activations in bf16"):
        AssignPrecision("qoq_g128", "bf16")
    with pytest.raises(UsageError, match="w3 is unknown"):
        AssignPrecision("w3")


@pytest.mark.parametrize("bias", [False, True])
def test_merge_joins_siblings_and_gates(bias: bool) -> None:
    before = through(decoder(bias=bias, ffn=40), AssignPrecision())
    result = apply(Merge(), before)
    assert result.fired == 4
    assert len(result.graph.calls("linear")) == 2 * 3 + 1
    assert len(result.graph.calls("gated_linear")) == 2
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-14


def test_merge_leaves_different_precisions_apart() -> None:
    graph = through(decoder(), AssignPrecision())
    for node in graph.calls("linear"):
        if "v0" in str(node.args[1]) or "up0" in str(node.args[1]):
            node.meta["precision"] = {"weight": "bf16", "activation": "bf16"}
    merged = apply(Merge(), graph).graph
    assert len(merged.calls("gated_linear")) == 1
    assert len([n for n in merged.calls("concat_rows") if len(n.args[0]) == 2]) >= 1  # only q and k of layer 0


def test_merge_leaves_a_gate_that_others_read() -> None:
    graph = through(decoder(layers=1), AssignPrecision())
    gate = graph.calls("unary")[0]
    with graph.fx.inserting_after(graph.calls("mul")[0]):
        again = graph.call("add", graph.calls("mul")[0], gate)
    down = graph.calls("linear")[-2]
    down.update_arg(0, again)
    merged = apply(Merge(), graph).graph
    assert not merged.calls("gated_linear")
    assert check.equivalent(merged, graph, sequence_inputs()) < 1e-14


@pytest.mark.parametrize("format", sorted(set(STORED_FORMATS) - {"f32", "bf16", "mix_4_8"}))
def test_quantize_computes_with_rounded_weights_and_activations(format: str) -> None:
    kinds = [each.name for each in weight_format(format).activations]
    kind = "int8" if "int8" in kinds else kinds[0]
    before = through(decoder(layers=1), AssignPrecision(format, kind, format, kind))
    after = through(before, Quantize())
    assert not after.calls("linear")
    inputs = sequence_inputs()
    by_hand = before.clone()
    for node in by_hand.calls("linear"):
        with by_hand.fx.inserting_before(node):
            parts = by_hand.call("quantize_weight", node.args[1], format)
            codes = by_hand.call("quantize_activation", node.args[0], kind, 128)
            gemm = by_hand.call("gemm", codes, parts, None, None, format, "store", node.meta["val"].shape[-1])
        by_hand.replace(node, gemm)
    assert torch.equal(after.run(*inputs), by_hand.run(*inputs))
    assert check.max_relative_error(after.run(*inputs), before.run(*inputs)) > 1e-3  # it does round


def test_a_nested_weight_is_stored_once_for_both_its_precisions() -> None:
    graph = through(decoder(layers=1), AssignPrecision("nested_8_4", "int8", "w8_sym_channel", "int8"), Quantize())
    whole = graph.calls("quantize_weight")[0]
    upper = graph.call_weight("upper_nibble", whole)
    table = WeightTable()
    low = Lowering(graph, table)
    names = low.packed(upper, "w4_asym_g128", "int8")
    assert names == {role: name for role, name in low.packed(whole, "nested_8_4", "int8").items() if role != "low"}
    assert len(table.weights) == 1 and len(table.weights[0].blobs) == 4
    again = through(decoder(layers=1), AssignPrecision("nested_4", "int8", "w8_sym_channel", "int8"), Quantize())
    four = through(decoder(layers=1), AssignPrecision("w4_asym_g128", "int8", "w8_sym_channel", "int8"), Quantize())
    assert again.calls("upper_nibble")
    assert torch.equal(again.run(*sequence_inputs()), four.run(*sequence_inputs()))


def test_quantize_mixes_two_widths_by_the_share_asked_for() -> None:
    graph = through(decoder(layers=1), AssignPrecision("mix_4_8", "int8_g128", "w8_sym_channel", "int8"), Merge())
    mixed = through(graph, Quantize(mixed_fraction=0.25)).calls("quantize_mixed")
    wide = [graph.evaluate(node.args[1]) for node in mixed]
    assert [int(w.sum()) for w in wide] == [round(len(w) * 0.25) for w in wide]
    errors = [
        check.max_relative_error(
            through(graph, Quantize(mixed_fraction=f)).run(*sequence_inputs()), graph.run(*sequence_inputs())
        )
        for f in (0.0, 0.5, 1.0)
    ]
    assert errors == sorted(errors, reverse=True) and errors[2] < errors[0] / 4
    with pytest.raises(UsageError, match="between 0 and 1"):
        Quantize(mixed_fraction=1.5)


def test_quantize_rounds_one_activation_once() -> None:
    graph = through(decoder(layers=1), AssignPrecision("w8_sym_channel", "int8"), Quantize())
    readers = [len(node.users) for node in graph.calls("quantize_activation")]
    assert max(readers) == 3 and len(readers) == 5


def test_quantize_copies_slices_that_linears_read() -> None:
    before = through(recurrent(layers=1, rank=24), AssignPrecision("f32", "f32"))
    after = through(before, Quantize())
    copied = [ops.operand(node, "sources")[0] for node in after.calls("gather_features")]
    assert [ops.operand(part, "start") for part in copied] == [0, 24]
    assert check.equivalent(after, before, sequence_inputs()) < REORDERED


def test_quantize_copies_no_whole_values() -> None:
    graph = through(recurrent(layers=1), AssignPrecision("f32", "f32"))
    y = graph.calls("rms_norm")[0]
    with graph.fx.inserting_after(y):
        same = graph.call("slice_features", y, 0, y.meta["val"].shape[-1])
    graph.calls("linear")[0].update_arg(0, same)
    assert not through(graph, Quantize()).calls("gather_features")


@pytest.mark.parametrize("part", [0, 1])
def test_code_generation_refuses_a_gemm_of_a_slice(part: int) -> None:
    """A kernel takes the width of its rows for their stride, whatever column the slice begins at."""
    graph = through(recurrent(layers=1, rank=24), AssignPrecision("f32", "f32"), Quantize())
    copied = graph.calls("gather_features")[part]
    graph.replace(copied, ops.operand(copied, "sources")[0])
    with pytest.raises(PassError, match="reads a slice of a wider value"):
        lower(through(graph, Cache("kv32"), PlanMemory()), WeightTable())


def test_quantize_refuses_an_activation_times_an_activation() -> None:
    graph = through(decoder(layers=1), AssignPrecision())
    node = graph.calls("linear")[0]
    node.update_arg(1, graph.calls("embedding")[0])
    with pytest.raises(PassError, match="not by a weight"):
        Quantize().run(graph)


@pytest.mark.parametrize("format", ["kv32", "kv16", "kv8", "kv4"])
@pytest.mark.parametrize("window", [0, 3])
def test_cache_reads_back_rounded_keys_and_values(format: str, window: int) -> None:
    before = through(decoder(window=window), AssignPrecision(), Merge(), Quantize())
    after = through(before, Cache(format))
    error = check.max_relative_error(step_logits(after), before.run(*sequence_inputs()))
    assert error < {"kv32": REORDERED, "kv16": 0.02, "kv8": 0.05, "kv4": 0.6}[format]
    assert error > {"kv32": -1, "kv16": 1e-5, "kv8": 1e-4, "kv4": 1e-2}[format]


def test_cache_carries_a_sequence_from_step_to_step() -> None:
    graph = through(decoder(), AssignPrecision(), Merge(), Quantize(), Cache("kv8"))
    ids, _ = sequence_inputs(9)
    whole = graph.run(*step_inputs(ids, None, graph))[0].view(2, 9, -1)
    first, cache = graph.run(*step_inputs(ids[:, :4], None, graph))
    second, _ = graph.run(*step_inputs(ids[:, 4:], cache, graph, start=4))
    parts = torch.cat((first.view(2, 4, -1), second.view(2, 5, -1)), 1)
    assert check.max_relative_error(parts, whole) < REORDERED


def test_cache_gathers_rows_before_the_last_norm() -> None:
    graph = through(decoder(), AssignPrecision(), Merge(), Quantize(), Cache("kv32"))
    taken = graph.calls("take_rows")[0]
    assert [n.name for n in taken.users] == [graph.calls("rms_norm")[-1].name]


def test_cache_refuses_a_model_without_attention() -> None:
    graph = through(decoder(), AssignPrecision(), Quantize())
    for node in graph.calls("attention"):
        node.replace_all_uses_with(node.args[0])
        graph.fx.erase_node(node)
    with pytest.raises(PassError, match="the model has no attention"):
        Cache("kv16").run(graph)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_fuse_joins_and_changes_nothing(rotary: bool, bias: bool) -> None:
    precision = AssignPrecision("w4_asym_g128", "int8", "w8_sym_channel", "int8")
    before = through(decoder(rotary=rotary, bias=bias), precision, Merge(), Quantize(), Cache("kv8"))
    result = apply(Fuse(), before)
    kinds = {
        kind: len(result.graph.calls(kind)) for kind in ("norm_quantize", "rope_append", "kv_append", "add", "rms_norm")
    }
    assert kinds == {"norm_quantize": 5, "rope_append": 2, "kv_append": 0, "add": 0, "rms_norm": 0}
    assert result.fired == 11
    assert torch.equal(step_logits(result.graph), step_logits(before))


@pytest.mark.parametrize("head_norm", ["heads", "whole"])
@pytest.mark.parametrize("bias", [False, "q"])
def test_fuse_takes_norms_in_heads_along(head_norm: str, bias: bool | str) -> None:
    graph = decoder(head_norm=head_norm, bias=bias)
    before = through(graph, AssignPrecision(), Merge(), Quantize(), Cache("kv32"))
    fused = apply(Fuse(), before).graph
    assert len(fused.calls("norm_heads")) == 4 and len(fused.calls("rope_append")) == 2
    assert torch.equal(step_logits(fused), step_logits(before))
    assert check.max_relative_error(step_logits(fused), graph.run(*sequence_inputs())) < REORDERED


def test_values_narrower_than_keys_are_filled_up() -> None:
    before = latent()
    graph = through(before, AssignPrecision(), Merge(), Quantize(), Cache("kv32"))
    assert graph.inputs[-1].meta["val"].shape[-2:] == (3, 32)
    assert len(graph.calls("gather_features")) == 3  # keys, values, and the unpadded result
    assert check.max_relative_error(step_logits(graph), before.run(*sequence_inputs())) < REORDERED
    fused = apply(Fuse(), graph).graph
    filled, cut = (node.args[1] for node in fused.calls("gather_features"))
    assert (fused.evaluate(filled) < 0).sum() == 3 * 16 and (fused.evaluate(cut) >= 0).all()
    assert len(fused.calls("rope_append")) == 1 and torch.equal(step_logits(fused), step_logits(graph))


def test_values_as_wide_as_keys_stay_as_they_are() -> None:
    graph = through(latent(narrow=32), AssignPrecision(), Merge(), Quantize(), Cache("kv32"))
    assert len(graph.calls("gather_features")) == 1  # the keys
    with pytest.raises(PassError, match="differ in heads or size"):
        through(latent(narrow=40), AssignPrecision(), Merge(), Quantize(), Cache("kv32"))


def test_fuse_never_overwrites_queries_that_others_read() -> None:
    """They are copied, beside keys and values."""
    graph = through(decoder(layers=1), AssignPrecision(), Merge(), Quantize(), Cache("kv32"))
    attended = graph.calls("kv_attention")[0]
    split = graph.calls("rope")[0].args[0]
    with graph.fx.inserting_after(attended):
        extra = graph.call("add", attended, split)
    graph.calls("merge_heads")[0].update_arg(0, extra)
    fused = apply(Fuse(), graph).graph
    assert len(fused.calls("gather_features")) == len(fused.calls("rope_append")) == 1
    assert torch.equal(step_logits(fused), step_logits(graph))


def test_fuse_leaves_a_norm_that_others_read() -> None:
    graph = through(decoder(layers=1), AssignPrecision("w8_sym_channel", "int8"), Merge(), Quantize(), Cache("kv32"))
    norm = graph.calls("rms_norm")[0]
    add = graph.calls("add")[0]
    with graph.fx.inserting_before(add):
        extra = graph.call("add", norm, add.args[1])
    add.update_arg(1, extra)
    fused = apply(Fuse(), graph).graph
    assert len(fused.calls("rms_norm")) >= 1
    assert torch.equal(step_logits(fused), step_logits(graph))


def test_fuse_rotates_keys_apart_that_turn_unlike_queries() -> None:
    graph = through(decoder(layers=1), AssignPrecision(), Merge(), Quantize(), Cache("kv32"))
    graph.calls("rope")[1].update_arg(3, 2.0)
    fused = apply(Fuse(), graph).graph
    assert len(fused.calls("rope_heads")) == 2 and not fused.calls("rope")
    assert torch.equal(step_logits(fused), step_logits(graph))


@pytest.mark.parametrize("activation", ["f32", "int8"])
def test_values_alive_together_never_share_bytes(activation: str) -> None:
    format = "f32" if activation == "f32" else "w4_asym_g128"
    graph = through(
        decoder(layers=3), AssignPrecision(format, activation), Merge(), Quantize(), Cache("kv16"), Fuse(), PlanMemory()
    )
    order = {node: i for i, node in enumerate(graph.nodes)}
    lives: dict[str, tuple[int, int, int, int, str]] = {}
    for node in graph.nodes:
        if "storage" not in node.meta:
            continue
        s = node.meta["storage"]
        stride = padded_inputs(s["width"])
        size = stride + 4 + 4 * -(-stride // s["group"]) if s["dtype"] == "q8" else stride * 4
        first, last = order[node], max([order[u] for u in node.users] + [order[node]])
        if s["buffer"] in lives:
            first, last = min(first, lives[s["buffer"]][0]), max(last, lives[s["buffer"]][1])
        lives[s["buffer"]] = (first, last, s["offset"], s["offset"] + size, s["rows"])
    values = list(lives.values())
    for i, (a0, a1, b0, b1, rows) in enumerate(values):
        for c0, c1, d0, d1, other in values[i + 1 :]:
            assert rows != other or a1 < c0 or c1 < a0 or b1 <= d0 or d1 <= b0
    assert sum(v[3] - v[2] for v in values) > 2 * max(v[3] for v in values)  # bytes are shared at all


def test_a_graph_survives_json() -> None:
    graph = through(
        decoder(), AssignPrecision("qoq_g128", "int8"), Merge(), Quantize(), Cache("kv4"), Fuse(), PlanMemory()
    )
    again = Graph.from_json(graph.to_json(), graph.weights)
    again.infer([node.meta["val"] for node in graph.inputs])
    assert again.to_json() == graph.to_json()
    assert torch.equal(step_logits(again), step_logits(graph))
