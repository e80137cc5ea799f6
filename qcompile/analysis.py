"""Facts about a raised graph that passes act on, read off its dataflow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx
from torch import fx

from qcompile import ops
from qcompile.graph import Graph

LINEAR_IN_PLACE = ("add", "scale")
"""Operators on whole values through which one orthogonal change of basis passes unchanged."""


@dataclass
class Stream:
    """A residual stream: values tied by adds, so that a change of basis must be made to all of them or none.

    `values` are its nodes in graph order, `writers` those computed by something other than adding or scaling
    stream values, `reads` the (user, value) pairs that take a value out of it.
    """

    width: int
    values: list[fx.Node]
    writers: list[fx.Node] = field(default_factory=list)
    reads: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)


def residual_streams(graph: Graph) -> list[Stream]:
    """Connected components of adds between activations, in graph order; values that no add touches are none."""
    ties = nx.Graph()
    tied = set()
    for node in graph.calls(*LINEAR_IN_PLACE):
        operands = [n for n in node.all_input_nodes if not graph.is_weight(n)]
        if all(n.meta["val"].shape == node.meta["val"].shape for n in operands):
            ties.add_edges_from((node, operand) for operand in operands)
            tied.add(node)
    order = {node: index for index, node in enumerate(graph.fx.nodes)}
    streams = []
    for component in nx.connected_components(ties):
        values = sorted(component, key=order.__getitem__)
        if any(_is_sum(graph, node) for node in values):
            streams.append(_stream(values, tied))
    return sorted(streams, key=lambda stream: order[stream.values[0]])


def _is_sum(graph: Graph, node: fx.Node) -> bool:
    return ops.name_of(node.target) == "add" and not any(graph.is_weight(n) for n in node.all_input_nodes)


def _stream(values: list[fx.Node], tied: set[fx.Node]) -> Stream:
    """`tied` are the adds and scales: a value of the stream that is neither writes it, even if it reads it too."""
    stream = Stream(values[0].meta["val"].shape[-1], values)
    stream.writers = [node for node in values if node not in tied]
    stream.reads = [(user, node) for node in values for user in node.users if user not in tied]
    return stream


def carried(reads: list[tuple[fx.Node, fx.Node]]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The reads behind scale-free norms: (user, value) with each such norm replaced by what reads it.

    rms_norm without a weight commutes with every rotation, so what is true of its input's basis is true
    of its output's.
    """
    for user, value in reads:
        if ops.name_of(user.target) == "rms_norm" and user.args[1] is None:
            yield from carried([(reader, user) for reader in user.users])
        else:
            yield user, value
