"""Where the rows of a checkpoint's tensors are among the packed weights of an artifact.

Passes write what they do to weights as operators, and the artifact's graph keeps these expressions. Operators that only
place rows (joined projections, interleaved gates, slices) are run here on the numbers of rows instead of the rows. So
every row of a packed weight says which row of which tensor it is. Operators that change values are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph

PLACING = ("concat_rows", "slice_rows", "interleave_rows", "zero_bias")
"""Operators on weights whose results hold rows of their operands, or zeros."""
ROUNDING = {"quantize_weight": "w", "quantize_mixed": "w", "upper_nibble": "weight"}
"""Operators that round a weight, and the operand that they round."""


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor: row `places[i]` of it is row `rows[i]` of the value of `node`, a packed weight; int64 [n].

    `added` was added to the values of a vector.
    """

    node: fx.Node
    rows: Tensor
    places: Tensor
    added: float = 0.0


@dataclass(frozen=True)
class Use:
    """One of the values that a tensor of the checkpoint has in an artifact: in an embedding's table, or elsewhere."""

    tensor: str
    table: bool


def origins(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[Use, list[TensorRows]]:
    """Where the rows of each weight are that the step `graph` of an artifact reads; `shapes` by name of node.

    Raises UnsupportedError with the node for a weight whose values passes have changed.
    """
    found: dict[Use, list[TensorRows]] = defaultdict(list)
    starts = _starts(graph, shapes)
    names = [name for name, *_ in starts.values()]
    firsts = torch.tensor([first for _, first, _ in starts.values()])
    for node, table in _packed(graph):
        numbers, added = _numbers(node, starts)
        stored = torch.bucketize(numbers, firsts, right=True) - 1  # -1: rows of zeros
        for index in stored.unique().tolist():
            if index >= 0:
                rows = (stored == index).nonzero().flatten()
                found[Use(names[index], table)].append(TensorRows(node, rows, numbers[rows] - firsts[index], added))
    return found


def _packed(graph: Graph) -> Iterator[tuple[fx.Node, bool]]:
    """Each weight that activations are computed with, once, and whether it is the table of an embedding."""
    seen: set[tuple[fx.Node, bool]] = set()
    for node in graph.nodes:
        if node.op != "call_function" or graph.is_weight(node):
            continue
        for source in filter(graph.is_weight, node.all_input_nodes):
            item = source, ops.name_of(node.target) == "embedding"
            if item not in seen:
                seen.add(item)
                yield item


def _starts(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[fx.Node, tuple[str, int, int]]:
    """The name of each stored weight of the graph, the number of its first row (1 or more), and of its rows."""
    starts: dict[fx.Node, tuple[str, int, int]] = {}
    first = 1
    for node in graph.nodes:
        if node.op == "get_attr":
            shape = shapes[node.name]
            count = prod(shape[:-1]) if len(shape) > 1 else prod(shape)
            starts[node] = str(node.target), first, count
            first += count
    return starts


def _numbers(node: fx.Node, starts: dict[fx.Node, tuple[str, int, int]]) -> tuple[Tensor, float]:
    """The numbers of the rows of the value of `node`, 0 for rows of zeros, and what was added to its values."""
    kind = ops.name_of(node.target)
    if node.op == "get_attr":
        _, first, count = starts[node]
        return torch.arange(first, first + count), 0.0
    if kind in ROUNDING:
        return _numbers(ops.operand(node, ROUNDING[kind]), starts)
    if kind == "shift":
        numbers, added = _numbers(ops.operand(node, "x"), starts)
        return numbers, added + float(ops.operand(node, "offset"))
    if kind not in PLACING:
        raise UnsupportedError(
            f"export: node {node.name}: {kind} has changed a weight, and the checkpoint has no place for the result; "
            f"build without the pass that wrote it (qcompile inspect --passes)"
        )

    def plain(source: fx.Node) -> Tensor:
        numbers, added = _numbers(source, starts)
        if added:
            raise UnsupportedError(f"export: node {node.name}: {kind} joins weights that a number was added to")
        return numbers

    placed: Tensor = ops.reference(kind)(*fx.node.map_arg(node.args, plain))
    return placed, 0.0
