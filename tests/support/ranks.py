"""A small divided model, as an artifact for two processes, and graphs of all ranks, which one process runs together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from qcompile import pipeline
from qcompile.artifact.amend import amend
from qcompile.artifact.reader import read_manifest
from qcompile.graph import Graph
from qcompile.ops.collective import RankGroup
from qcompile.passes.base import PassResult, apply
from qcompile.passes.shard import Shard
from tests.support.fake import byte_tokenizer, listed
from tests.support.graphs import decoder

TWO = {"shard.ranks": "2"}
"""The options of passes that divide a model over two processes."""


def small() -> Graph:
    """A decoder for the tokens of `byte_tokenizer`, of which all but the norms can be divided over two processes."""
    return decoder(vocab=257, hidden=64, heads=4, head_dim=64, ffn=512, bias=True)


def save_for_two(path: Path) -> None:
    """Write the small decoder as an artifact for two processes, with a tokenizer.

    Weights of 4 bits in groups and activations of 16 bits are rounded alike however a row is divided.
    """
    pipeline.build(small(), path, recipe="w4a16", options=TWO)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    amend(path, files=read_manifest(path)["files"] | {"tokenizer.json": listed(path)["tokenizer.json"]})


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
