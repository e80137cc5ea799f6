"""The residual stream of a decoder, found by dataflow: a chain of sums, each of the stream and of what a block adds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph

_MIXERS = ("attention", "kv_attention", "causal_conv", "linear_recurrence", "conv_step", "recurrence_step")
"""Operators by which a position reads others: a layer of a decoder has them in one block."""


@dataclass(frozen=True)
class ResidualStates:
    """The residual stream: `states[n]` is its value after n layers, of which the last is after all of them."""

    states: tuple[fx.Node, ...]

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.states) - 1


def residual_stream(graph: Graph, name: str) -> ResidualStates:
    """The residual stream of `graph`. Raises PassError for the pass `name`, with the node where there is none."""
    sources = _Sources(graph)
    last = _last(graph)
    states, node = [last], last
    while sources.mixers(node):
        stream, block = _summands(graph, node, sources, name)
        if sources.mixers(block) & ~sources.mixers(stream):
            states.append(stream)
        node = stream
    return ResidualStates(tuple(reversed(states)))


def local_blocks(graph: Graph, name: str) -> list[tuple[fx.Node, fx.Node]]:
    """The blocks behind the first layer's mixer that mix no positions, in the order in which they run: for each, the
    sum that adds its result to the residual stream, and the stream that it reads.

    Raises PassError for the pass `name`, with the node where the stream is not such a chain of sums.
    """
    sources = _Sources(graph)
    blocks, node = [], _last(graph)
    while sources.mixers(node):
        stream, block = _summands(graph, node, sources, name)
        if not sources.mixers(block) & ~sources.mixers(stream):
            blocks.append((node, stream))
        node = stream
    return blocks[::-1]


_PLAIN = ("embedding", "add", "scale")
"""What may be between tokens and the first layer where weights have rotated the stream."""


def stream_rotation(graph: Graph, stream: ResidualStates, name: str) -> fx.Node | None:
    """The signs of the rotation that `rotate` has folded into the weights that write `stream`; None if there is none.

    The values before the first layer show it. Raises PassError for the pass `name` if weights have changed the stream
    in another way.
    """
    written, signs = [stream.states[0]], set()
    for node in written:  # grows: what the values are computed from
        written += [n for n in node.all_input_nodes if not graph.is_weight(n) and n not in written]
        changes = [n for weight in filter(graph.is_weight, node.all_input_nodes) for n in _expression(weight)]
        for change in changes:
            if ops.name_of(change.target) == "center":
                raise PassError(name, node.name, "the mean was taken out of the residual stream")
            if ops.name_of(change.target) == "rotate":
                signs.add(ops.operand(change, "signs"))
    kinds = [ops.name_of(node.target) for node in written if node.op == "call_function"]
    plain = all(kind in _PLAIN for kind in kinds)
    if len(signs) > 1 or (signs and not plain):
        raise PassError(name, stream.states[0].name, "the rotation of the residual stream cannot be told from weights")
    return next(iter(signs), None)


def _expression(weight: fx.Node) -> list[fx.Node]:
    """The operators by which a weight is computed from stored ones, along their first operands."""
    operators = []
    while weight.op == "call_function":
        operators.append(weight)
        weight = weight.all_input_nodes[0]
    return operators


def _last(graph: Graph) -> fx.Node:
    """The value after the last block: where the single chain of operators that leads to the logits begins."""
    results = graph.output.args[0]
    node: fx.Node = results[0] if isinstance(results, (tuple, list)) else results  # type: ignore[assignment]
    while len(read := _read(graph, node)) == 1 and ops.name_of(node.target) != "embedding":
        node = read[0]
        if ops.name_of(node.target) == "take_rows":
            return _read(graph, node)[0]
    return node


def _read(graph: Graph, node: fx.Node) -> list[fx.Node]:
    """The values that `node` reads, without weights and inputs of the step."""
    rows = [n for n in node.all_input_nodes if not graph.is_weight(n)]
    return [n for n in rows if n.op != "placeholder"] or rows


def _summands(graph: Graph, node: fx.Node, sources: _Sources, name: str) -> tuple[fx.Node, fx.Node]:
    """Of a sum of the stream and a block's result, the two: the block reads the stream."""
    if ops.name_of(node.target) == "add":
        a, b = ops.operand(node, "a"), ops.operand(node, "b")
        for stream, block in ((a, b), (b, a)):
            both = isinstance(stream, fx.Node) and isinstance(block, fx.Node)
            if both and sources.reads(block, stream):
                return stream, block
    raise PassError(name, node.name, "the residual stream is not a chain of sums of itself and what a block adds")


class _Sources:
    """What each value of a graph depends on, as bits of numbers: one for each node."""

    def __init__(self, graph: Graph) -> None:
        self._bits: dict[fx.Node, int] = {}
        self._above: dict[fx.Node, int] = {}
        mixers = set(graph.calls(*_MIXERS))
        self._mixers = 0
        for number, node in enumerate(graph.nodes):
            above = 0
            for source in node.all_input_nodes:
                above |= self._above[source] | self._bits[source]
            self._bits[node], self._above[node] = 1 << number, above
            if node in mixers:
                self._mixers |= 1 << number

    def reads(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether `node` depends on `source`."""
        return bool(self._above[node] & self._bits[source])

    def mixers(self, node: fx.Node) -> int:
        """Bits of the mixers that `node` depends on, or is."""
        return (self._above[node] | self._bits[node]) & self._mixers
