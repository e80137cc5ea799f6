"""Which values of a graph ranks can divide: every rule says how one operator relates the parts of its operands.

A value [..., F] is divided along its features, a value [..., H, D] of heads along its heads. Values are tied if their
parts must agree. A value that some operator needs whole is fixed, with the operator and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import networkx as nx
import torch
from torch import fx

from qcompile import ops
from qcompile.formats.activations import ActivationFormat, activation_format
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph

FEATURES, HEADS = -1, -2
"""Axes along which values are divided."""
ELEMENTWISE = ops.with_trait("elementwise")
PRODUCTS = ("linear", "gated_linear", "gemm", "expert_linear", "gated_experts", "expert_gemm")
"""The operators that multiply their operand `x` by their operand `weight`."""
SUMMED = ("combine", "scale_slots")
"""The operators that are linear in their operand `y` and compute each feature by itself."""


class Obstacle(NamedTuple):
    """The node that needs a value whole, and why."""

    node: fx.Node
    reason: str


class Unit(NamedTuple):
    """Places along a value's axis that cannot be divided, and the node and the noun that say so."""

    size: int
    node: fx.Node
    noun: str


@dataclass
class Divisible:
    """What is known of the division of all values of a graph.

    `ties` connects values of which each rank has the same share, `meetings` values with shares that one operator reads.
    `readers` are products and the value that each reads as `x`; `heads` numbers the heads of keys and values, of which
    ranks may share one.
    """

    graph: Graph
    ties: nx.Graph = field(default_factory=nx.Graph)
    meetings: nx.Graph = field(default_factory=nx.Graph)
    axes: dict[fx.Node, int] = field(default_factory=dict)
    units: dict[fx.Node, Unit] = field(default_factory=dict)
    fixed: dict[fx.Node, Obstacle] = field(default_factory=dict)
    readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    heads: dict[fx.Node, int] = field(default_factory=dict)

    def fix(self, value: fx.Node, node: fx.Node, reason: str) -> None:
        """Note that `node` needs `value` whole."""
        self.ties.add_node(value)
        self.fixed.setdefault(value, Obstacle(node, reason))

    def tie(self, one: fx.Node, other: fx.Node, axis: int | None = None) -> None:
        """Note that a rank has the same part of `one` and of `other`; with `axis`, both are divided along it."""
        self.ties.add_edge(one, other)
        if axis is not None:
            self.along(one, axis)
            self.along(other, axis)

    def along(self, value: fx.Node, axis: int) -> None:
        """Note that `value` can be divided along `axis` only."""
        self.ties.add_node(value)
        if self.axes.setdefault(value, axis) != axis:
            self.fix(value, value, "it is read both as heads and as features")

    def aligned(self, value: fx.Node, size: int, node: fx.Node, noun: str) -> None:
        """Note that each run of `size` places of `value` stays on one rank, as `node` needs it. A run is a `noun`."""
        known = self.units.get(value)
        if known is None or math.lcm(known.size, size) != known.size:
            self.units[value] = Unit(math.lcm(known.size if known else 1, size), node, noun)


def activations(graph: Graph, node: fx.Node) -> list[fx.Node]:
    """The operands of `node` that depend on tokens."""
    return [operand for operand in node.all_input_nodes if not graph.is_weight(operand)]


def is_gated(product: fx.Node) -> bool:
    """Whether `product` applies a gate: it multiplies a function of some outputs by other outputs (rows alternate)."""
    kind = ops.name_of(product.target)
    gated = kind in ("gated_linear", "gated_experts")
    return gated or (ops.has_operand(product, "epilogue") and ops.operand(product, "epilogue") in ops.GATED)


def slices_of(product: fx.Node) -> list[fx.Node]:
    """The slices through which alone `product` is read; empty if something reads it whole."""
    users = list(product.users)
    return users if all(ops.name_of(user.target) == "slice_features" for user in users) else []


