"""Final states: a model returns the hidden states that its output head reads, for all rows of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.formats.hadamard import core_matrix, core_order
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.features import returned
from qcompile.passes.rotate import LARGEST_CORE
from qcompile.passes.streams import residual_stream, stream_rotation


@dataclass(frozen=True)
class ReturnFinalState(Pass):
    """A step also returns the normalized hidden states that the output head reads, for all rows.

    A module for multi-token prediction reads those of the model, and then its own. A rotation of the residual stream is
    taken back, and a scale that is folded into the output head is applied again. Raises PassError if passes have
    changed them in another way.
    """

    name: ClassVar[str] = "return_final_state"
    requires: ClassVar[tuple[str, ...]] = ("cache",)

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        stream = residual_stream(graph, self.name)
        last, signs = stream.states[-1], stream_rotation(graph, stream, self.name)
        taken = [user for user in last.users if ops.name_of(user.target) == "take_rows"]
        norms = [user for node in taken for user in node.users if ops.name_of(user.target) in ops.NORMS]
        if len(norms) != 1:
            raise PassError(self.name, last.name, f"{len(norms)} norms read the last hidden state, not one")
        operands = ops.named(norms[0])
        if operands["weight"] is None:
            operands["weight"] = self._folded(graph, norms[0], signs)
        elif operands["weight"].op != "get_attr" or signs is not None:
            raise PassError(self.name, norms[0].name, "a pass has changed the weight: take a recipe without the pass")
        with graph.fx.inserting_after(last):
            state = last if signs is None else self._turned_back(graph, last, signs)
        with graph.fx.inserting_after(state):
            normed = graph.call(ops.name_of(norms[0].target) or "", **operands | {"x": state})
        returned(graph, normed)
        return PassResult(graph, 1)

    def _folded(self, graph: Graph, norm: fx.Node, signs: fx.Node | None) -> fx.Node | None:
        """The scale of `norm`, now a factor of the output head's weight, times `signs`; None if there is none."""
        expression = [user for user in graph.calls("gemm") if norm in _read_by(user)]
        weights = [node for user in expression for node in user.all_input_nodes if graph.is_weight(node)]
        for node in weights:  # grows: what the weights are computed from
            weights += [source for source in node.all_input_nodes if source not in weights]
        factors = {ops.operand(node, "b") for node in weights if ops.name_of(node.target) == "mul"}
        if len(factors) > 1 or (factors and len(next(iter(factors)).meta["val"].shape) != 1):
            raise PassError(self.name, norm.name, "the scale that was folded into the output head cannot be told")
        scale = next(iter(factors), None)
        if scale is None or signs is None:
            return scale
        return graph.call_weight("scale_axis", scale, signs, axis=0, inverse=False)

    def _turned_back(self, graph: Graph, state: fx.Node, signs: fx.Node) -> fx.Node:
        """`state` before its rotation, but for the signs. Raises PassError if no kernel has a matrix of that order."""
        block = signs.meta["val"].shape[0]
        order = core_order(block)
        if order > LARGEST_CORE:
            raise PassError(self.name, state.name, f"rotations of {block} features have no kernel that inverts them")
        name = f"{self.name}.core{order}"
        graph.weights.add_tensor(name, core_matrix(order).T.contiguous().flatten())
        return graph.call("hadamard", state, graph.weight(name), block)


def _read_by(node: fx.Node) -> set[fx.Node]:
    """What a product of matrices reads, through the rounding of its input."""
    read = set(node.all_input_nodes)
    for source in node.all_input_nodes:
        if ops.name_of(source.target) == "quantize_activation":
            read.update(source.all_input_nodes)
    return read
