"""Rotate: change the basis of residual streams by a randomized Hadamard matrix, folded into weights.

Outliers of a few channels spread over all, so that activations and weights round with less error; the
function computed stays the same (QuaRot, Ashkboos et al. 2024; QServe 4.3.1 rotates block inputs so).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qcompile import analysis, hadamard, ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult


@dataclass(frozen=True)
class Rotate(Pass):
    """Rotates every residual stream, and with `heads` the values between each layer's v and o projections.

    With x' = x Q for every value of a stream, a reading linear's W becomes W Q, a writing linear's W becomes
    Q^T W (its bias b Q), an embedding table E becomes E Q. Legal when every writer is a linear or an
    embedding, and every reader a linear, behind scale-free RMS norms or none. A stream that is not so is refused
    with the node. `fired` counts weights rotated.
    """

    name: ClassVar[str] = "rotate"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    residual: bool = True
    heads: bool = True
    seed: int = 0

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        fired = 0
        if self.residual:
            for number, stream in enumerate(analysis.residual_streams(graph)):
                fired += _rotate_stream(graph, stream, self._signs(graph, f"stream{number}", stream.width))
        if self.heads:
            for number, node in enumerate(graph.calls("attention")):
                fired += self._rotate_values(graph, node, number)
        graph.erase_dead()
        return PassResult(graph, fired)

    def _signs(self, graph: Graph, what: str, width: int) -> fx.Node:
        """The random signs of one rotation, a small weight of its own. The seed and `what` decide them."""
        if hadamard.hadamard_matrix(width) is None:
            raise PassError(self.name, what, f"no Hadamard matrix of order {width} is known")
        name = f"{self.name}.{what}.signs"
        number = sum(what.encode()) + 1000003 * self.seed
        signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(number)) * 2.0 - 1.0
        graph.weights.add_tensor(name, signs)
        return graph.weight(name)

    def _rotate_values(self, graph: Graph, attention: fx.Node, number: int) -> int:
        """Rotate each head's values; attention mixes tokens, not features, so its output is rotated alike."""
        value: Any = attention.args[2]
        source = value.args[0] if ops.name_of(value.target) == "split_heads" else value
        if ops.name_of(source.target) != "linear" or len(source.users) > 1 or len(value.users) > 1:
            raise PassError(self.name, value.name, "values do not come from a linear of their own")
        readers = [reader for merged in attention.users for reader in merged.users]
        merges = all(ops.name_of(user.target) == "merge_heads" for user in attention.users)
        if not merges or any(ops.name_of(reader.target) != "linear" for reader in readers):
            raise PassError(self.name, attention.name, "attention's output is read by something other than a linear")
        signs = self._signs(graph, f"values{number}", value.meta["val"].shape[-1])
        _rotate_argument(graph, source, 1, signs, 0)
        _rotate_argument(graph, source, 2, signs, 0)
        for reader in readers:
            _rotate_argument(graph, reader, 1, signs, 1)
        return 1 + len(readers)


def _rotate_stream(graph: Graph, stream: analysis.Stream, signs: fx.Node) -> int:
    readers = list(analysis.carried(stream.reads))
    for reader, _ in readers:
        if ops.name_of(reader.target) != "linear":
            reason = (
                f"the residual stream is read by {ops.name_of(reader.target) or reader.op}, which no rotation passes"
            )
            raise PassError("rotate", reader.name, reason)
    for writer in stream.writers:
        if ops.name_of(writer.target) not in ("linear", "embedding"):
            reason = (
                f"the residual stream is written by {ops.name_of(writer.target)}, neither a linear nor an embedding"
            )
            raise PassError("rotate", writer.name, reason)
    fired = 0
    for writer in stream.writers:
        axis = 0 if ops.name_of(writer.target) == "linear" else 1
        fired += _rotate_argument(graph, writer, 1, signs, axis)
        if axis == 0:
            _rotate_argument(graph, writer, 2, signs, 0)
    for node in stream.values:
        for index, argument in enumerate(node.args):
            if isinstance(argument, fx.Node) and graph.is_weight(argument) and node not in stream.writers:
                fired += _rotate_argument(graph, node, index, signs, 0)
    for reader in dict.fromkeys(reader for reader, _ in readers):
        fired += _rotate_argument(graph, reader, 1, signs, 1)
    return fired


def _rotate_argument(graph: Graph, node: fx.Node, index: int, signs: fx.Node, axis: int) -> bool:
    """Replace weight argument `index` of `node` by its rotation along `axis`; nothing where it is absent."""
    weight = node.args[index] if len(node.args) > index else None
    if weight is None:
        return False
    node.update_arg(index, graph.call_weight("rotate", weight, signs, axis))
    return True
