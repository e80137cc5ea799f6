"""Quantize: every linear becomes a gemm of a quantized activation and a quantized weight.

Tables of embeddings with a precision are rounded as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import WEIGHT_FORMATS, weight_format
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.gather import gathered


@dataclass(frozen=True)
class Quantize(Pass):
    """Rounds weights by `rounding` (`nearest`) and quantizes activations, as `assign_precision` chose.

    Rounding is written as an operator on the weight, so the graph still runs and nothing is loaded. An activation is
    quantized once, however many linears read it. In mix_4_8 the rows marked by `salience` keep 8 bits; if that pass did
    not run, a share `mixed_fraction` of each weight's rows does: those with the largest 4-bit rounding error.
    """

    name: ClassVar[str] = "quantize"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    ensures: ClassVar[str | None] = "quantize"
    rounding: Literal["nearest"] = "nearest"
    mixed_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.mixed_fraction <= 1:
            raise UsageError(f"quantize.mixed_fraction={self.mixed_fraction}: write a share between 0 and 1")
        if self.rounding != "nearest":
            raise UsageError(f"quantize.rounding={self.rounding} is unknown; there is nearest")

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        activations: dict[tuple[fx.Node, str, int], fx.Node] = {}
        fired = 0
        for node in graph.calls("linear", "gated_linear"):
            precision = node.meta.get("precision")
            if precision is None:
                raise PassError(self.name, node.name, "no precision was assigned to this linear")
            self._quantize_linear(graph, node, precision["activation"], activations)
            fired += 1
        for node in graph.calls("expert_linear", "gated_experts"):
            _quantize_experts(graph, node)
            fired += 1
        for node in graph.calls("embedding"):
            if "precision" in node.meta:
                _quantize_table(graph, node)
                fired += 1
        return PassResult(graph, fired)

    def _quantize_linear(
        self,
        graph: Graph,
        node: fx.Node,
        activation: str,
        activations: dict[tuple[fx.Node, str, int], fx.Node],
    ) -> None:
        gated = ops.name_of(node.target) == "gated_linear"
        x, bias = ops.operand(node, "x"), ops.operand(node, "bias")
        weight = ops.operand(node, "weight")
        if not graph.is_weight(weight):
            raise PassError("quantize", node.name, "this linear multiplies by another value, not by a weight")
        packed, format = self._rounded(graph, weight, node.meta["precision"])
        inputs = weight.meta["val"].shape[1]
        kind = activation_format(activation)
        key = (x, activation, kind.sum_group(weight_format(format).sum_group, inputs))
        if key not in activations:
            whole = _whole(graph, x)
            with graph.fx.inserting_after(whole):
                activations[key] = graph.call("quantize_activation", whole, *key[1:])
        epilogue = _GATING[ops.operand(node, "kind")] if gated else "store"
        with graph.fx.inserting_before(node):
            gemm = graph.call(
                "gemm",
                activations[key],
                packed,
                bias=bias,
                residual=None,
                format=format,
                epilogue=epilogue,
                width=node.meta["val"].shape[-1],
            )
        gemm.meta["precision"] = node.meta["precision"]
        graph.replace(node, gemm)

    def _rounded(self, graph: Graph, weight: fx.Node, precision: dict[str, Any]) -> tuple[fx.Node, str]:
        """`weight` rounded, and the format in which a gemm reads it."""
        format = weight_format(precision["weight"])
        if format.marks_rows:
            if "wide" in precision:
                return graph.call_weight("quantize_mixed", weight, graph.weight(precision["wide"])), format.name
            wide = graph.call_weight("worst_rows", weight, precision.get("fraction", self.mixed_fraction))
            return graph.call_weight("quantize_mixed", weight, wide), format.name
        rounded = graph.call_weight("quantize_weight", weight, format.stored_as.name)
        if format.is_part:
            rounded = graph.call_weight("upper_nibble", rounded)
        return rounded, format.read_as.name


def _whole(graph: Graph, x: fx.Node) -> fx.Node:
    """`x`, or a copy of it if it is a slice of a wider value: a kernel that rounds or multiplies rows reads whole ones.

    A row of a slice has the stride of the wider value, and the features beside it where a whole row has zeros.
    """
    source = x
    while (kind := ops.name_of(source.target)) in ("slice_features", "split_heads", "merge_heads"):
        width = source.meta["val"].shape[-1]
        source = ops.operand(source, "x")
        if kind == "slice_features" and width < source.meta["val"].shape[-1]:
            with graph.fx.inserting_after(x):
                return gathered(graph, [x], np.arange(x.meta["val"].shape[-1]))
    return x


def _quantize_table(graph: Graph, node: fx.Node) -> None:
    """The embedding `node` reads rows of its table as they are after rounding.

    A head that multiplies by the same weight in the same format reads the same rounded weight: it is stored once.
    """
    table, format = ops.operand(node, "weight"), node.meta.pop("precision")["weight"]  # it multiplies no activations
    known = (user for user in table.users if ops.name_of(user.target) == "quantize_weight")
    rounded = next((user for user in known if ops.operand(user, "format") == format), None)
    rounded = rounded or graph.call_weight("quantize_weight", table, format)
    node.replace_input_with(table, graph.call_weight("dequantize", rounded, format, table.meta["val"].shape[1]))


_GATING = {kind: name for name, kind in ops.GATED.items()}


def _quantize_experts(graph: Graph, node: fx.Node) -> None:
    """expert_linear or gated_experts -> expert_gemm, which quantizes each expert's inputs itself.

    Experts process different rows, so they cannot share one quantized activation.
    """
    precision = node.meta.get("precision")
    if precision is None:
        raise PassError("quantize", node.name, "no precision was assigned to this linear")
    weights, kind = weight_format(precision["weight"]), activation_format(precision["activation"])
    if not weights.serves_experts:
        others = ", ".join(format.name for format in WEIGHT_FORMATS.values() if format.serves_experts)
        raise PassError("quantize", node.name, f"experts have no kernel in {weights.name}; {others} have")
    given = ops.operands(node)
    gated = ops.name_of(node.target) == "gated_experts"
    bias = None if given.bias is None else graph.call_weight("expert_rows", given.bias)
    experts, _, inputs = given.weight.meta["val"].shape
    group = kind.sum_group(weights.sum_group, inputs)
    packed = graph.call_weight("quantize_weight", graph.call_weight("expert_rows", given.weight), weights.name)
    with graph.fx.inserting_before(node):
        gemm = graph.call(
            "expert_gemm",
            given.x,
            given.index,
            packed,
            bias=bias,
            format=weights.name,
            activation=kind.name,
            group=group,
            experts=experts,
            width=node.meta["val"].shape[-1],
            epilogue=_GATING[given.kind] if gated else "store",
            limit=given.limit if gated else None,
            offset=given.offset if gated else 0.0,
        )
    gemm.meta["precision"] = precision
    graph.replace(node, gemm)
