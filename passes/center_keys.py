"""Center keys: what all keys of a text have in common comes off them, ahead of the cache.

What is taken off all keys alike moves all scores of a query alike, which softmax does not see. A cache of few bits
gives all channels of a key one rounding step, which channels far from zero make wide whether they vary or not. Biases
put them there, and a rotary embedding leaves them there where it hardly turns.
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


@dataclass(frozen=True)
class CenterKeys(Pass):
    """Takes the mean key of calibration text, one for each KV head, off the keys behind the rotary embedding.

    The kernel that appends keys does it. Only where nothing but softmax sees scores (no cap, no sinks); other
    attentions are named in the notes, and so is that there is no text. `fired` counts attentions.
    """

    name: ClassVar[str] = "center_keys"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False

    def run(self, graph: Graph) -> PassResult:
        if graph.calibration is None:
            return PassResult(graph, 0, ("without calibration text the mean key is unknown: keys stay as they are",))
        graph = graph.clone()
        assert graph.calibration is not None
        notes, means = [], {}
        sweep = Sweep(graph, graph.calibration.excerpt())
        for node in graph.calls("attention"):
            reason = _what_sees_scores(node)
            if reason:
                notes.append(str(PassError(self.name, node.name, reason)))
                continue
            key: Any = node.args[1]
            sweep.advance(node)
            means[node] = torch.stack([value.float().mean((0, 1)) for value in sweep.values(key)]).mean(0)  # [Hk, D]
        for node, mean in means.items():
            name = f"{self.name}.{node.name}.mean"
            graph.weights.add_tensor(name, mean.flatten())
            with graph.fx.inserting_before(node):
                node.update_arg(1, graph.call("rotate_heads", node.args[1], graph.weight(name), 0))
        return PassResult(graph, len(means), tuple(notes))


def _what_sees_scores(attention: fx.Node) -> str | None:
    """Why scores of a query may not all move alike; None where nothing but softmax over keys sees them."""
    softcap, sinks = (*attention.args[5:7], None, None)[:2]
    if softcap:
        return "its scores are capped, so that they may not all move alike"
    return None if sinks is None else "its sinks are weighed against scores, so that those may not all move alike"
