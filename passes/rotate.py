"""Rotate: change the basis of residual streams by a randomized Hadamard matrix, folded into weights.

Outliers of a few channels spread over all, so that activations and weights round with less error; the
function computed stays the same (QuaRot, Ashkboos et al. 2024; QServe 4.3.1 rotates block inputs so).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qcompile import analysis, hadamard, ops
from qcompile.errors import PassError, UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult

SMALLEST_BLOCK = 16
"""A width without a Hadamard matrix is rotated in blocks; blocks below this spread too little to be worth it."""

LARGEST_CORE = 64
"""Online, a Hadamard matrix costs as many operations per feature as its core's order and the doublings of it."""


@dataclass(frozen=True)
class Rotate(Pass):
    """Rotates residual streams, with `heads` the values between v and o, with `online` what no weight can rotate.

    With x' = x Q for every value of a stream, a reading linear's W becomes W Q, a writing linear's W becomes
    Q^T W (its bias b Q), an embedding table E becomes E Q. Legal when every writer is a linear (experts' and
    their weighted sums too) or an embedding, and every reader a linear, behind scale-free RMS norms or none.
    `online` rotates products and activations by an operator in front of the linears that read them (QuaRot,
    section 4), and so what linears are given of a stream that cannot be rotated because norms, say, write it.
    What cannot be rotated is left as it is and named in the notes. `fired` counts weights rotated.
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

        inputs = graph.calls("mul", "unary", "xielu") if self.online else []
        streams = analysis.residual_streams(graph) if self.residual else []
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
        """The random signs of one rotation, a small weight of its own. The seed and `what` decide them."""
        name = f"{self.name}.{what}.signs"
        number = sum(what.encode()) + 1000003 * self.seed
        signs = torch.randint(0, 2, (block,), generator=torch.Generator().manual_seed(number)) * 2.0 - 1.0
        graph.weights.add_tensor(name, signs)
        return graph.weight(name)

    def _rotate_stream(self, graph: Graph, stream: analysis.Stream, number: int) -> int:
        obstacle = analysis.turning_obstacle(graph, stream)
        if obstacle is not None:
            raise PassError(self.name, obstacle[0].name, obstacle[1])
        readers = list(analysis.carried(stream.reads))
        sources = [analysis.weighted(graph, writer) for writer in stream.writers]
        signs = self._signs(graph, f"stream{number}", self._block(stream.values[0], stream.width))
        fired = 0
        for writer in sources:
            place, axis, inputs = analysis.WEIGHT_AXES[str(ops.name_of(writer.target))]
            fired += _rotate_argument(graph, writer, place, signs, axis)
            if inputs is not None:
                _rotate_argument(graph, writer, place + 1, signs, axis)
        for node in stream.values:
            for index, argument in enumerate(node.args):
                if isinstance(argument, fx.Node) and graph.is_weight(argument) and node not in stream.writers:
                    fired += _rotate_argument(graph, node, index, signs, 0)
        for reader in dict.fromkeys(reader for reader, _ in readers):
            place, _, inputs = analysis.WEIGHT_AXES[str(ops.name_of(reader.target))]
            fired += _rotate_argument(graph, reader, place, signs, int(inputs or 0))
        return fired

    def _rotate_values(self, graph: Graph, attention: fx.Node, number: int) -> int:
        """Rotate each head's values; attention mixes tokens, not features, so its output is rotated alike."""
        value: Any = attention.args[2]
        source = value.args[0] if ops.name_of(value.target) == "split_heads" else value
        if ops.name_of(source.target) != "linear" or not (analysis.read_once(source) and analysis.read_once(value)):
            raise PassError(self.name, value.name, "values do not come from a linear of their own")
        readers = [reader for merged in attention.users for reader in merged.users]
        merges = all(ops.name_of(user.target) == "merge_heads" for user in attention.users)
        if not merges or any(ops.name_of(reader.target) != "linear" for reader in readers):
            raise PassError(self.name, attention.name, "attention's output is read by something other than a linear")
        signs = self._signs(graph, f"values{number}", self._block(value, value.meta["val"].shape[-1]))
        _rotate_argument(graph, source, 1, signs, 0)
        _rotate_argument(graph, source, 2, signs, 0)
        for reader in readers:
            _rotate_argument(graph, reader, 1, signs, 1)
        return 1 + len(readers)

    def _rotate_online(self, graph: Graph, value: fx.Node, number: int) -> int:
        """An operator rotates `value` for the linears that read it; nothing to do where none does."""
        linears = ("linear", "expert_linear")
        readers = [user for user in value.users if ops.name_of(user.target) in linears and user.args[0] is value]
        if not readers:
            return 0
        block = self._block(value, value.meta["val"].shape[-1], LARGEST_CORE)
        core = hadamard.core_order(block)
        graph.weights.add_tensor(f"{self.name}.core{core}", hadamard.core_matrix(core).flatten())
        graph.weights.add_tensor(f"{self.name}.ones{block}", torch.ones(block))
        matrix, ones = (graph.weight(f"{self.name}.{name}") for name in (f"core{core}", f"ones{block}"))
        with graph.fx.inserting_after(value):
            turned = graph.call("hadamard", value, matrix, block)
        for reader in readers:
            reader.update_arg(0, turned)
            place, _, inputs = analysis.WEIGHT_AXES[str(ops.name_of(reader.target))]
            _rotate_argument(graph, reader, place, ones, int(inputs or 0))
        return len(readers)


def _given_to_linears(graph: Graph, stream: analysis.Stream) -> list[fx.Node]:
    """What linears may read of a stream: its values, and what norms make of them. None where no matrix is so wide.

    None either of a stream that weights alone write: once norms are folded weights can turn it, which costs nothing.
    """
    written = {ops.name_of(analysis.weighted(graph, writer).target) for writer in stream.writers}
    if written <= analysis.WEIGHT_AXES.keys() or hadamard.largest_order(stream.width, LARGEST_CORE) < SMALLEST_BLOCK:
        return []
    read = [user if ops.name_of(user.target) in ("rms_norm", "layer_norm") else value for user, value in stream.reads]
    return list(dict.fromkeys(read))


def _rotate_argument(graph: Graph, node: fx.Node, index: int, signs: fx.Node, axis: int) -> bool:
    """Replace weight argument `index` of `node` by its rotation along `axis`; nothing where it is absent."""
    weight = node.args[index] if len(node.args) > index else None
    if weight is None:
        return False
    node.update_arg(index, graph.call_weight("rotate", weight, signs, axis))
    return True
