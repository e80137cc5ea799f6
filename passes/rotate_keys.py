"""Rotate keys: turn queries and keys of each head by a Hadamard matrix where they meet, keys less their mean.

A cache of few bits gives all channels of a key one rounding step, which its loudest channels make wide. The product of
a query and a key stays what it is when both are turned (QuaRot, Ashkboos et al. 2024, section 4.2), which spreads them.
And what is taken off all keys alike moves all scores of a query alike, which softmax does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.sweep import Sweep

SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class RotateKeys(Pass):
    """Turns queries and keys of every attention, head by head, by an operator behind the rotary embedding.

    It costs D log2 D additions a head and token, since no weight can take what comes after a position's rotation. Heads
    whose size is not a power of 2 are turned in blocks that are, of 16 or more; others are left and named in the notes.
    With `center`, calibration text and nothing that sees scores but softmax (no cap, no sinks), the mean key of the
    text is taken off first. `fired` counts attentions.
    """

    name: ClassVar[str] = "rotate_keys"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    center: bool = True

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        notes = []
        means = self._means(graph)
        fired = 0
        for node in graph.calls("attention"):
            try:
                _turn(graph, node, means.get(node))
                fired += 1
            except PassError as error:
                notes.append(str(error))
        return PassResult(graph, fired, tuple(notes))

    def _means(self, graph: Graph) -> dict[fx.Node, fx.Node]:
        """The mean key [Hk * D] of each attention that may be centered, as a weight."""
        if graph.calibration is None or not self.center:
            return {}
        sweep = Sweep(graph, graph.calibration.excerpt())
        found = {}
        for node in graph.calls("attention"):
            if not _shift_is_free(node):
                continue
            key: Any = node.args[1]
            sweep.advance(node)
            mean = torch.stack([value.float().mean((0, 1)) for value in sweep.values(key)]).mean(0)  # [Hk, D]
            name = f"{self.name}.{node.name}.mean"
            graph.weights.add_tensor(name, mean.flatten())
            found[node] = graph.weight(name)
        return found


def _shift_is_free(node: fx.Node) -> bool:
    """Whether scores of a query may all move alike: nothing but softmax over keys sees them."""
    softcap = node.args[5] if len(node.args) > 5 else 0.0
    sinks = node.args[6] if len(node.args) > 6 else None
    return not softcap and sinks is None


def _turn(graph: Graph, node: fx.Node, mean: fx.Node | None) -> None:
    args: Any = node.args
    query, key = args[:2]
    head_dim = key.meta["val"].shape[-1]
    block = head_dim & -head_dim  # the largest power of 2 in it
    if block < SMALLEST_BLOCK:
        raise PassError("rotate_keys", node.name, f"heads of {head_dim} features have no power of 2 from 16 on in them")
    with graph.fx.inserting_before(node):
        turned = graph.call("rotate_heads", query, None, block), graph.call("rotate_heads", key, mean, block)
    for index, value in enumerate(turned):
        node.update_arg(index, value)
