"""Reorder: permute input channels by salience, so that channels of similar size share a group of 128 and its scale.

The permutation is folded into the operators that write the channels, so it costs nothing at run time. Atom (Zhao et
al. 2024, section 4.1) moves outlier channels to the end this way; RPTQ (Yuan et al. 2023) clusters all channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes import dataflow
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.calibration.sweep import Sweep

GROUP = 128
"""Number of inputs that share a scale in the grouped formats (formats/registry.py)."""


@dataclass(frozen=True)
class Reorder(Pass):
    """Permutes channels so that the columns of the linears that read them have descending norms.

    A channel space is a set of values that adds, products, activations and norms tie together: the residual stream, or
    the inside of an MLP. The rewrite is legal when only linears and embeddings write the space and only linears read
    it. With `heads`, the channels of each value head are permuted too, unless a head lies within one group anyway. What
    keeps its order is listed in the notes. `fired` counts spaces and attentions.

    With `outliers`, channels are sorted by their largest values on calibration text instead, ascending: activations in
    int4_g128_outlier128 keep 8 bits for the last group of 128 (Atom 4.1). Value heads then keep their order. Without
    calibration text everything does, and a note says so.
    """

    name: ClassVar[str] = "reorder"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    heads: bool = True
    outliers: bool = False

    def run(self, graph: Graph) -> PassResult:
        if self.outliers and graph.calibration is None:
            return PassResult(graph, 0, ("without calibration text no channels stand out: all keep their order",))
        graph = graph.clone()
        fired, notes = 0, []
        largest = _largest(graph) if self.outliers else {}
        for space in dataflow.channel_spaces(graph):
            if space.obstacle is not None:
                node, reason = space.obstacle
                notes.append(str(PassError(self.name, node.name, reason)))
            else:
                _reorder_space(graph, space, _order(graph, space, largest))
                fired += 1
        for node in graph.calls("attention") if self.heads and not self.outliers else []:
            try:
                fired += self._reorder_values(graph, node)
            except PassError as error:
                notes.append(str(error))
        graph.erase_dead()
        return PassResult(graph, fired, tuple(notes))

    def _reorder_values(self, graph: Graph, attention: fx.Node) -> int:
        """Attention keeps the channels of its values, so one order per KV head serves all query heads that share it."""
        value = ops.operand(attention, "v")
        head_dim = value.meta["val"].shape[-1]
        if GROUP % head_dim == 0:
            return 0
        source, readers = dataflow.value_linears(self.name, attention)
        group = attention.meta["val"].shape[-2] // value.meta["val"].shape[-2]
        weights = [ops.operand(reader, "weight") for reader in readers]
        rows, columns = (graph.call_weight("head_order", weights, group, head_dim, wide) for wide in (False, True))
        _reorder_outputs(graph, source, rows)
        for reader in readers:
            _reorder_inputs(graph, reader, columns)
        return 1


def _largest(graph: Graph) -> dict[str, Tensor]:
    """Largest |x| f32 [K] over calibration text of the input of each linear, by the linear's name."""
    assert graph.calibration is not None
    sweep = Sweep(graph, graph.calibration.excerpt())
    largest: dict[str, Tensor] = {}
    for node in graph.calls("linear"):
        sweep.advance(node)
        source = ops.operand(node, "x")
        largest[node.name] = torch.stack([x.float().abs().flatten(0, -2).amax(0) for x in sweep.values(source)]).amax(0)
    return largest


def _order(graph: Graph, space: dataflow.ChannelSpace, largest: dict[str, Tensor]) -> fx.Node:
    """The new order of a space's channels as a weight; every reader has the same influence on it."""
    if not largest:
        return graph.call_weight("column_order", [ops.operand(reader, "weight") for reader in space.readers])
    sizes = torch.stack([largest[reader.name] / largest[reader.name].mean() for reader in space.readers])
    name = f"reorder.{space.readers[0].name}.order"
    graph.weights.add_tensor(name, torch.argsort(sizes.mean(0), stable=True))
    return graph.weight(name)


def _reorder_space(graph: Graph, space: dataflow.ChannelSpace, order: fx.Node) -> None:
    for writer in space.writers:
        _reorder_outputs(graph, writer, order)
    for node, name in space.vectors:
        dataflow.rewrite_weight(graph, node, name, "take_axis", order, axis=-1)
    for reader in space.readers:
        _reorder_inputs(graph, reader, order)


def _reorder_outputs(graph: Graph, node: fx.Node, order: fx.Node) -> None:
    """Permute the output features of a linear or an embedding: its weight, and its bias if there is one."""
    dataflow.rewrite_weight(graph, node, "weight", "take_axis", order, axis=dataflow.axes_of(node).outputs)
    dataflow.rewrite_weight(graph, node, "bias", "take_axis", order, axis=0)


def _reorder_inputs(graph: Graph, node: fx.Node, order: fx.Node) -> None:
    """Permute the input features of a linear's weight."""
    dataflow.rewrite_weight(graph, node, "weight", "take_axis", order, axis=dataflow.axes_of(node).inputs)
