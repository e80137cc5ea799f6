"""Rotate keys: turn queries and keys of each head by a Hadamard matrix where they meet.

A cache of few bits gives all channels of a key one rounding step, which its loudest channels make wide. The product of
a query and a key stays what it is when both are turned (QuaRot, Ashkboos et al. 2024, section 4.2), which spreads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult

SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class RotateKeys(Pass):
    """Turns queries and keys of every attention, head by head, by an operator behind the rotary embedding.

    It costs D log2 D additions a head and token, since no weight can take what comes after a position's rotation. Heads
    whose size is not a power of 2 are turned in blocks that are, of 16 or more; others are left and named in the notes.
    `fired` counts attentions.
    """

    name: ClassVar[str] = "rotate_keys"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        notes = []
        fired = 0
        for node in graph.calls("attention"):
            try:
                _turn(graph, node)
                fired += 1
            except PassError as error:
                notes.append(str(error))
        graph.erase_dead()
        return PassResult(graph, fired, tuple(notes))


def _turn(graph: Graph, node: fx.Node) -> None:
    args: Any = node.args
    query, key = args[:2]
    head_dim = key.meta["val"].shape[-1]
    block = head_dim & -head_dim  # the largest power of 2 in it
    if block < SMALLEST_BLOCK:
        raise PassError("rotate_keys", node.name, f"heads of {head_dim} features have no power of 2 from 16 on in them")
    mean = None
    if ops.name_of(key.target) == "rotate_heads":  # one operator takes the mean off (passes/center_keys.py) and turns
        key, mean, _ = key.args
    with graph.fx.inserting_before(node):
        turned = graph.call("rotate_heads", query, None, block), graph.call("rotate_heads", key, mean, block)
    for index, value in enumerate(turned):
        node.update_arg(index, value)
    if args[8:]:  # what keys are less is told to attention too
        graph.weights.add_tensor(f"rotate_keys.{block}", torch.ones(block))
        node.update_arg(8, graph.call_weight("rotate", args[8], graph.weight(f"rotate_keys.{block}"), 0))
