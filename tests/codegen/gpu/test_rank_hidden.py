"""Final hidden states of a divided model, interpreted: all ranks have them in memory before the output head."""

from __future__ import annotations

from types import SimpleNamespace
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
from qcompile.passes.base import run_passes
from qcompile.passes.rank_graphs import other_ranks
from qcompile.passes.schedule import configure
from qcompile.runtime.cuda.hidden import read_hidden, why_not
from qcompile.targets import TARGETS
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted
from tests.support.ranks import TWO
from tests.support.tiny import Chunk

SHAPE: dict[str, Any] = {
    "vocab": 128,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 256,
    "layers": 1,
}
FEW = 4
"""Most rows of a sum that all ranks compute, here: steps have more, and fewer."""


def interpret(late_norms: bool, divided_head: bool) -> None:
    """States of a text in steps of many rows and of few, and the logits that the head makes of them."""
    from tests.support.exchanges import Exchanging, shared, together
    from tests.support.gpu_machine import HostDriver
    from tests.support.rank_interpreter import RankInterpreter

    layouts.FEW_ROWS = FEW
    graph = decoder(**SHAPE, late_norms=late_norms)
    passes = configure(recipes.get_recipe("bf16").settings(kind="cuda"), TWO | {"shard.head": str(divided_head)})
    graphs, _ = run_passes(graph, passes[1:])
    table = WeightTable(GPU_PACKING)
    first = padded_program(lower(graphs[-1], table))
    programs = rank_programs(first, other_ranks(graphs, passes), table, padded_program)
    blobs = {name: blob for w in table.weights for (name, _), blob in zip(w.blobs, w.produce(), strict=True)}
    plans = [make_plan(program, TARGETS["h200"], split=64, inline_asm=False) for program in programs]
    assert not any(plan.embeds for plan in plans)  # they would be in the memory of one rank
    assert not why_not({"hidden": plans[0].hidden, "sums": plans[0].sums})
    sums, ids = plans[0].sums, [7 * i % 90 for i in range(20)]
    memory = [shared(-(-(sums["data"] + 64 * sums["group"]) // 8), dtype=torch.int64) for _ in programs]
    states, logits = [shared(2, 20, 256) for _ in memory], [shared(20, 128) for _ in memory]

    def work(own: Exchanging) -> None:
        plan = plans[own.rank]
        machine = RankInterpreter(programs[own.rank], plan, blobs, own.rank, memory)
        arena = machine.arena
        held = SimpleNamespace(
            activation=lambda at: (
                arena[at["rows"]].data_ptr() + machine.rows * at["bytes_per_row"] + at.get("column_bytes", 0)
            )
        )
        launches = list(plan.launches)
        before = [launch.name for launch in launches].index(plan.hidden["before"])

        def hidden(start: int, end: int) -> torch.Tensor:
            machine.counts = machine._fill([Chunk(ids[start:end], start, [1])], None)
            for launch in launches[:before]:
                machine.launch(launch)
            driver: Any = HostDriver()
            read = read_hidden(driver, held, plan.hidden, end - start)  # type: ignore[arg-type]
            return torch.from_numpy(read)

        states[own.rank][0] = hidden(0, 20)
        for start, end in ((0, 15), (15, 17), (17, 18), (18, 20)):
            states[own.rank][1, start:end] = hidden(start, end)
        logits[own.rank][:] = machine.step([Chunk(ids, 0, [1])])[0]

    together(memory, work)
    for each in states:
        assert torch.equal(each[0], states[0][0]) and torch.equal(each[1], each[0])  # on all ranks, in any steps
    want = states[0][0] @ graph.weights["head"].float().T
    assert (want - logits[0]).abs().max() < 0.02 * want.abs().max()  # as on one GPU (test_hidden.py)


@pytest.mark.parametrize(("late_norms", "divided_head"), [(False, True), (True, False)])
def test_all_ranks_have_the_states_that_the_head_reads_interpreted(late_norms: bool, divided_head: bool) -> None:
    interpreted(__name__, f"interpret({late_norms}, {divided_head})")
