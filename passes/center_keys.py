"""Center keys: subtract from all keys what they have in common, before they are cached.

Subtracting one vector from all keys shifts all scores of a query by the same amount, which softmax ignores. Where
scores are also used otherwise (soft capping, sinks), attention adds that amount back: one number per query. A low-bit
cache has one rounding step for all channels of a key, and channels far from zero widen it even if they hardly vary.
Biases cause such offsets, and RoPE preserves them in channel pairs with low frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.calibration.sweep import Sweep
from qcompile.passes.dataflow import value_features


@dataclass(frozen=True)
class CenterKeys(Pass):
    """Subtracts a mean key, one per KV head, from the keys after the rotary embedding.

    The mean is measured on calibration text before RoPE, then rotated to and averaged over all positions the model
    supports: calibration text may cover the first positions only, and a pair of channels that has rotated by half a
    circle since would be moved away from zero. The kernel that appends keys subtracts it. Where scores are capped or
    compared with sinks, attention gets the mean as an argument. The notes list attentions with keys that are rotated in
    another way, and missing calibration text. `fired` counts attentions.
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
                key = ops.operand(node, "k")
                stops[node] = key if ops.name_of(key.target) == "rope" else node
        means = _means(graph, stops)
        made: dict[fx.Node, fx.Node] = {}  # centered keys by keys, which attentions may share
        for node, mean in means.items():
            key = ops.operand(node, "k")
            if key not in made:
                name = f"{self.name}.{node.name}.mean"
                graph.weights.add_tensor(name, mean.flatten())
                with graph.fx.inserting_before(node):
                    made[key] = graph.call("rotate_heads", key, center=graph.weight(name), block=0)
            ops.set_operands(node, k=made[key])
            if ops.operand(node, "softcap") or ops.operand(node, "sinks") is not None:
                ops.set_operands(node, center=ops.operand(made[key], "center"))
        return PassResult(graph, len(means), tuple(notes))


def _means(graph: Graph, stops: dict[fx.Node, fx.Node]) -> dict[fx.Node, Tensor]:
    """The mean key f32 [Hk, D] of each attention; `stops` maps it to its keys' rope, or to itself without rope."""
    assert graph.calibration is not None
    sweep = Sweep(graph, graph.calibration.excerpt())
    order = {node: index for index, node in enumerate(graph.nodes)}
    means = {}
    for node, stop in sorted(stops.items(), key=lambda item: order[item[1]]):
        sweep.advance(stop)
        source = ops.operand(stop, "k" if stop is node else "x")
        mean = torch.stack([value.float().mean((0, 1)) for value in sweep.values(source)]).mean(0)
        means[node] = mean if stop is node else _over_positions(graph, mean, stop)
    return {node: means[node] for node in stops}


def _over_positions(graph: Graph, mean: Tensor, rope: fx.Node) -> Tensor:
    """The mean f32 [Hk, D] of keys after `rope` over all positions of the model, given `mean`, their mean before it."""
    given = ops.operands(rope)
    frequencies = graph.evaluate(given.inv_freq).double()
    angles = torch.arange(graph.info.max_position).double()[:, None] * frequencies
    cos, sin = (part.mean(0).float() * given.scaling for part in (angles.cos(), angles.sin()))
    pairs, rest = mean[:, : 2 * len(frequencies)], mean[:, 2 * len(frequencies) :]
    a, b = (pairs[:, 0::2], pairs[:, 1::2]) if given.interleaved else pairs.chunk(2, -1)
    rotated = a * cos - b * sin, b * cos + a * sin
    return torch.cat((torch.stack(rotated, -1).flatten(1) if given.interleaved else torch.cat(rotated, -1), rest), -1)


def _obstacle(graph: Graph, attention: fx.Node) -> str | None:
    """Why the keys of `attention` are not centered; None if they are only keys, and rotate with known positions."""
    if value_features(attention) is not None:
        return "features of its keys are also its values, which must stay as they are"
    key = ops.operand(attention, "k")
    if ops.name_of(key.target) != "rope":
        return None
    known = ops.operand(key, "positions") in graph.inputs and graph.is_weight(ops.operand(key, "inv_freq"))
    return None if known else "its keys are rotated by something other than their positions"
