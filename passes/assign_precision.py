"""Assign each linear a weight format and an activation type: one pair for all linears but the output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qcompile import ops
from qcompile.errors import UsageError
from qcompile.formats import numerics
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult


def head_linears(graph: Graph) -> set[fx.Node]:
    """Linears whose results reach the output without passing through another linear: they produce the logits."""
    found: set[fx.Node] = set()
    frontier = list(graph.output.all_input_nodes)
    while frontier:
        node = frontier.pop()
        if ops.name_of(node.target) == "linear":
            found.add(node)
        elif not graph.is_weight(node):
            frontier += node.all_input_nodes
    return found


def router_linears(graph: Graph) -> set[fx.Node]:
    """Linears whose results reach the choice of experts without passing through another linear."""
    found: set[fx.Node] = set()
    frontier = [n for node in graph.calls("top_k") for n in node.all_input_nodes]
    while frontier:
        node = frontier.pop()
        if ops.name_of(node.target) == "linear":
            found.add(node)
        elif not graph.is_weight(node):
            frontier += node.all_input_nodes
    return found


@dataclass(frozen=True)
class AssignPrecision(Pass):
    """Uniform precision: `weight` and `activation` for all linears, `head` and `head_activation` for the output head.

    Weight formats are those of numerics.FORMATS and PART_OF, activation types those of numerics.ACTIVATIONS. Expert
    routers stay in f32. Experts have no mix_4_8 kernel and get the format of its 4-bit part instead, with a note. The
    choice is stored in node.meta["precision"], which `merge` and `quantize` read.
    """

    name: ClassVar[str] = "assign_precision"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    weight: str = "f32"
    activation: str = "f32"
    head: str = "f32"
    head_activation: str = "f32"

    def __post_init__(self) -> None:
        for format, activation in ((self.weight, self.activation), (self.head, self.head_activation)):
            if format not in ACTIVATIONS:
                raise UsageError(f"weight format {format} is unknown; there are {', '.join(ACTIVATIONS)}")
            if activation not in ACTIVATIONS[format]:
                raise UsageError(
                    f"weights in {format} do not meet activations in {activation}; "
                    f"there are {', '.join(ACTIVATIONS[format])}"
                )

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        head, routers = head_linears(graph), router_linears(graph)
        fired = 0
        notes: tuple[str, ...] = ()
        for node in graph.calls("linear", "expert_linear"):
            weight, activation = (self.head, self.head_activation) if node in head else (self.weight, self.activation)
            if node in routers:  # small, and a rounding error in a score can send a token to another expert
                weight, activation = "f32", "f32"
            if weight == "mix_4_8" and ops.name_of(node.target) == "expert_linear":
                weight, notes = "w4_asym_g128", ("experts have no kernel in mix_4_8: theirs are w4_asym_g128",)
            node.meta["precision"] = {"weight": weight, "activation": activation}
            fired += 1
        return PassResult(graph, fired, notes)


ACTIVATIONS = {
    "f32": ("f32",),
    "bf16": ("bf16",),
    "w8_sym_channel": numerics.INTEGER_ACTIVATIONS,
    "w4_asym_g128": (*numerics.INTEGER_ACTIVATIONS, "bf16"),
    "qoq_g128": numerics.INTEGER_ACTIVATIONS,
    "qoq_channel": numerics.INTEGER_ACTIVATIONS,
    "mxfp4": numerics.INTEGER_ACTIVATIONS,
    "nested_8_4": numerics.INTEGER_ACTIVATIONS,
    "mix_4_8": numerics.INTEGER_ACTIVATIONS,
    "nested_4": (*numerics.INTEGER_ACTIVATIONS, "bf16"),
}
"""Activation types for which each weight format has kernels."""
