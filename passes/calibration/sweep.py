"""Run a graph over many samples and stop at given nodes, so that calibration can read intermediate values.

Every operator runs once per sample. Between stops, liveness analysis keeps only the values that are read later: in a
decoder, the residual stream and the input of the linear at which the sweep stopped, in its form there (int8 codes for
quantized activations). Weights are loaded between two stops and then dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.formats.activations import dequantize_activation
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.ops.epilogues import gemm_float
from qcompile.passes.calibration import memory

Values = dict[fx.Node, Any]
_LINEARS = ("linear", "gated_linear", "gemm", "expert_linear", "gated_experts", "expert_gemm")


class Shelf:
    """One value of every sample, a tensor or a list of tensors, each in one contiguous allocation.

    Separate allocations would fragment the heap: long-lived values between short-lived ones leave holes, and it would
    grow to several times what is in use. Tensors of `spare` [samples, ...] that fit are removed from it and reused.
    """

    def __init__(self, like: Any, samples: int, spare: list[Tensor]) -> None:
        self._single = isinstance(like, Tensor)
        self.parts = [_allocation(part, samples, spare) for part in ([like] if self._single else like)]

    def put(self, sample: int, value: Any) -> None:
        """Store a sample's value, overwriting its old one."""
        for room, part in zip(self.parts, [value] if self._single else value, strict=True):
            room[sample].copy_(part)

    def get(self, sample: int) -> Any:
        """A sample's value, as a view."""
        tensors = [room[sample] for room in self.parts]
        return tensors[0] if self._single else tensors


def _allocation(part: Tensor, samples: int, spare: list[Tensor]) -> Tensor:
    """Memory [samples, ...] for values with the shape and dtype of `part`."""
    shape = (samples, *part.shape)
    for index, room in enumerate(spare):
        if room.shape == shape and room.dtype == part.dtype:
            return spare.pop(index)
    return torch.empty(shape, dtype=part.dtype)


