"""Smooth attention: move outliers of key channels into the queries, which are not quantized to 4 bits.

QServe 4.3.2: softmax((Q L)(K L^-1)^T) equals softmax(Q K^T), and K L^-1 has a narrower range. L must be equal within
each rotary pair, because RoPE mixes the two channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.calibration.sweep import Sweep
from qcompile.passes.channels import ScalePusher
from qcompile.passes.dataflow import rewrite_weight


@dataclass(frozen=True)
class SmoothAttention(Pass):
    """Divides key channels by their magnitude^alpha and multiplies the matching query channels by it.

    Magnitudes are root mean squares over calibration text, after subtracting the mean if center_keys does. (QServe
    takes maxima, which did worse: a single token's outlier determines them.) Without text they are computed from the
    weights that produce the keys. QServe uses alpha = 1/2. The default here is 1, because the widest channel of a key
    sets its rounding step and narrower channels waste it, and because the result then does not depend on how the model
    splits a scale between q and k. With q/k norms, the scale moves into the norms' weights, so all heads share it. If
    the queries or keys of an attention cannot absorb a scale, the attention stays as it is and is listed in the notes.
    """

    name: ClassVar[str] = "smooth_attention"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"smooth_attention.alpha={self.alpha} must be from 0 to 1")

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        notes = []
        fired = 0
        measured = _measured(graph)
        for node in graph.calls("attention"):
            try:
                self._smooth(graph, node, measured.get(node))
                fired += 1
            except PassError as error:
                notes.append(str(error))
        graph.erase_dead()
        return PassResult(graph, fired, tuple(notes))

    def _smooth(self, graph: Graph, node: fx.Node, measured: fx.Node | None) -> None:
        query, key = ops.operand(node, "q"), ops.operand(node, "k")
        heads, head_dim = query.meta["val"].shape[-2:]
        kv_heads = key.meta["val"].shape[-2]
        if _rotary(query) not in ((0, False), _rotary(key)):
            raise PassError(self.name, node.name, "its queries rotate in other pairs of channels than its keys")
        shared = any(_norm_of(value) is not None for value in (query, key))
        pusher = ScalePusher(graph, self.name, paired=True)
        for value, count in ((query, heads), (key, kv_heads)):
            reason = pusher.can_push(value, node, head_dim if shared else count * head_dim)
            if reason:
                raise PassError(self.name, node.name, reason)
        size = _magnitude(graph, key) if measured is None else measured
        down = graph.call_weight("key_scale", size, head_dim, *_rotary(key), shared, self.alpha)
        up = down if shared else graph.call_weight("repeat_heads", down, heads // kv_heads, head_dim)
        pusher.push(key, node, down, True)
        pusher.push(query, node, up, False)
        # The mean that was subtracted from the keys (passes/center_keys.py) is scaled like the keys.
        rewrite_weight(graph, node, "center", "scale_axis", factor=down, axis=0, inverse=True)


def _measured(graph: Graph) -> dict[fx.Node, fx.Node]:
    """Root mean squares [Hk * D] of each attention's keys over calibration text, as weights; empty without text."""
    if graph.calibration is None:
        return {}
    sweep = Sweep(graph, graph.calibration.excerpt())
    measured = {}
    for node in graph.calls("attention"):
        key = ops.operand(node, "k")
        sweep.advance(node)
        squares = torch.stack([value.float().square().mean((0, 1)) for value in sweep.values(key)])  # [samples, Hk, D]
        name = f"smooth_attention.{node.name}.keys"
        graph.weights.add_tensor(name, squares.mean(0).sqrt().flatten())
        measured[node] = graph.weight(name)
    return measured


def _chain(value: Any) -> list[fx.Node]:
    """The value and its producers, back to the linear."""
    nodes = [value]
    while ops.name_of(nodes[-1].target) in ("rotate_heads", "rope", "split_heads", "merge_heads", "mul", *ops.NORMS):
        nodes.append(nodes[-1].args[0])  # the first operand of each: x, or a of a product
    return nodes


def _norm_of(value: fx.Node) -> fx.Node | None:
    return next((n for n in _chain(value) if ops.name_of(n.target) in ops.NORMS), None)


def _rotary(value: fx.Node) -> tuple[int, bool]:
    """(number of rotated features, interleaved) of the rope of keys or queries; (0, False) without rope."""
    rope: Any = next((n for n in _chain(value) if ops.name_of(n.target) == "rope"), None)
    return (
        (0, False)
        if rope is None
        else (2 * ops.operand(rope, "inv_freq").meta["val"].shape[0], ops.operand(rope, "interleaved"))
    )


def _magnitude(graph: Graph, key: fx.Node) -> fx.Node:
    """The magnitudes of key channels as a weight expression [Hk * D], or [D] with a norm."""
    norm = _norm_of(key)
    if norm is not None:
        weight: fx.Node = ops.operand(norm, "weight")
        return weight
    linear = ops.operands(_chain(key)[-1])
    return graph.call_weight("row_size", linear.weight, linear.bias)
