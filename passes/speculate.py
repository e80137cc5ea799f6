"""Speculate: a second path through the model, of other precisions, over the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from qcompile import numerics, ops
from qcompile.errors import PassError, UsageError
from qcompile.graph import Graph
from qcompile.passes.assign_precision import ACTIVATIONS
from qcompile.passes.base import Pass, PassResult

SAME = "same"


@dataclass(frozen=True)
class Speculate(Pass):
    """A draft path: `weight` and `activation` of every linear, `head` and `head_activation` of the output head.

    `same` keeps what the verifying path has, so that its packed weights serve both (QSpec 3.1); a format rounds
    the weights once more from what they were before (ML-SpecQD 3.1, direct cast). It runs when `enabled`, once
    for every draft path of the recipe, on the graph that `quantize` left.
    """

    name: ClassVar[str] = "speculate"
    requires: ClassVar[tuple[str, ...]] = ("quantize",)
    enabled: bool = False
    weight: str = SAME
    activation: str = SAME
    head: str = SAME
    head_activation: str = SAME

    def __post_init__(self) -> None:
        for format in (self.weight, self.head):
            if format != SAME and format not in ACTIVATIONS:
                raise UsageError(f"weight format {format} is unknown; there are same, {', '.join(ACTIVATIONS)}")
        known = sorted({activation for choices in ACTIVATIONS.values() for activation in choices})
        for activation in (self.activation, self.head_activation):
            if activation not in (SAME, *known):
                raise UsageError(f"activation type {activation} is unknown; there are same, {', '.join(known)}")

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        heads = head_gemms(graph)
        activations: dict[tuple[Any, ...], fx.Node] = {}
        fired = 0
        for node in graph.calls("gemm"):
            wanted = (self.head, self.head_activation) if node in heads else (self.weight, self.activation)
            fired += _change(graph, node, *wanted, activations)
        graph.erase_dead()
        return PassResult(graph, fired)


def head_gemms(graph: Graph) -> set[fx.Node]:
    """Gemms from which the output is reached without another gemm: what makes logits."""
    found: set[fx.Node] = set()
    frontier = list(graph.output.all_input_nodes)
    while frontier:
        node = frontier.pop()
        if ops.name_of(node.target) == "gemm":
            found.add(node)
        elif not graph.is_weight(node):
            frontier += node.all_input_nodes
    return found


def _change(
    graph: Graph, node: fx.Node, weight: str, activation: str, activations: dict[tuple[Any, ...], fx.Node]
) -> bool:
    """Give one gemm its other precisions; whether anything changed."""
    arguments: Any = node.args
    x, packed, format = arguments[0], arguments[1], str(arguments[4])
    source, dtype, group = x.args
    new_dtype = dtype if activation == SAME else activation
    if new_dtype not in ACTIVATIONS[format if weight == SAME else weight]:
        found = f"{format if weight == SAME else weight} do not meet activations in {new_dtype}"
        raise PassError(Speculate.name, node.name, f"weights in {found}")
    new_packed, new_format = (packed, format) if weight == SAME else _weight(graph, packed, weight)
    kind = numerics.ACTIVATIONS[new_dtype]
    inputs = packed.meta["val"][0].shape[1]
    new_group = (numerics.FORMATS[new_format].sum_group or kind.group or inputs) if kind.top else 0
    key = (source, new_dtype, new_group)
    if key[1:] != (dtype, group):
        if key not in activations:
            with graph.fx.inserting_after(source):
                activations[key] = graph.call("quantize_activation", *key)
        x = activations[key]
    changed = x is not arguments[0] or new_packed is not packed
    node.args = (x, new_packed, *arguments[2:4], new_format, *arguments[5:])
    node.meta["precision"] = {"weight": new_format, "activation": new_dtype}
    return changed


def _weight(graph: Graph, packed: Any, format: str) -> tuple[fx.Node, str]:
    """The weight behind `packed` in `format`, and the format its gemm reads; what is stored already is read again."""
    rounded = packed.args[0] if ops.name_of(packed.target) == "upper_nibble" else packed
    whole, part = numerics.PART_OF.get(format, (format, format))
    if rounded.args[1] != whole:
        rounded = graph.call_weight("quantize_weight", rounded.args[0], whole)
    if whole != part:
        rounded = graph.call_weight("upper_nibble", rounded)
    return rounded, part