class Sweep:
    """The state of a run of `graph` over `tokens` int64 [samples, length], each sample a batch of one.

    `graph` takes whole sequences (it is before the `cache` stage), and its operators return new tensors, never views of
    their inputs. Weights of nodes the sweep has not reached may be replaced. `work(amount)` is called with the number
    of weights of each linear that has run. finest: weights in two planes have both, otherwise only the upper one.
    """

    def __init__(
        self, graph: Graph, tokens: Tensor, work: Callable[[int], None] | None = None, finest: bool = False
    ) -> None:
        self.graph, self._work, self._finest = graph, work or (lambda amount: None), finest
        self._take([node for node in graph.nodes if not graph.is_weight(node) and node.op == "call_function"])
        self._tokens = tokens
        self._positions = torch.arange(tokens.shape[1])[None]
        self._shelves: dict[fx.Node, Shelf] = {}
        self._borrowed: set[fx.Node] = set()
        self._weights: Values = {}

    def _take(self, nodes: list[fx.Node]) -> None:
        """Have `nodes` as those that are left to run."""
        self._nodes, self._next = nodes, 0
        self._last = {source: index for index, node in enumerate(nodes) for source in node.all_input_nodes}
        self._last |= dict.fromkeys(self.graph.output.all_input_nodes, len(nodes))

    def fork(self, graph: Graph) -> Sweep:
        """A sweep that goes on from here in `graph`: a clone of this one's, changed in what has not run yet.

        Nodes that have run must have the same names there; so must those that made what the others read.
        """
        other = Sweep(graph, self._tokens, finest=self._finest)
        done = {node.name for node in self._nodes[: self._next]}
        other._take([node for node in other._nodes if node.name not in done])
        named = {node.name: node for node in graph.nodes}
        other._shelves = {named[node.name]: shelf for node, shelf in self._shelves.items() if node.name in named}
        other._borrowed = set(other._shelves)
        return other

    def advance(self, stop: fx.Node) -> None:
        """Run every sample up to `stop`, excluding it."""
        end = self._nodes.index(stop, self._next)
        born: dict[fx.Node, Shelf] = {}
        dead: list[fx.Node] = []
        for sample in range(len(self._tokens)):
            values = self._run(sample, end)
            if sample == 0:
                dead = [node for node in self._shelves if node not in values]
                spare = [part for node in dead if node not in self._borrowed for part in self._shelves[node].parts]
                computed = [node for node in values if node not in self._shelves and node.op == "call_function"]
                born = {node: Shelf(values[node], len(self._tokens), spare) for node in computed}
            for node, shelf in born.items():
                shelf.put(sample, values[node])
        for node in dead:
            del self._shelves[node]
        self._shelves |= born
        self._weights.clear()
        memory.give_back()
        self._next = end

    def finish(self) -> Iterator[Any]:
        """As `outputs`, with the weights of one linear in memory at a time."""
        for node in self._nodes[self._next :]:
            if ops.name_of(node.target) in _LINEARS:
                self.advance(node)
        yield from self.outputs()

    def outputs(self) -> Iterator[Any]:
        """Run every sample to the end and yield the graph's result, sample by sample."""
        for sample in range(len(self._tokens)):
            yield self.output(sample)

    def output(self, sample: int) -> Any:
        """Run one sample to the end and return the graph's result."""
        result: Any = self.graph.output.args[0]
        return self._run(sample, len(self._nodes))[result]

    def values(self, node: fx.Node) -> list[Any]:
        """The value of `node` for each sample; a node that has not run yet must read it."""
        return [self._shelves[node].get(sample) for sample in range(len(self._tokens))]

    def _run(self, sample: int, end: int) -> Values:
        """Run a sample's nodes from the current position to `end`; returns its values that are still read later."""
        values: Values = dict(zip(self.graph.inputs, (self._tokens[sample][None], self._positions), strict=False))
        values |= {node: shelf.get(sample) for node, shelf in self._shelves.items()}
        with torch.no_grad():
            for index in range(self._next, end):
                self._step(values, index)
        return values

    def _step(self, sample: Values, index: int) -> None:
        node = self._nodes[index]
        if ops.name_of(node.target) == "gemm":
            given = self._operands(sample, node, without="weight")
            source, format = given.pop("x"), given.pop("format")
            weight = self._dequantized(ops.operand(node, "weight"), format)
            sample[node] = gemm_float(dequantize_activation(source), **given | {"weight": weight})
            self._work(weight.numel())
        else:
            assert callable(node.target)
            sample[node] = node.target(*self._known(sample, node.args))
            if ops.name_of(node.target) == "expert_gemm":
                self._work(self._weight(ops.operand(node, "weight"))[0].numel())
        for done in {*node.all_input_nodes, node}:
            if self._last.get(done, -1) <= index:
                sample.pop(done, None)

    def _operands(self, sample: Values, node: fx.Node, without: str) -> Any:
        """The values of the node's operands for a sample by name; that of operand `without` is not computed."""
        return self._known(sample, {k: None if k == without else v for k, v in ops.named(node).items()})

    def _known(self, sample: Values, items: Any) -> Any:
        """`items` with the values of a sample, or of weights, in place of nodes."""
        known = fx.node.map_arg(items, lambda n: sample[n] if n in sample else self._weight(n))
        return dict(known) if isinstance(items, dict) else known

    def _weight(self, node: fx.Node) -> Any:
        if node not in self._weights:
            self._weights[node] = self.graph.evaluate(node)
        return self._weights[node]

    def _dequantized(self, node: Any, format: str) -> Tensor:
        """A quantized weight as floats, computed once for all samples."""
        if node not in self._weights:
            parts = self.graph.evaluate(node)
            how = weight_format(format)
            if (
                how.upper and not self._finest
            ):  # later layers compensate for the coarser weight; the finer one needs no compensation
                how = how.upper
                parts = parts[: len(how.parts)]
            self._weights[node] = how.dequantize(parts, parts[0].shape[1])
        weight: Tensor = self._weights[node]
        return weight
