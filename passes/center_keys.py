"""Center keys: what all keys of a text have in common comes off them, ahead of the cache.

What is taken off all keys alike moves all scores of a query alike, which softmax does not see. Where something else
sees scores, attention adds to them what was taken off: one number for each query. A cache of few bits gives all
channels of a key one rounding step, which channels far from zero make wide whether they vary or not. Biases put them
there, and a rotary embedding leaves them there where it hardly turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.sweep import Sweep


@dataclass(frozen=True)
class CenterKeys(Pass):
    """Takes a mean key, one for each KV head, off the keys behind the rotary embedding.

    It is what calibration text gives ahead of the embedding, turned as at all positions the model can take and averaged
    over those: the text's own positions may be the first few, and a pair of channels that has turned half way round
    since would be moved further from zero. The kernel that appends keys does it. Where scores are capped or weighed
    against sinks, attention is told what it is that keys are less. Attentions whose keys are turned otherwise are named
    in the notes, and so is that there is no text. `fired` counts attentions.
    """

    name: ClassVar[str] = "center_keys"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False

    def run(self, graph: Graph) -> PassResult:
        if graph.calibration is None:
            return PassResult(graph, 0, ("without calibration text the mean key is unknown: keys stay as they are",))
        graph = graph.clone()
        assert graph.calibration is not None
        notes, stops = [], {}
        for node in graph.calls("attention"):
            reason = _obstacle(graph, node)
            if reason:
                notes.append(str(PassError(self.name, node.name, reason)))
            else:
                stops[node] = _args(node)[1] if ops.name_of(_args(node)[1].target) == "rope" else node
        means = _means(graph, stops)
        for node, mean in means.items():
            name = f"{self.name}.{node.name}.mean"
            graph.weights.add_tensor(name, mean.flatten())
            with graph.fx.inserting_before(node):
                node.update_arg(1, graph.call("rotate_heads", node.args[1], graph.weight(name), 0))
            given = (*node.args, *(0, 0.0, None, None)[len(node.args) - 4 :])
            if given[5] or given[6] is not None:  # a cap, or sinks
                node.args = (*given, graph.weight(name))
        return PassResult(graph, len(means), tuple(notes))


def _means(graph: Graph, stops: dict[fx.Node, fx.Node]) -> dict[fx.Node, Tensor]:
    """The mean key f32 [Hk, D] of each attention, whose keys `stops` has a rope for, or itself where they have none."""
    assert graph.calibration is not None
    sweep = Sweep(graph, graph.calibration.excerpt())
    order = {node: index for index, node in enumerate(graph.nodes)}
    means = {}
    for node, stop in sorted(stops.items(), key=lambda item: order[item[1]]):
        sweep.advance(stop)
        source = _args(stop)[1] if stop is node else _args(stop)[0]
        mean = torch.stack([value.float().mean((0, 1)) for value in sweep.values(source)]).mean(0)
        means[node] = mean if stop is node else _over_positions(graph, mean, stop)
    return {node: means[node] for node in stops}


def _over_positions(graph: Graph, mean: Tensor, rope: fx.Node) -> Tensor:
    """The mean f32 [Hk, D] of keys behind `rope` over all positions of the model, where `mean` is that before it."""
    _, _, inv_freq, scaling, interleaved = _args(rope)
    frequencies = graph.evaluate(inv_freq).double()
    angles = torch.arange(graph.info.max_position).double()[:, None] * frequencies
    cos, sin = (part.mean(0).float() * scaling for part in (angles.cos(), angles.sin()))
    pairs, rest = mean[:, : 2 * len(frequencies)], mean[:, 2 * len(frequencies) :]
    a, b = (pairs[:, 0::2], pairs[:, 1::2]) if interleaved else pairs.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat((torch.stack(turned, -1).flatten(1) if interleaved else torch.cat(turned, -1), rest), -1)


def _obstacle(graph: Graph, attention: fx.Node) -> str | None:
    """Why keys keep their mean; None where it is known how positions turn them."""
    key: Any = attention.args[1]
    known = ops.name_of(key.target) != "rope" or (key.args[1] in graph.inputs and graph.is_weight(key.args[2]))
    return None if known else "its keys are turned by something other than their positions"


def _args(node: fx.Node) -> Any:
    return node.args
