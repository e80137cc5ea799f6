"""Shard: the graph of one of several ranks, each of which computes a part of the model (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.divisible import Obstacle
from qcompile.passes.rank_head import divide_head, find_head
from qcompile.passes.rank_sums import add_sums
from qcompile.passes.rank_weights import RankRewriter
from qcompile.passes.regions import regions


@dataclass(frozen=True)
class Shard(Pass):
    """The graph of rank `rank` of `ranks`: products are divided by outputs, and those after them by inputs.

    Attention is divided by heads, with its keys and values and so with its cache. Where there are fewer heads of keys
    than ranks, several ranks have the same one. Experts are divided by features. The partial sums that ranks compute
    meet in `all_reduce`, as late as operators are linear in them. All ranks have the same operators in the same order.

    Weights are divided after they are quantized, by whole groups, so that their codes and scales are those of the
    undivided model. An activation with one scale per row gets one for each rank's part of it. With `head`, each rank
    computes the logits of a part of the vocabulary, which all gather. Every rank computes what cannot be divided, with
    a note. `fired` counts the products that are divided.
    """

    name: ClassVar[str] = "shard"
    requires: ClassVar[tuple[str, ...]] = ("raise", "quantize")
    ranks: int = 1
    rank: int = 0
    head: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise UsageError(f"shard.rank={self.rank}: there are ranks 0 to {self.ranks - 1}")

    @property
    def wanted(self) -> bool:
        """Whether there is more than one rank."""
        return self.ranks > 1

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        divisions = regions(graph, self.ranks, self.name)
        rewriter = RankRewriter(graph, self.ranks, self.rank)
        for region in divisions.divided:
            rewriter.divide(region)
        rewriter.finish()
        divided = {node for region in divisions.divided for node in (*region.producers, *region.consumers)}
        whole = dict(divisions.whole)
        if self.head:
            head = find_head(graph, divided)
            if isinstance(head, Obstacle):
                whole.setdefault(head.node, []).append(head)
            else:
                divide_head(graph, head, self.ranks, self.rank, rewriter.take_outputs)
                divided.add(head)
                whole.pop(head, None)
        add_sums(graph, [node for region in divisions.divided for node in region.consumers], self.ranks)
        graph.infer([node.meta["val"] for node in graph.inputs])
        graph.erase_dead()
        notes = [
            f"node {node.name}: every rank computes all of it: "
            + "; ".join(f"node {obstacle.node.name}: {obstacle.reason}" for obstacle in obstacles)
            for node, obstacles in whole.items()
        ]
        return PassResult(graph, len(divided), tuple(notes))
