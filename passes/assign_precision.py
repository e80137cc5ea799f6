"""Assign each linear a weight format and an activation type: one pair for all but the head and what is decided.

Also the tables of token embeddings get a weight format, if they are to be rounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.formats.registry import WEIGHT_FORMATS, weight_format
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.recipes import EMBEDDINGS, embedding_option


def head_linears(graph: Graph) -> set[fx.Node]:
    """Linears with no other linear between them and the output: they produce the logits."""
    return _last_linears(graph, graph.output.all_input_nodes)


def router_linears(graph: Graph) -> set[fx.Node]:
    """Linears with no other linear between them and a choice of experts."""
    return _last_linears(graph, [n for node in graph.calls("top_k") for n in node.all_input_nodes])


def _last_linears(graph: Graph, values: Iterable[fx.Node]) -> set[fx.Node]:
    """Linears with no other linear between them and one of `values`."""
    linears: set[fx.Node] = set()
    frontier = list(values)
    while frontier:
        node = frontier.pop()
        if ops.name_of(node.target) == "linear":
            linears.add(node)
        elif not graph.is_weight(node):
            frontier += node.all_input_nodes
    return linears


def token_embeddings(graph: Graph) -> list[fx.Node]:
    """The embeddings that tokens index, and not positions."""
    tokens = graph.inputs[0]
    return [node for node in graph.calls("embedding") if ops.operand(node, "ids") is tokens]


@dataclass(frozen=True)
class AssignPrecision(Pass):
    """Uniform precision: `weight` and `activation` for all linears, `head` and `head_activation` for the output head.

    Weight formats are those of formats/registry.py, activation formats those of formats/activations.py. Expert routers
    stay in f32. Experts get another format where theirs has no kernel for experts but names one that has (mix_4_8: its
    4-bit part), with a note. The choice is stored in node.meta["precision"], which `merge` and `quantize` read.

    `embedding` is a key of recipes.EMBEDDINGS: with int8, tables of token embeddings get a format as well.

    What an earlier pass stored there stands, with a note; this pass adds the format of weights or activations if that
    is missing. Raises PassError for a decision that has no kernels.
    """

    name: ClassVar[str] = "assign_precision"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    weight: str = "f32"
    activation: str = "f32"
    head: str = "f32"
    head_activation: str = "f32"
    embedding: str = "auto"

    def __post_init__(self) -> None:
        embedding_option(self.embedding)
        for format, activation in ((self.weight, self.activation), (self.head, self.head_activation)):
            known = [kind.name for kind in weight_format(format).activations]
            if activation not in known:
                raise UsageError(
                    f"weights in {format} have no kernel for activations in {activation}; there are {', '.join(known)}"
                )

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        head, routers = head_linears(graph), router_linears(graph)
        fired, fallbacks, kept = 0, set(), []
        for node in graph.calls("linear", "expert_linear"):
            weight, activation = (self.head, self.head_activation) if node in head else (self.weight, self.activation)
            if node in routers:  # small, and a rounding error in a score can send a token to another expert
                weight, activation = "f32", "f32"
            fallback = weight_format(weight).expert_fallback
            decided = node.meta.get("precision") or {}
            if fallback and ops.name_of(node.target) == "expert_linear" and "weight" not in decided:
                fallbacks.add(f"experts have no kernel in {weight}: theirs are {fallback}")
                weight = fallback
            node.meta["precision"] = {"weight": weight, "activation": activation} | decided
            if decided:
                kept.append(_checked(node))
            fired += not {"weight", "activation"} <= decided.keys()
        for node in token_embeddings(graph) if EMBEDDINGS[self.embedding] else ():
            node.meta["precision"] = {"weight": EMBEDDINGS[self.embedding]}
            fired += 1
        return PassResult(graph, fired, (*sorted(fallbacks), *kept))


def _checked(node: fx.Node) -> str:
    """A note that the linear `node` keeps the precision that an earlier pass decided.

    Raises PassError if there are no kernels for that precision.
    """
    weight, activation = (node.meta["precision"][part] for part in ("weight", "activation"))
    try:
        format = weight_format(str(weight))
    except UsageError as error:
        raise PassError(AssignPrecision.name, node.name, str(error)) from None
    if format.expert_fallback and ops.name_of(node.target) == "expert_linear":
        others = ", ".join(other.name for other in WEIGHT_FORMATS.values() if other.serves_experts)
        raise PassError(AssignPrecision.name, node.name, f"experts have no kernel in {weight}; {others} have")
    meeting = [kind.name for kind in format.activations]
    if activation not in meeting:
        reason = f"weights in {weight} have no kernel for activations in {activation}; there are {', '.join(meeting)}"
        raise PassError(AssignPrecision.name, node.name, reason)
    return f"node {node.name}: keeps {weight} x {activation}, which an earlier pass decided"
