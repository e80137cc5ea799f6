"""Run a graph over many samples, stopping where asked: what calibration sees of a model.

Every operator runs once for each sample; between stops only values that something later reads are kept, found by
dataflow. In a decoder that is the residual stream and the input of the linear at which the sweep stopped, in the
form it has there (int8 codes where activations are quantized). Weights are loaded for a stretch and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import numerics, ops
from qcompile.graph import Graph
from qcompile.ops.quantized import gemm_float

Values = dict[fx.Node, Any]


class Sweep:
    """The state of a run of `graph` over `tokens` int64 [samples, length], each sample a batch of one.

    `graph` is one of whole sequences (before the `cache` stage). Its nodes may be given other weights ahead of
    where the sweep is. `work(amount)` is called as multiplications of linears are done.
    """

    def __init__(self, graph: Graph, tokens: Tensor, work: Callable[[int], None] | None = None) -> None:
        self.graph, self._work = graph, work or (lambda amount: None)
        self._nodes = [node for node in graph.nodes if not graph.is_weight(node) and node.op == "call_function"]
        self._next = 0
        self._last = {source: index for index, node in enumerate(self._nodes) for source in node.all_input_nodes}
        self._last |= dict.fromkeys(graph.output.all_input_nodes, len(self._nodes))
        positions = torch.arange(tokens.shape[1])[None]
        ids = [row[None] for row in tokens]
        inputs = graph.inputs
        self._samples: list[Values] = [dict(zip(inputs, (row, positions), strict=False)) for row in ids]
        self._weights: Values = {}

    def advance(self, stop: fx.Node) -> None:
        """Run every sample up to `stop`, which is not run."""
        end = self._nodes.index(stop, self._next)
        with torch.no_grad():
            for sample in self._samples:
                for index in range(self._next, end):
                    self._run(sample, index)
        self._weights.clear()
        self._next = end

    def outputs(self) -> Iterator[Any]:
        """Run every sample to the end: what the graph gives for it, of one sample after the other."""
        result: Any = self.graph.output.args[0]
        for sample in self._samples:
            with torch.no_grad():
                for index in range(self._next, len(self._nodes)):
                    self._run(sample, index)
            yield sample.pop(result)

    def values(self, node: fx.Node) -> list[Any]:
        """What `node`, which something not yet run reads, gave for each sample."""
        return [sample[node] for sample in self._samples]

    def _run(self, sample: Values, index: int) -> None:
        node = self._nodes[index]
        if ops.name_of(node.target) == "gemm":
            source, weight, bias, residual, format, epilogue, width = self._arguments(sample, node, skip=1)
            weight = self._dequantized(node.args[1], format)
            sample[node] = gemm_float(numerics.dequantize_activation(source), weight, bias, residual, epilogue, width)
            self._work(weight.numel())
        else:
            assert callable(node.target)
            arguments = self._arguments(sample, node)
            sample[node] = node.target(*arguments)
            if ops.name_of(node.target) == "expert_gemm":
                self._work(arguments[2][0].numel())
        for done in {*node.all_input_nodes, node}:
            if self._last.get(done, -1) <= index:
                sample.pop(done, None)

    def _arguments(self, sample: Values, node: fx.Node, skip: int | None = None) -> Any:
        """The node's arguments for a sample, but for the one at `skip`."""
        given = tuple(None if index == skip else item for index, item in enumerate(node.args))
        return fx.node.map_arg(given, lambda n: sample[n] if n in sample else self._weight(n))

    def _weight(self, node: fx.Node) -> Any:
        if node not in self._weights:
            self._weights[node] = self.graph.evaluate(node)
        return self._weights[node]

    def _dequantized(self, node: Any, format: str) -> Tensor:
        """A quantized weight as floats, once for all samples."""
        if node not in self._weights:
            parts = self.graph.evaluate(node)
            if format == "nested_8_4":  # later layers make up for the upper nibble alone; 8 bits need no help
                parts, format = parts[:3], "w4_asym_g128"
            self._weights[node] = numerics.dequantize_weight(parts, format, parts[0].shape[1])
        weight: Tensor = self._weights[node]
        return weight
