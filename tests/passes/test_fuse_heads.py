"""Attention layers that differ, through cache, fuse and memory plan: each stage keeps the function."""

from __future__ import annotations

import pytest
import torch

from qcompile import check, ops
from qcompile.calibration import Calibration
from qcompile.codegen.calls import RopeHeads
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass, apply
from qcompile.passes.cache import Cache
from qcompile.passes.center_keys import CenterKeys
from qcompile.passes.fuse import Fuse
from qcompile.passes.merge import Merge
from qcompile.passes.plan_memory import PlanMemory
from qcompile.passes.quantize import Quantize
from qcompile.passes.rotate_keys import RotateKeys
from tests.support.graphs import sequence_inputs, step_inputs
from tests.support.layers import MIXED, Layer, layered

TOKENS = 50
ROUNDED = 2e-5
"""float32 sums in another order, through five layers."""


def through(graph: Graph, *passes: Pass) -> Graph:
    for rewrite in passes:
        graph = apply(rewrite, graph).graph
    return graph


def cached(graph: Graph) -> Graph:
    return through(graph, AssignPrecision(), Merge(), Quantize(), Cache("kv32"))


def step_logits(graph: Graph) -> torch.Tensor:
    ids, _ = sequence_inputs(TOKENS, 2)
    logits: torch.Tensor = graph.run(*step_inputs(ids, None, graph))[0]
    return logits.view(2, TOKENS, -1)


def test_layers_that_differ_keep_the_function() -> None:
    before = layered()
    wanted = before.run(*sequence_inputs(TOKENS, 2))
    after = cached(before)
    assert check.max_relative_error(step_logits(after), wanted) < ROUNDED
    fused = through(after, Fuse())
    assert check.max_relative_error(step_logits(fused), wanted) < ROUNDED
    through(fused, PlanMemory())


def test_layers_share_what_an_earlier_one_appended() -> None:
    fused = through(cached(layered()), Fuse())
    assert [ops.operand(n, "layer") for n in fused.calls("rope_append")] == [0, 1, 2]
    assert [ops.operand(n, "layer") for n in fused.calls("kv_attention")] == [0, 1, 1, 2, 0]
    assert len(fused.calls("rope_heads")) == 2  # the queries of those that share
    assert not fused.calls("kv_append", "rope", "rms_norm_heads")
    assert fused.inputs[-1].meta["val"].shape[0] == 3


def test_layout_of_layers_that_differ() -> None:
    program = lower(through(cached(layered()), Fuse(), PlanMemory()), WeightTable())
    assert program.kv.by_layer == ((2, 16), (1, 32), (4, 32))
    assert (program.kv.layers, program.kv.kv_heads, program.kv.head_dim) == (3, 4, 32)
    sizes = tuple(heads * 2 * 64 * 4 * dim for heads, dim in program.kv.by_layer)
    assert program.kv.layer_page_bytes == sizes and program.kv.page_bytes == sum(sizes)
    assert sum(isinstance(call, RopeHeads) for call in program.calls) == 2
    alike = lower(through(cached(layered(MIXED[:1])), Fuse(), PlanMemory()), WeightTable())
    assert alike.kv.by_layer == () and "by_layer" not in alike.kv.facts


@pytest.mark.parametrize(
    "layer",
    [
        Layer(key_scaling=2.0),
        Layer(value_norm=True, values=8),
        Layer(kv_heads=4, gated=True, chunk=7, window=5),
    ],
    ids=["keys turned unlike queries", "narrow values normalized", "gated, window and chunk"],
)
def test_heads_made_by_their_own_operators(layer: Layer) -> None:
    before = layered((layer,))
    wanted = before.run(*sequence_inputs(TOKENS, 2))
    fused = through(cached(before), Fuse())
    assert check.max_relative_error(step_logits(fused), wanted) < ROUNDED
    assert len(fused.calls("rope_append")) == 1 and not fused.calls("rope", "kv_append")
    lower(through(fused, PlanMemory()), WeightTable())


@pytest.mark.parametrize("rewrite", [RotateKeys(enabled=True), CenterKeys(enabled=True)], ids=["rotated", "centered"])
def test_shared_keys_stay_shared(rewrite: Pass) -> None:
    before = layered()
    before.calibration = Calibration(torch.randint(0, 50, (4, 32), generator=torch.Generator().manual_seed(3)))
    wanted = before.run(*sequence_inputs(TOKENS, 2))
    after = apply(rewrite, before)
    assert after.fired == len(MIXED)
    step = cached(after.graph)
    assert len(step.calls("kv_append")) == 3
    fused = through(step, Fuse())
    assert check.max_relative_error(step_logits(fused), wanted) < ROUNDED
    lower(through(fused, PlanMemory()), WeightTable())


def test_keys_that_are_also_values_are_not_overwritten() -> None:
    graph = layered((Layer(),))
    node = graph.calls("attention")[0]
    ops.set_operands(node, v=ops.operand(ops.operand(ops.operand(node, "k"), "x"), "x"))  # before norm and rope
    graph.erase_dead()
    wanted = graph.run(*sequence_inputs(TOKENS, 2))
    assert check.max_relative_error(step_logits(through(cached(graph), Fuse(), PlanMemory())), wanted) < ROUNDED


def test_a_rope_of_other_positions_has_no_kernel() -> None:
    graph = cached(layered((Layer(),)))
    rope = graph.calls("rope")[1]
    ops.set_operands(rope, positions=graph.inputs[2])
    with pytest.raises(PassError, match="rope"):
        lower(through(graph, Fuse(), PlanMemory()), WeightTable())
