"""Analyses of a raised graph's dataflow that passes rely on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph

LINEAR_IN_PLACE = ops.with_trait("rotates")
"""Operators on whole values that commute with an orthogonal change of basis of all their operands."""

ALIKE = ops.with_trait("permutes")
"""Operators that keep the numbering of features, so that they commute with a permutation of all their operands."""


@dataclass
class Stream:
    """A residual stream: values connected by adds, so that a change of basis must apply to all of them or none.

    `values` are its nodes in graph order, `writers` the values not computed by adding or scaling stream values, and
    `reads` the (user, value) pairs in which an operator outside the stream reads a value.
    """

    width: int
    values: list[fx.Node]
    writers: list[fx.Node] = field(default_factory=list)
    reads: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)


def residual_streams(graph: Graph) -> list[Stream]:
    """Connected components of adds between activations, in graph order; values that no add touches are in none."""
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
    """The stream of `values`. `tied` are adds and scales; any other value is a writer, even if it also reads it."""
    stream = Stream(values[0].meta["val"].shape[-1], values)
    stream.writers = [node for node in values if node not in tied]
    stream.reads = [(user, node) for node in values for user in node.users if user not in tied]
    return stream


def carried(reads: list[tuple[fx.Node, fx.Node]]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The reads past scale-free norms: (user, value) pairs with each such norm replaced by its users.

    rms_norm without a weight commutes with every rotation, so its output has the same basis as its input.
    """
    for user, value in reads:
        if ops.name_of(user.target) == "rms_norm" and ops.operand(user, "weight") is None:
            yield from carried([(reader, user) for reader in user.users])
        else:
            yield user, value


def read_once(value: fx.Node) -> bool:
    """Whether `value` has one user that reads it once; an attention's keys may also be its values."""
    places: list[fx.Node] = []
    for user in value.users:
        fx.node.map_arg((user.args, user.kwargs), places.append)
    return places.count(value) == 1


