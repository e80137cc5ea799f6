"""Rotate keys: multiply the queries and keys of each head by a Hadamard matrix, directly before attention.

A low-bit cache has one rounding step for all channels of a key, and the largest channels determine it. Rotation spreads
them. Rotating query and key alike keeps their dot product (QuaRot, Ashkboos et al. 2024, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.dataflow import rewrite_weight, value_features

SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class RotateKeys(Pass):
    """Rotates queries and keys of every attention, head by head, by an operator after the rotary embedding.

    No weight can absorb a rotation that follows RoPE, so it costs D log2 D additions per head and token. If the size of
    heads is no power of 2, they are rotated in blocks of the largest power of 2 that divides it. If that is below 16,
    the attention stays as it is and is listed in the notes. `fired` counts attentions.
    """

    name: ClassVar[str] = "rotate_keys"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        notes = []
        fired = 0
        made: dict[fx.Node, fx.Node] = {}
        for node in graph.calls("attention"):
            try:
                _rotate(graph, node, made)
                fired += 1
            except PassError as error:
                notes.append(str(error))
        graph.erase_dead()
        return PassResult(graph, fired, tuple(notes))


def _rotate(graph: Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
    """Rotate the queries and keys of an attention. `made` are the rotated keys by keys, which attentions may share."""
    query, shared = ops.operand(node, "q"), ops.operand(node, "k")
    key = shared
    if value_features(node) is not None:
        raise PassError(
            "rotate_keys", node.name, "features of its keys are also its values, which must stay as they are"
        )
    head_dim = key.meta["val"].shape[-1]
    block = head_dim & -head_dim  # the largest power of 2 that divides it
    if block < SMALLEST_BLOCK:
        raise PassError("rotate_keys", node.name, f"no power of 2 from 16 on divides heads of {head_dim} features")
    mean = None
    if ops.name_of(key.target) == "rotate_heads":  # passes/center_keys.py: one operator subtracts the mean and rotates
        key, mean = ops.operand(key, "x"), ops.operand(key, "center")
    with graph.fx.inserting_before(node):
        rotated_query = graph.call("rotate_heads", query, center=None, block=block)
        if shared not in made:
            made[shared] = graph.call("rotate_heads", key, center=mean, block=block)
    ops.set_operands(node, q=rotated_query, k=made[shared])
    if ops.operand(node, "center") is not None:  # attention adds back what was subtracted from the keys
        graph.weights.add_tensor(f"rotate_keys.{block}", torch.ones(block))
        rewrite_weight(graph, node, "center", "rotate", signs=graph.weight(f"rotate_keys.{block}"), axis=0)
