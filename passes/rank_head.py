"""The output head of a divided model: each rank computes the logits of some tokens, and all ranks gather them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.divisible import ELEMENTWISE, Obstacle, shape

ALIGNMENT = 32
"""The number of logits of a rank is a multiple of this. Where the vocabulary ends before, the last ones are computed
again."""
_HEADS = ("linear", "gemm")


def find_head(graph: Graph, products: set[fx.Node]) -> fx.Node | Obstacle:
    """The product that computes the logits, possibly followed by operators on each logit alone; or what is in between.

    Each output of a product is computed apart from the others, so the parts of ranks side by side are its whole result.
    `products` are those that ranks divide already.
    """
    logits: Any = graph.output.args[0]
    node: fx.Node = logits[0] if isinstance(logits, list | tuple) else logits
    while ops.name_of(node.target) in ELEMENTWISE:
        if len(node.all_input_nodes) != 1 or len(node.users) != 1:
            return Obstacle(node, "it does not compute each logit by itself, in the same way")
        (node,) = node.all_input_nodes
    if ops.name_of(node.target) not in _HEADS or len(node.users) != 1:
        return Obstacle(node, "the logits are not the outputs of one product that nothing else reads")
    given = ops.operands(node)
    if node in products:
        return Obstacle(node, "ranks divide it already")
    if not graph.is_weight(given.weight):
        return Obstacle(node, "its weight depends on tokens")
    if ops.has_operand(node, "residual") and given.residual is not None:
        return Obstacle(node, "it adds to another value")
    return node


def divide_head(
    graph: Graph, head: fx.Node, ranks: int, rank: int, take_outputs: Callable[[fx.Node, NDArray[np.int64]], None]
) -> None:
    """Let `rank` compute its part of the outputs of `head`, and gather those of all ranks as the logits.

    `take_outputs` has a product compute some of its outputs only.
    """
    width = shape(head)[-1]
    part = -(-width // (ranks * ALIGNMENT)) * ALIGNMENT
    own = np.minimum(np.arange(rank * part, (rank + 1) * part), width - 1)
    take_outputs(head, own)
    output, logits = graph.output, graph.output.args[0]
    last: Any = logits[0] if isinstance(logits, list | tuple) else logits
    with graph.fx.inserting_after(last):
        whole = graph.call("all_gather", last, ranks, width)
    output.replace_input_with(last, whole)
