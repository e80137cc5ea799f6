"""Linears prepared for adapters: where, how factors follow what passes do to a weight, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qcompile import ops
from qcompile.artifact.adapted import Adapted
from qcompile.checkpoints.adapters import read_adapter
from qcompile.clock import Clock, silent
from qcompile.graph import Graph, Weight, WeightStore
from qcompile.passes.adapted_linears import ROUNDED
from qcompile.passes.lora import Lora, described, refusals, sites
from qcompile.passes.rewrite import ImportOptions, rewrite
from qcompile.passes.schedule import Schedule
from qcompile.recipe_files.resolved import resolve
from qcompile.runtime.lora.factors import SiteFactors, factors
from tests.support.adapters import adapter_of, save
from tests.support.graphs import decoder


def passed(model: Any, recipe: str, **options: Any) -> Graph:
    """The graph after all passes."""
    named = {name.replace("__", "."): value for name, value in options.items()}
    schedule = Schedule(resolve(recipe, {"lora.rank": 6} | named), "cpu")
    return rewrite(model, schedule.model_passes(), ImportOptions(), Clock(silent))[0][-1]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


def unrounded(graph: Graph, gemm: Any, chosen: dict[Any, torch.Tensor]) -> torch.Tensor:
    """The weight of a gemm before it is rounded; of a rank's gemm, the rank's part of it."""
    node, parts = ops.operand(gemm, "weight"), list[Any]()
    while (kind := ops.name_of(node.target)) in (*ROUNDED, "take_parts"):
        parts += [ops.operands(node)] * (kind == "take_parts")
        node = ops.operand(node, "weight" if kind in ("upper_nibble", "take_parts") else "w")
    value = graph.evaluate(node, chosen)
    for part in reversed(parts):
        value = ops.reference("take_spans")(value, part.spans, part.axis)
    return value


def dense(site: SiteFactors, n: int, k: int) -> torch.Tensor:
    """B A [n, k] of an adapter in a linear, from its blocks."""
    b = torch.zeros(len(site.blocks) * 16, site.ranks)
    for number, (first, count, at) in enumerate(site.blocks.tolist()):
        rows = site.b[at // 16 : at // 16 + count].float()
        b[number * 16 : number * 16 + 16, first : first + count] = rows.T
    return (b @ site.a.float())[:n, :k]


@pytest.mark.parametrize(
    "recipe, options",
    [
        ("f32", {}),
        ("f32", {"fold_norms__enabled": True, "rotate__enabled": True, "rotate__online": True}),
        ("f32", {"smooth__enabled": True, "reorder__enabled": True}),
        ("qserve", {}),
        ("w4a4", {}),
        ("mixllm", {}),
        ("f32", {"shard__ranks": 2, "rotate__enabled": True, "fold_norms__enabled": True}),
        ("bf16", {"shard__ranks": 2, "shard__rank": 1}),
    ],
)
def test_factors_follow_their_weights(
    tiny_checkpoint: Path, model: Any, tmp_path: Path, recipe: str, options: dict[str, Any]
) -> None:
    """Whatever passes make of a weight W, they make of W + B A the same plus the factors' product."""
    graph = passed(tiny_checkpoint, recipe, **options)
    tensors = adapter_of(model, rank=3)
    adapter = read_adapter(save(tmp_path / "tuned", tensors, r=3))
    adapted = Adapted.from_bytes(described(graph, 6).to_bytes())
    assert [site.name for site in adapted.sites] == [site.gemm.name for site in sites(graph)]
    result = factors(adapted, adapter)
    changed = WeightStore(dict(graph.weights.entries))
    for module, change in adapter.low_rank.items():
        entry = changed.entries[f"{module}.weight"]
        value = entry.load() + change.product(1.0).float()
        changed.entries[f"{module}.weight"] = Weight(entry.shape, entry.dtype, value.clone)
    assert len(result) == 8
    for site, place in zip(result, sites(graph), strict=True):
        assert site is not None
        chosen: dict[Any, torch.Tensor] = {}  # what is chosen by the weights' values stays as it was
        before = unrounded(graph, place.gemm, chosen)
        after = unrounded(Graph(graph.fx, changed, graph.info, graph.stage), place.gemm, chosen)
        error = (dense(site, *before.shape) - (after - before)).norm()
        rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[site.a.dtype]  # of both factors
        assert error < rounding * (after - before).norm()


def test_the_graph_computes_the_same(model: Any, tiny_checkpoint: Path) -> None:
    """Without adapters, and with a gate that is computed apart."""
    one, other = passed(tiny_checkpoint, "w8a8"), passed(tiny_checkpoint, "w8a8", lora__rank=0)
    assert one.calls("lora_shrink", "lora_expand", "gate_rows") and not other.calls("lora_expand", "gate_rows")
    rows = torch.tensor([3, 1, 2])
    step = [rows, torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.arange(2)[None], rows[:2] - 1]
    cache = next(node for node in one.inputs if node.target == "step_cache").meta["val"]
    results = [graph.run(*step, torch.zeros(cache.shape))[0] for graph in (one, other)]
    assert torch.equal(*results)


def test_what_has_no_place(tiny_checkpoint: Path) -> None:
    graph = passed(tiny_checkpoint, "f32")
    assert refusals(graph) == {"lm_head.weight": "only rows with requested logits compute it"}
    assert not passed(tiny_checkpoint, "f32", lora__rank=0).calls("lora_expand")


def test_weights_with_other_readers() -> None:
    """A weight that two linears share would need two changes; one that a bias is computed from, one more."""
    graph = decoder(layers=2, hidden=48, ffn=64).clone()
    shared = graph.calls("linear")
    twin = [node for node in shared if ops.operand(node, "weight").meta["val"].shape == (64, 48)]
    ops.set_operands(twin[-1], weight=ops.operand(twin[0], "weight"))
    graph.weights.add_tensor("shift", torch.ones(64))
    down = next(node for node in shared if ops.operand(node, "weight").meta["val"].shape == (48, 64))
    vector = graph.call_weight("matvec", ops.operand(down, "weight"), graph.weight("shift"))
    ops.set_operands(down, bias=vector)
    refused = refusals(passed(graph, "f32"))
    assert refused[str(ops.operand(twin[0], "weight").target)] == "several linears share it"
    assert "reads it too" in refused[str(ops.operand(down, "weight").target)]


def test_ranks_are_checked() -> None:
    with pytest.raises(Exception, match=r"lora\.rank=-1 must be from 0"):
        Lora(-1)
    assert not Lora().wanted and not Lora(4).for_draft().wanted
