"""Runs the graphs of all ranks of a divided model together, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from qcompile.graph import Graph
from qcompile.ops.collective import RankGroup
from qcompile.passes.base import PassResult, apply
from qcompile.passes.shard import Shard


def divided(graph: Graph, ranks: int, head: bool = False) -> list[PassResult]:
    """What the pass makes of `graph` for each rank. Their operators are the same, in the same order."""
    results = [apply(Shard(ranks, rank, head), graph) for rank in range(ranks)]
    names = {tuple(str(node.target) for node in result.graph.calls()) for result in results}
    assert len({tuple(n for n in each if "take_" not in n and "scale" not in n) for each in names}) == 1
    return results


def run_together(graphs: Sequence[Graph], inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The first output of the ranks' graphs, which is the same on all of them, bit by bit."""
    result = RankGroup(len(graphs)).run([partial(graph.run, *inputs, dtype=dtype) for graph in graphs])
    logits: list[torch.Tensor] = [each if isinstance(each, torch.Tensor) else each[0] for each in result]
    assert all(torch.equal(each, logits[0]) for each in logits)
    return logits[0]
