"""Smooth: equalize the input channels of linears by moving a diagonal scale into the operators before them.

SmoothQuant (Xiao et al. 2023) divides the channels of a block's input by a measure of their outliers and multiplies
the columns of the weights that read it. QServe 4.3.1 does this for output modules (the projections after attention and
after the gate) with a strength near 0, so that the scale follows the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.graph import Graph
from qcompile.passes import dataflow
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.calibration.sweep import Sweep
from qcompile.passes.channels import ScalePusher, not_linears_alone


@dataclass(frozen=True)
class Smooth(Pass):
    """Divides the inputs of linears by a scale with geometric mean 1: block inputs, and inputs of output modules.

    A block's input is a norm's output, and the norm's weight absorbs the scale max |x|^alpha / max |column|^(1 -
    alpha). The maxima of x are measured on calibration text; without it the norm's weight serves as an estimate. An
    output module reads a product (the up projection absorbs the scale) or attention's output (the value projection
    absorbs it, with one scale for all query heads of a KV head); its scale is 1 / max |column|. The notes list inputs
    with producers that cannot absorb a scale.
    """

    name: ClassVar[str] = "smooth"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    inputs: bool = True
    """Smooth the inputs of blocks."""
    alpha: float = 0.5
    """Share of a block's input outliers that moves into the weights: 0 none, 1 all."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"smooth.alpha={self.alpha} must be from 0 to 1")

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        fired, notes = 0, []
        norms = [n for n in graph.calls("rms_norm", "layer_norm") if self.inputs and _readers(n)]
        measured = _measured(graph, norms)
        for node in norms:
            try:
                _smooth_input(graph, node, measured.get(node), self.alpha)
                fired += 1
            except PassError as error:
                notes.append(str(error))
        for node in graph.calls("linear", "expert_linear"):
            value: Any = ops.operand(node, "x")
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


def _readers(norm: fx.Node) -> list[fx.Node]:
    """The linears that read the output of `norm`."""
    return [
        n for n in norm.users if ops.name_of(n.target) in ("linear", "expert_linear") and ops.operand(n, "x") is norm
    ]


def _measured(graph: Graph, norms: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Largest |x| [K] of each norm's output over calibration text, as weights; empty without text."""
    if graph.calibration is None:
        return {}
    sweep = Sweep(graph, graph.calibration.excerpt())
    order = {node: index for index, node in enumerate(graph.nodes)}
    measured = {}
    first = {norm: min(norm.users, key=order.__getitem__) for norm in norms}
    for norm in sorted(norms, key=lambda norm: order[first[norm]]):
        sweep.advance(first[norm])
        largest = torch.stack([value.float().abs().flatten(0, -2).amax(0) for value in sweep.values(norm)])
        name = f"smooth.{norm.name}.inputs"
        graph.weights.add_tensor(name, largest.amax(0))
        measured[norm] = graph.weight(name)
    return measured


def _smooth_input(graph: Graph, norm: fx.Node, measured: fx.Node | None, alpha: float) -> None:
    weight = ops.operand(norm, "weight")
    reason = not_linears_alone(graph, norm)
    if reason is None and weight is None:
        reason = "this norm has no weight that could take a scale"
    if reason:
        raise PassError("smooth", norm.name, reason)
    readers = _readers(norm)
    columns = graph.call_weight("column_max", [ops.operand(node, "weight") for node in readers])
    factor = graph.call_weight("smooth_factor", columns, alpha, weight if measured is None else measured)
    for name in ("weight", "bias"):
        dataflow.rewrite_weight(graph, norm, name, "scale_axis", factor=factor, axis=0, inverse=True)
    for node in readers:
        _scale_columns(graph, node, factor)


def _smooth_product(graph: Graph, node: fx.Node, value: fx.Node) -> None:
    pusher = ScalePusher(graph, "smooth")
    reason = pusher.can_push(value, node, value.meta["val"].shape[-1])
    if reason:
        raise PassError("smooth", node.name, reason)
    factor = graph.call_weight("smooth_factor", graph.call_weight("column_max", [ops.operand(node, "weight")]), 0.0)
    pusher.push(value, node, factor, True)
    _scale_columns(graph, node, factor)


def _smooth_attended(graph: Graph, node: fx.Node, merged: fx.Node) -> None:
    """Attention keeps the channels of its values, so one scale per KV head moves into the value projection."""
    attention: Any = ops.operand(merged, "x")
    if ops.name_of(attention.target) != "attention" or len(attention.users) > 1 or len(merged.users) > 1:
        raise PassError("smooth", node.name, "its input is not one attention's output alone")
    values = ops.operand(attention, "v")
    pusher = ScalePusher(graph, "smooth")
    kv_heads, head_dim = values.meta["val"].shape[-2:]
    reason = pusher.can_push(values, attention, kv_heads * head_dim)
    if reason:
        raise PassError("smooth", node.name, reason)
    group = attention.meta["val"].shape[-2] // kv_heads
    columns = graph.call_weight("column_max", [ops.operand(node, "weight")])
    largest = graph.call_weight("max_heads", columns, group, head_dim)
    factor = graph.call_weight("smooth_factor", largest, 0.0)
    wide = graph.call_weight("repeat_heads", factor, group, head_dim)
    pusher.push(values, attention, factor, True)
    _scale_columns(graph, node, wide)


def _scale_columns(graph: Graph, node: fx.Node, factor: fx.Node) -> None:
    """Multiply the input features of a linear's weight, its last axis, by `factor`."""
    axis = dataflow.axes_of(node).inputs
    dataflow.rewrite_weight(graph, node, "weight", "scale_axis", factor=factor, axis=axis, inverse=False)
