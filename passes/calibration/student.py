"""Run a quantized graph with gradients, to move its weights toward the logits of the float model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.formats.activations import activation_format, dequantize_activation
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.ops.epilogues import gemm_float
from qcompile.passes.calibration.learned import LearnedWeight
from qcompile.passes.calibration.origin import unrounded
from qcompile.passes.calibration.sweep import Sweep

_ROUNDING = ("quantize_activation", "gemm")


def without_gradient(graph: Graph) -> fx.Node | None:
    """The first activation node of `graph`, at stage quantize, that gradients do not pass, or None."""
    known = {*ops.allowed("raise"), *_ROUNDING}
    nodes = (node for node in graph.nodes if node.op == "call_function" and not graph.is_weight(node))
    return next((node for node in nodes if ops.name_of(node.target) not in known), None)


class Student:
    """The quantized `graph` (stage quantize) with `learned` weights in the place of some; others stay in memory.

    Gradients pass the rounding of activations as if it were not there.
    """

    def __init__(self, graph: Graph, learned: Mapping[fx.Node, LearnedWeight]) -> None:
        self.graph, self.learned = graph, learned
        self._nodes = [node for node in graph.nodes if node.op == "call_function" and not graph.is_weight(node)]
        self._weights: dict[fx.Node, Any] = {}

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits f32 [samples, T, vocabulary] of tokens int64 [samples, T]."""
        positions = torch.arange(tokens.shape[1])[None]
        values: dict[fx.Node, Any] = dict(zip(self.graph.inputs, (tokens, positions), strict=False))
        for node in self._nodes:
            given = {
                name: None if name == "weight" and ops.name_of(node.target) == "gemm" else self._known(item, values)
                for name, item in ops.named(node).items()
            }
            values[node] = self._value(node, given)
        result: Tensor = values[self.graph.output.args[0]]  # type: ignore[index]
        return result.float()

    def _value(self, node: fx.Node, given: dict[str, Any]) -> Any:
        kind = str(ops.name_of(node.target))
        if kind == "quantize_activation":
            return _rounded(given["x"], given["kind"], given["group"])
        if kind == "gemm":
            del given["format"]
            return gemm_float(**given | {"x": given["x"], "weight": self._weight(node)})
        return ops.reference(kind)(**given)

    def _known(self, item: Any, values: dict[fx.Node, Any]) -> Any:
        return fx.node.map_arg(item, lambda node: values[node] if node in values else self._kept(node))

    def _kept(self, node: fx.Node) -> Any:
        if node not in self._weights:
            self._weights[node] = self.graph.evaluate(node)
        return self._weights[node]

    def _weight(self, gemm: fx.Node) -> Tensor:
        """The weight f32 [N, K] of a gemm."""
        node: fx.Node = ops.operand(gemm, "weight")
        if node in self.learned:
            return self.learned[node].value()
        if node not in self._weights:
            parts = self.graph.evaluate(node)
            format = weight_format(ops.operand(gemm, "format"))
            self._weights[node] = format.dequantize(parts, parts[0].shape[1])
        weight: Tensor = self._weights[node]
        return weight


def _rounded(x: Tensor, kind: str, group: int) -> Tensor:
    """x [..., K] as its activation format reads back, f32, with the gradient of x itself."""
    whole = dequantize_activation(activation_format(kind).quantize(x.detach(), group))
    return x.float() + (whole - x.detach().float())


class Teacher:
    """Logits of the float model of `graph` (at stage quantize) on `tokens` int64 [samples, length].

    The model runs once, a linear at a time; kept are the values that its last linear reads.
    """

    def __init__(self, graph: Graph, tokens: Tensor) -> None:
        exact = unrounded(graph)
        self._sweep = Sweep(exact, tokens)
        for linear in exact.calls("gemm"):
            self._sweep.advance(linear)

    def logits(self, samples: Sequence[int]) -> Tensor:
        """Logits f32 [samples, T, vocabulary] of the samples with these numbers."""
        return torch.cat([self._sweep.output(sample).float() for sample in samples])
