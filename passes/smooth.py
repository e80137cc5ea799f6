"""Smooth: even out the input channels of linears by moving a diagonal scale into what produced them.

SmoothQuant (Xiao et al. 2023) divides a channel by its outliers and multiplies the weight's column; QServe 4.3.1
does it for output modules (the projections after attention and after the gate), where the strength is near 0: the
scale follows the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.channels import ScalePusher


@dataclass(frozen=True)
class Smooth(Pass):
    """Divides the inputs of output modules by 1 / max |column|, scaled to a geometric mean of 1.

    Fires on linears that read a product (the up projection takes the scale) or attention's output (the value
    projection takes it, one scale for all query heads of a KV head). Others are named in the notes.
    """

    name: ClassVar[str] = "smooth"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        fired, notes = 0, []
        for node in graph.calls("linear", "expert_linear"):
            value: Any = node.args[0]
            kind = ops.name_of(value.target)
            if kind not in ("mul", "merge_heads"):
                continue
            try:
                if ops.name_of(node.target) == "expert_linear":
                    raise PassError(self.name, node.name, "experts share no scale of their inputs")
                _smooth_product(graph, node, value) if kind == "mul" else _smooth_attended(graph, node, value)
                fired += 1
            except PassError as error:
                notes.append(str(error))
        graph.erase_dead()
        return PassResult(graph, fired, tuple(notes))


def _smooth_product(graph: Graph, node: fx.Node, value: fx.Node) -> None:
    pusher = ScalePusher(graph, "smooth")
    reason = pusher.can_push(value, node)
    if reason:
        raise PassError("smooth", node.name, reason)
    factor = graph.call_weight("smooth_factor", graph.call_weight("column_max", [node.args[1]]), 0.0)
    pusher.push(value, node, factor, True)
    _scale_columns(graph, node, factor)


def _smooth_attended(graph: Graph, node: fx.Node, merged: fx.Node) -> None:
    """Attention's output keeps the channels of its values, KV head by KV head."""
    attention: Any = merged.args[0]
    if ops.name_of(attention.target) != "attention" or len(attention.users) > 1 or len(merged.users) > 1:
        raise PassError("smooth", node.name, "its input is not one attention's output alone")
    values = attention.args[2]
    pusher = ScalePusher(graph, "smooth")
    reason = pusher.can_push(values, attention)
    if reason:
        raise PassError("smooth", node.name, reason)
    head_dim = values.meta["val"].shape[-1]
    group = attention.meta["val"].shape[-2] // values.meta["val"].shape[-2]
    largest = graph.call_weight("max_heads", graph.call_weight("column_max", [node.args[1]]), group, head_dim)
    factor = graph.call_weight("smooth_factor", largest, 0.0)
    wide = graph.call_weight("repeat_heads", factor, group, head_dim)
    pusher.push(values, attention, factor, True)
    _scale_columns(graph, node, wide)


def _scale_columns(graph: Graph, node: fx.Node, factor: fx.Node) -> None:
    node.update_arg(1, graph.call_weight("scale_axis", node.args[1], factor, 1, False))
