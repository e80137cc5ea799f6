"""The formats of the gemms of a quantized graph: find the gemms, and change one's weight and activation formats."""

from __future__ import annotations

from typing import Any

from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph

SAME = "same"
"""In place of a format: the one that a gemm has."""
GEMMS = ("gemm", "expert_gemm")


def head_gemms(graph: Graph) -> set[fx.Node]:
    """Gemms with no other gemm between them and the output: they produce the logits."""
    return _gemms_before(graph, [graph.output])


def changeable_gemms(graph: Graph) -> list[fx.Node]:
    """All gemms but routers: with another choice of experts, the graph would compute another model."""
    routers = _gemms_before(graph, graph.calls("top_k"))
    return [node for node in graph.calls(*GEMMS) if node not in routers]


def _gemms_before(graph: Graph, nodes: list[fx.Node]) -> set[fx.Node]:
    """Gemms with no other gemm between them and one of `nodes`."""
    gemms: set[fx.Node] = set()
    frontier = [source for node in nodes for source in node.all_input_nodes]
    while frontier:
        node = frontier.pop()
        if ops.name_of(node.target) in GEMMS:
            gemms.add(node)
        elif not graph.is_weight(node):
            frontier += node.all_input_nodes
    return gemms


def change_precision(
    graph: Graph, node: fx.Node, weight: str, activation: str, activations: dict[tuple[Any, ...], fx.Node], by: str
) -> bool:
    """Change the formats of one gemm of a quantized graph; returns whether anything changed.

    `SAME` keeps a format. `activations` has the nodes that quantize activations, by (value, format, group), which gemms
    share. Raises PassError in the name of `by` for formats without a kernel for both.
    """
    experts = ops.name_of(node.target) == "expert_gemm"
    packed, format = ops.operand(node, "weight"), ops.operand(node, "format")
    if experts:  # expert_gemm quantizes its inputs itself
        x, dtype, group = (ops.operand(node, name) for name in ("x", "activation", "group"))
    else:
        x, dtype, group = (ops.operand(ops.operand(node, "x"), name) for name in ("x", "kind", "group"))
    new_dtype = dtype if activation == SAME else activation
    wanted, kind = weight_format(format if weight == SAME else weight), activation_format(new_dtype)
    if kind not in wanted.activations:
        message = f"weights in {wanted.name} have no kernel for activations in {new_dtype}"
        raise PassError(by, node.name, message)
    new_packed, new_format = (packed, format) if weight == SAME else _weight(graph, packed, weight)
    new_group = kind.sum_group(weight_format(new_format).sum_group, packed.meta["val"][0].shape[1])
    changed = new_packed is not packed or (new_dtype, new_group) != (dtype, group)
    if experts:
        ops.set_operands(node, activation=new_dtype, group=new_group)
    else:
        ops.set_operands(node, x=_quantized(graph, ops.operand(node, "x"), (x, new_dtype, new_group), activations))
    ops.set_operands(node, weight=new_packed, format=new_format)
    node.meta["precision"] = {"weight": new_format, "activation": new_dtype}
    return changed


def _quantized(
    graph: Graph, present: fx.Node, key: tuple[Any, ...], activations: dict[tuple[Any, ...], fx.Node]
) -> fx.Node:
    """The quantized activation for `key` (value, dtype, group): `present` if it matches, else one shared node."""
    if key == present.args:
        return present
    if key not in activations:
        with graph.fx.inserting_after(key[0]):
            activations[key] = graph.call("quantize_activation", *key)
    return activations[key]


def _weight(graph: Graph, packed: Any, format: str) -> tuple[fx.Node, str]:
    """The weight behind `packed` in `format`, and the format its gemm reads; a stored weight is reused."""
    rounded = ops.operand(packed, "weight") if ops.name_of(packed.target) == "upper_nibble" else packed
    wanted = weight_format(format)
    if ops.operand(rounded, "format") != wanted.stored_as.name:
        rounded = graph.call_weight("quantize_weight", ops.operand(rounded, "w"), wanted.stored_as.name)
    if wanted.is_part:
        rounded = graph.call_weight("upper_nibble", rounded)
    return rounded, wanted.read_as.name