def product_of(value: fx.Node) -> fx.Node | None:
    """The product that computes `value`, or of which it is one of the slices; None for other values."""
    if ops.name_of(value.target) in PRODUCTS:
        return None if slices_of(value) else value
    if ops.name_of(value.target) != "slice_features":
        return None
    source: fx.Node = ops.operand(value, "x")
    return source if ops.name_of(source.target) in PRODUCTS and slices_of(source) else None


def shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's value; for a quantized activation, that of its codes."""
    value = node.meta["val"]
    return tuple((value if isinstance(value, torch.Tensor) else value[0]).shape)


def analyse(graph: Graph) -> Divisible:
    """All values of `graph`, with what every operator says of them."""
    divisible = Divisible(graph)
    for node in graph.nodes:
        if node.op == "get_attr" or graph.is_weight(node):
            continue
        rule = _RULES.get(ops.name_of(node.target) or "", _whole)
        rule(divisible, node)
    _spread_axes(divisible)
    return divisible


def _spread_axes(divisible: Divisible) -> None:
    """Give tied values of as many dimensions the axis that one of them has."""
    alike = nx.Graph()
    alike.add_nodes_from(divisible.ties)
    alike.add_edges_from((a, b) for a, b in divisible.ties.edges if len(shape(a)) == len(shape(b)))
    for values in nx.connected_components(alike):
        known = {divisible.axes[value] for value in values if value in divisible.axes}
        for value in sorted(values) if len(known) == 1 else ():
            divisible.axes[value] = min(known)
        for value in sorted(values) if len(known) > 1 else ():
            divisible.fix(value, value, "it is read both as heads and as features")


# ---- rules ------------------------------------------------------------------------------------------


def _whole(divisible: Divisible, node: fx.Node) -> None:
    kind = ops.name_of(node.target) or node.op
    for value in (node, *activations(divisible.graph, node)):
        divisible.fix(value, node, f"{kind} works on all features of a row")


def _embedding(divisible: Divisible, node: fx.Node) -> None:
    divisible.fix(node, node, "every rank has the whole table")


def _elementwise(divisible: Divisible, node: fx.Node) -> None:
    for operand in activations(divisible.graph, node):
        *rows, width = shape(operand)
        if rows != list(shape(node)[:-1]) or width not in (1, shape(node)[-1]):
            divisible.fix(operand, node, "its operands have different shapes")
            divisible.fix(node, node, "its operands have different shapes")
        elif width == shape(node)[-1]:
            divisible.tie(node, operand)
        elif len(rows) == 3:
            divisible.tie(node, operand, HEADS)  # a factor of each head
        else:
            divisible.fix(operand, node, "it is one number for all features")


def _by_head(divisible: Divisible, node: fx.Node) -> None:
    """Operators of x [..., H, D] that treat heads alike; of a value [..., F] they need all features."""
    x: fx.Node = ops.operand(node, "x")
    others = [operand for operand in activations(divisible.graph, node) if operand is not x]
    if len(shape(x)) != 4:
        _whole(divisible, node)
        return
    divisible.tie(node, x, HEADS)
    for other in others:
        divisible.fix(other, node, "all ranks need it")


def _split_heads(divisible: Divisible, node: fx.Node) -> None:
    _heads_of_features(divisible, node, node, ops.operand(node, "x"))


def _merge_heads(divisible: Divisible, node: fx.Node) -> None:
    _heads_of_features(divisible, node, ops.operand(node, "x"), node)


def _heads_of_features(divisible: Divisible, node: fx.Node, heads: fx.Node, features: fx.Node) -> None:
    """`node` makes one of two values of the same numbers, [..., H, D] and [..., H * D], of the other."""
    divisible.tie(heads, features)
    divisible.along(heads, HEADS)
    divisible.along(features, FEATURES)
    divisible.aligned(features, shape(heads)[-1], node, "head")


