"""Rotate: change the basis of residual streams by a randomized Hadamard matrix that is folded into weights.

The rotation spreads the outliers of a few channels over all channels, so activations and weights round with less
error. The function stays the same (QuaRot, Ashkboos et al. 2024; QServe 4.3.1 rotates block inputs this way).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.formats import hadamard
from qcompile.graph import Graph
from qcompile.passes import dataflow
from qcompile.passes.base import Pass, PassResult

SMALLEST_BLOCK = 16
"""Widths without a Hadamard matrix are rotated in blocks; smaller blocks spread outliers too little to pay off."""

LARGEST_CORE = 64
"""Limit for online rotation, which costs (core order + number of doublings of the core) operations per feature."""


@dataclass(frozen=True)
class Rotate(Pass):
    """Rotates residual streams; with `heads` also values between v and o; with `online` what weights cannot absorb.

    With x' = x Q for every value of a stream, the W of a linear that reads it becomes W Q, the W of a linear that
    writes it becomes Q^T W (its bias b becomes b Q), and an embedding table E becomes E Q. Legal when every writer is
    a linear (also of experts, with their weighted sum) or an embedding, and every reader is a linear, directly or
    behind RMS norms without scale. `online` inserts an operator that rotates products and activations before the
    linears that read them (QuaRot, section 4), and likewise the linears' inputs from a stream that cannot be rotated
    offline, for instance because norms write it. What cannot be rotated stays as it is and is listed in the notes.
    `fired` counts rotated weights.
    """

    name: ClassVar[str] = "rotate"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    residual: bool = True
    heads: bool = True
    online: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 32:
            raise UsageError(f"rotate.seed={self.seed} must be from 0 to 2^32 - 1")

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        fired, notes = 0, []

        def attempt(rotate: Callable[[Graph, Any, int], int], what: Any, number: int) -> bool:
            nonlocal fired
            try:
                fired += rotate(graph, what, number)
            except PassError as error:
                notes.append(str(error))
                return False
            return True

        inputs = graph.calls("mul", "unary", *ops.CURVES) if self.online else []
        streams = dataflow.residual_streams(graph) if self.residual else []
        for number, stream in enumerate(streams):
            if not attempt(self._rotate_stream, stream, number) and self.online:
                inputs += _given_to_linears(graph, stream)
        for number, node in enumerate(graph.calls("attention") if self.heads else []):
            attempt(self._rotate_values, node, number)
        for number, node in enumerate(inputs):
            attempt(self._rotate_online, node, number)
        graph.erase_dead()
        return PassResult(graph, fired, tuple(notes))

    def _block(self, node: fx.Node, width: int, core: int | None = None) -> int:
        block = hadamard.largest_order(width, core)
        if block < SMALLEST_BLOCK:
            raise PassError(self.name, node.name, f"no Hadamard matrix of order {width}, or of a large part, is known")
        return block

    def _signs(self, graph: Graph, what: str, block: int) -> fx.Node:
        """The random signs of one rotation, stored as a small weight. They depend on the seed and `what` only."""
        name = f"{self.name}.{what}.signs"
        number = sum(what.encode()) + 1000003 * self.seed
        signs = torch.randint(0, 2, (block,), generator=torch.Generator().manual_seed(number)) * 2.0 - 1.0
        graph.weights.add_tensor(name, signs)
        return graph.weight(name)

    def _rotate_stream(self, graph: Graph, stream: dataflow.Stream, number: int) -> int:
        obstacle = dataflow.rotation_obstacle(graph, stream)
        if obstacle is not None:
            raise PassError(self.name, obstacle[0].name, obstacle[1])
        readers = list(dataflow.carried(stream.reads))
        sources = [dataflow.weighted(graph, writer) for writer in stream.writers]
        signs = self._signs(graph, f"stream{number}", self._block(stream.values[0], stream.width))
        fired = 0
        for writer in sources:
            fired += _rotate_outputs(graph, writer, signs)
        for node in stream.values:
            for name, operand in ops.named(node).items() if node not in stream.writers else ():
                if isinstance(operand, fx.Node) and graph.is_weight(operand):
                    fired += dataflow.rewrite_weight(graph, node, name, "rotate", signs=signs, axis=0)
        for reader in dict.fromkeys(reader for reader, _ in readers):
            fired += _rotate_inputs(graph, reader, signs)
        return fired

    def _rotate_values(self, graph: Graph, attention: fx.Node, number: int) -> int:
        """Rotate each head's values. Attention mixes tokens, not features, so its output is rotated the same way."""
        value = ops.operand(attention, "v")
        source, readers = dataflow.value_linears(self.name, attention)
        signs = self._signs(graph, f"values{number}", self._block(value, value.meta["val"].shape[-1]))
        _rotate_outputs(graph, source, signs)
        for reader in readers:
            _rotate_inputs(graph, reader, signs)
        return 1 + len(readers)

    def _rotate_online(self, graph: Graph, value: fx.Node, number: int) -> int:
        """Insert an operator that rotates `value` for the linears that read it; does nothing if there are none."""
        linears = ("linear", "expert_linear")
        readers = [
            user for user in value.users if ops.name_of(user.target) in linears and ops.operand(user, "x") is value
        ]
        if not readers:
            return 0
        block = self._block(value, value.meta["val"].shape[-1], LARGEST_CORE)
        core = hadamard.core_order(block)
        graph.weights.add_tensor(f"{self.name}.core{core}", hadamard.core_matrix(core).flatten())
        graph.weights.add_tensor(f"{self.name}.ones{block}", torch.ones(block))
        matrix, ones = (graph.weight(f"{self.name}.{name}") for name in (f"core{core}", f"ones{block}"))
        with graph.fx.inserting_after(value):
            rotated = graph.call("hadamard", value, matrix, block)
        for reader in readers:
            ops.set_operands(reader, x=rotated)
            _rotate_inputs(graph, reader, ones)
        return len(readers)


def _given_to_linears(graph: Graph, stream: dataflow.Stream) -> list[fx.Node]:
    """The inputs of linears that read a stream: its values, or norms of them. Empty if no Hadamard matrix fits.

    Also empty for a stream written by weights only: once norms are folded, weights absorb its rotation at no cost.
    """
    written = {ops.name_of(dataflow.weighted(graph, writer).target) for writer in stream.writers}
    if written <= dataflow.WEIGHT_AXES.keys() or hadamard.largest_order(stream.width, LARGEST_CORE) < SMALLEST_BLOCK:
        return []
    read = [user if ops.name_of(user.target) in ("rms_norm", "layer_norm") else value for user, value in stream.reads]
    return list(dict.fromkeys(read))


def _rotate_outputs(graph: Graph, node: fx.Node, signs: fx.Node) -> bool:
    """Rotate the output features of a linear or an embedding: its weight, and its bias if there is one."""
    axis = dataflow.axes_of(node).outputs
    dataflow.rewrite_weight(graph, node, "bias", "rotate", signs=signs, axis=axis)
    return dataflow.rewrite_weight(graph, node, "weight", "rotate", signs=signs, axis=axis)


def _rotate_inputs(graph: Graph, node: fx.Node, signs: fx.Node) -> bool:
    """Rotate the input features of a linear's weight."""
    return dataflow.rewrite_weight(graph, node, "weight", "rotate", signs=signs, axis=dataflow.axes_of(node).inputs)
