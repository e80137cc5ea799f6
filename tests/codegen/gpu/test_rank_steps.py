"""Whole steps of a divided model as GPU kernels, each rank in a process, against the graphs of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcompile import recipes
from qcompile.codegen.gpu import peer_memory as layouts
from qcompile.codegen.gpu.fill import padded_program
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.rank_programs import rank_programs
from qcompile.graph import Graph
from qcompile.passes.base import run_passes
from qcompile.passes.rank_graphs import other_ranks
from qcompile.passes.schedule import configure
from qcompile.targets import TARGETS
from tests.codegen.cpu.test_experts import decoder as experts
from tests.support.graphs import decoder, step_inputs
from tests.support.interpreted import interpreted
from tests.support.ranks import TWO, run_together
from tests.support.tiny import Chunk

SHAPE: dict[str, Any] = {"vocab": 96, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "layers": 1}
GRAPHS: dict[str, tuple[str, Any]] = {
    "norms of sums": ("w8a8", lambda: decoder(**SHAPE)),
    "sums of norms": ("w8a8", lambda: decoder(**SHAPE, late_norms=True)),
    "experts": ("w4a8", lambda: experts(experts=4, hidden=128, inner=256, vocab=96, wide=256, biased=False)),
}
ERROR = 0.04
"""Of one device's steps by these recipes (tests/codegen/gpu/test_step.py): small differences move codes."""
FEW = 4
"""Most rows of a sum that all ranks compute, here."""


def ranks_of(graph: Graph, recipe: str) -> tuple[list[Graph], list[Any], dict[str, torch.Tensor]]:
    """The last graphs of both ranks, their programs, and the packed weights of both."""
    passes = configure(recipes.get_recipe(recipe).settings(kind="cuda"), TWO)
    graphs, _ = run_passes(graph, passes[1:])
    others = other_ranks(graphs, passes)
    table = WeightTable(GPU_PACKING)
    programs = rank_programs(padded_program(lower(graphs[-1], table)), others, table, padded_program)
    blobs = {name: blob for w in table.weights for (name, _), blob in zip(w.blobs, w.produce(), strict=True)}
    return [graphs[-1], *others], programs, blobs


def interpret(name: str) -> None:
    """A text in steps of many rows and of few, in a process that has TRITON_INTERPRET set."""
    from tests.support.exchanges import Exchanging, shared, together
    from tests.support.rank_interpreter import RankInterpreter

    layouts.FEW_ROWS = FEW
    recipe, made = GRAPHS[name]
    graphs, programs, blobs = ranks_of(made(), recipe)
    plans = [make_plan(program, TARGETS["h200"], split=64, inline_asm=False) for program in programs]
    sums = plans[0].sums
    ids = torch.randint(0, 90, (1, 20), generator=torch.Generator().manual_seed(1))
    inputs = step_inputs(ids, None, graphs[0])
    want = run_together(graphs, inputs, torch.float32)
    size = sums["data"] + 64 * sums["group"]
    memory = [shared(-(-size // 8), dtype=torch.int64) for _ in programs]
    results = [shared(2, 20, want.shape[-1]) for _ in memory]
    pages = inputs[3].tolist()[0]

    def work(own: Exchanging) -> None:
        machine = RankInterpreter(programs[own.rank], plans[own.rank], blobs, own.rank, memory)
        results[own.rank][0] = machine.step([Chunk(ids[0].tolist(), 0, pages)])[0]
        for start, end in ((0, 15), (15, 17), (17, 18), (18, 20)):
            part = machine.step([Chunk(ids[0, start:end].tolist(), start, pages)])[0]
            results[own.rank][1, start:end] = part

    together(memory, work)
    assert torch.equal(results[0], results[1])
    whole, parts = results[0]
    assert ((whole - want).norm() / want.norm()).item() < ERROR
    assert torch.equal(whole, parts)  # products are of integers, and all sums of floats have one order


@pytest.mark.parametrize("name", GRAPHS)
def test_steps_of_two_ranks_interpreted(name: str) -> None:
    interpreted(__name__, f"interpret({name!r})")