def _attention(divisible: Divisible, node: fx.Node) -> None:
    q, k, v = (ops.operand(node, name) for name in ("q", "k", "v"))
    divisible.tie(node, q, HEADS)
    count = shape(k)[-2]
    if count == 1:  # all ranks attend to the one key head
        for value in (k, v):
            divisible.fix(value, node, "its one key head serves all ranks")
        return
    divisible.tie(k, v, HEADS)
    divisible.heads[k] = count
    if q is not k:
        divisible.meetings.add_edge(q, k)


def _hadamard(divisible: Divisible, node: fx.Node) -> None:
    x, block = ops.operand(node, "x"), ops.operand(node, "block")
    if block == shape(x)[-1]:
        _whole(divisible, node)
        return
    divisible.tie(node, x, FEATURES)
    divisible.aligned(x, block, node, "block")


def _quantize_activation(divisible: Divisible, node: fx.Node) -> None:
    given = ops.operands(node)
    divisible.tie(node, given.x, FEATURES)
    _keep_groups(divisible, node, given.x, activation_format(given.kind), given.group)


def _keep_groups(divisible: Divisible, node: fx.Node, x: fx.Node, kind: ActivationFormat, sums: int) -> None:
    """Keep together the groups of x that share a scale, and those of `sums` codes unless a row has one sum."""
    width = shape(x)[-1]
    if kind.group:
        divisible.aligned(x, min(kind.group, width), node, "group")
    if kind.is_integer and 0 < sums < width:
        divisible.aligned(x, sums, node, "group")


def _summed(divisible: Divisible, node: fx.Node) -> None:
    y: fx.Node = ops.operand(node, "y")
    divisible.tie(node, y, FEATURES)
    for other in activations(divisible.graph, node):
        if other is not y:
            divisible.fix(other, node, "all ranks need the factors of the slots")


def _product(divisible: Divisible, node: fx.Node) -> None:
    given, x = ops.operands(node), ops.operand(node, "x")
    if not divisible.graph.is_weight(given.weight):
        _whole(divisible, node)
        return
    divisible.readers.setdefault(x, []).append(node)
    divisible.along(x, FEATURES)
    if is_gated(node):
        divisible.fix(x, node, "its gate needs whole sums over its inputs")
    if not slices_of(node):
        divisible.along(node, FEATURES)
    for other in activations(divisible.graph, node):
        if other is not x:
            divisible.fix(other, node, "all ranks need the choice of experts")
    if ops.has_operand(node, "format") and (group := weight_format(given.format).group):
        divisible.aligned(x, min(group, shape(x)[-1]), node, "group")
        _keep_sequences(divisible, node, weight_format(given.format).rows_together)
    if ops.name_of(node.target) == "expert_gemm":
        _keep_groups(divisible, node, x, activation_format(given.activation), given.group)


def _keep_sequences(divisible: Divisible, node: fx.Node, together: int) -> None:
    """Keep together the runs of outputs of the product `node` of which the codes depend on each other."""
    if together == 1:
        return
    for part in slices_of(node):
        if ops.operand(part, "start") % together:
            divisible.fix(
                part, node, f"its outputs are coded in sequences of {together}, and none begins where it is cut"
            )
        divisible.aligned(part, together, node, "sequence")
    if not slices_of(node):
        divisible.aligned(node, together // 2 if is_gated(node) else together, node, "sequence")


def _slice(divisible: Divisible, node: fx.Node) -> None:
    if product_of(node) is not None:
        divisible.along(node, FEATURES)
    elif len(shape(node)) == 4:
        divisible.tie(node, ops.operand(node, "x"), HEADS)  # of each head
    else:
        _whole(divisible, node)


_Rule = Callable[[Divisible, fx.Node], None]

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(SUMMED, _summed),
    **dict.fromkeys((*ops.NORMS, "rope", "rotate_heads", "mean"), _by_head),
    "embedding": _embedding,
    "split_heads": _split_heads,
    "merge_heads": _merge_heads,
    "attention": _attention,
    "hadamard": _hadamard,
    "quantize_activation": _quantize_activation,
    "slice_features": _slice,
}