def value_linears(pass_name: str, attention: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The linear that an attention's values come from, and those that read its merged result.

    Raises PassError naming a value with another source or reader: a change of the values' basis could not be undone.
    """
    value = ops.operand(attention, "v")
    source = ops.operand(value, "x") if ops.name_of(value.target) == "split_heads" else value
    if ops.name_of(source.target) != "linear" or not (read_once(source) and read_once(value)):
        raise PassError(pass_name, value.name, "values do not come from a linear of their own")
    readers = [reader for merged in attention.users for reader in merged.users]
    merges = all(ops.name_of(user.target) == "merge_heads" for user in attention.users)
    if not merges or any(ops.name_of(reader.target) != "linear" for reader in readers):
        raise PassError(pass_name, attention.name, "attention's output is read by something other than a linear")
    return source, readers


def value_features(attention: fx.Node) -> tuple[int, int] | None:
    """The features start:stop of the keys of `attention` that are its values; None if they are not that.

    The values of a single key head are split_heads(slice_features(merge_heads(keys), start, stop), 1).
    """
    key, node = ops.operand(attention, "k"), ops.operand(attention, "v")
    if key.meta["val"].shape[-2] != 1 or ops.name_of(node.target) != "split_heads":
        return None
    cut = ops.operand(node, "x")
    if ops.name_of(cut.target) != "slice_features":
        return None
    merged = ops.operand(cut, "x")
    if ops.name_of(merged.target) != "merge_heads" or ops.operand(merged, "x") is not key:
        return None
    return ops.operand(cut, "start"), ops.operand(cut, "stop")


@dataclass(frozen=True)
class WeightAxes:
    """The axes of operand `weight` along which an operator has its output features and its input features.

    `inputs` is None for a table, which has no input features and no bias.
    """

    outputs: int
    inputs: int | None


WEIGHT_AXES = {"linear": WeightAxes(0, 1), "embedding": WeightAxes(1, None), "expert_linear": WeightAxes(1, 2)}
"""The operators that multiply by, or look up, their operand `weight`; all but tables may have an operand `bias`."""


def axes_of(node: fx.Node) -> WeightAxes:
    """The axes of the weight of `node`, which is one of WEIGHT_AXES."""
    return WEIGHT_AXES[str(ops.name_of(node.target))]


def biased(node: fx.Node) -> bool:
    """Whether `node`, one of WEIGHT_AXES, has a bias."""
    return ops.has_operand(node, "bias") and ops.operand(node, "bias") is not None


def rewrite_weight(graph: Graph, node: fx.Node, operand: str, name: str, *given: object, **more: object) -> bool:
    """Replace `operand` of `node` by qcompile::name(operand, ...) on weights; False if `node` does not have it."""
    weight = ops.operand(node, operand) if ops.has_operand(node, operand) else None
    if weight is None:
        return False
    ops.set_operands(node, **{operand: graph.call_weight(name, weight, *given, **more)})
    return True


def weighted(graph: Graph, value: fx.Node) -> fx.Node:
    """The linear, embedding or expert_linear that makes `value`, before its outputs are weighted and summed per token.

    A factor per token, or per chosen expert of a token, commutes with any change of basis. Returns `value` itself if
    the walk back ends in another operator, or in a value with other users.
    """
    node: fx.Node = value
    while ops.name_of(node.target) in ("combine", "scale_slots", "mul"):
        source, *others = [n for n in node.all_input_nodes if not graph.is_weight(n)]
        by_token = ops.name_of(node.target) != "mul" or (others and others[0].meta["val"].shape[-1] == 1)
        if not by_token or source is not node.args[0] or len(source.users) > 1:
            return value
        node = source
    return node if ops.name_of(node.target) in WEIGHT_AXES else value


def rotation_obstacle(graph: Graph, stream: Stream) -> tuple[fx.Node, str] | None:
    """The node that prevents weights from rotating `stream`, and why; None if they can.

    They can if linears or embeddings write it and only linears read it, directly or behind scale-free norms.
    """
    for reader, _ in carried(stream.reads):
        kind = ops.name_of(reader.target) or reader.op
        if kind not in ("linear", "expert_linear"):
            return reader, f"the residual stream is read by {kind}, which no rotation passes"
    for writer in (weighted(graph, value) for value in stream.writers):
        kind = ops.name_of(writer.target) or writer.op
        if kind not in WEIGHT_AXES:
            return writer, f"the residual stream is written by {kind}, neither a linear nor an embedding"
    return None


@dataclass
class ChannelSpace:
    """Values that number their features alike, so that a permutation must apply to all of them or none.

    `writers` are the linears and embeddings that produce them, `readers` the linears that read them, `vectors` the
    (node, operand) pairs of weights [width] in between. `obstacle` is the node that fixes the order, and why.
    """

    width: int
    values: list[fx.Node]
    writers: list[fx.Node] = field(default_factory=list)
    readers: list[fx.Node] = field(default_factory=list)
    vectors: list[tuple[fx.Node, str]] = field(default_factory=list)
    obstacle: tuple[fx.Node, str] | None = None


def channel_spaces(graph: Graph) -> list[ChannelSpace]:
    """All groups of values [B, T, F] connected by operators in ALIKE and read by a linear, in graph order."""
    ties = nx.Graph()
    for node in graph.calls():
        if not graph.is_weight(node) and _is_flat(node):
            ties.add_node(node)
            if ops.name_of(node.target) in ALIKE:
                ties.add_edges_from((node, n) for n in node.all_input_nodes if not graph.is_weight(n))
    order = {node: index for index, node in enumerate(graph.fx.nodes)}
    components = [sorted(c, key=order.__getitem__) for c in nx.connected_components(ties)]
    spaces = [_space(graph, values) for values in sorted(components, key=lambda c: order[c[0]])]
    return [space for space in spaces if space.readers]


def _is_flat(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() == 3


def _space(graph: Graph, values: list[fx.Node]) -> ChannelSpace:
    space = ChannelSpace(values[0].meta["val"].shape[-1], values)
    for node in values:
        kind = ops.name_of(node.target)
        if kind in ("linear", "embedding"):
            space.writers.append(node)
        elif kind in ALIKE:
            _collect_vectors(graph, node, space)
        else:
            space.obstacle = space.obstacle or (node, f"{kind or node.op} makes these channels, and in its own order")
        for user in node.users:
            if ops.name_of(user.target) == "linear" and ops.operand(user, "x") is node:
                space.readers.append(user)
            elif ops.name_of(user.target) not in ALIKE or user not in values:
                kind = ops.name_of(user.target) or user.op
                space.obstacle = space.obstacle or (user, f"{kind} reads these channels in their order")
    return space


def _collect_vectors(graph: Graph, node: fx.Node, space: ChannelSpace) -> None:
    for name, operand in ops.named(node).items():
        if not isinstance(operand, fx.Node) or name == "curve":
            continue  # the curve of xielu is shared by all channels
        if operand.meta["val"].shape[-1] != space.width:
            space.obstacle = space.obstacle or (node, "operands of different widths meet here")
        elif graph.is_weight(operand):
            space.vectors.append((node, name))
