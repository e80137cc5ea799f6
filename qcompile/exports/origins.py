"""Where the rows of a checkpoint's tensors are among the packed weights of an artifact.

Passes write what they do to weights as operators, and the artifact's graph keeps these expressions. Operators that only
place rows (joined projections, interleaved gates, slices) are run here on the numbers of rows instead of the rows. So
every row of a packed weight says which row of which tensor it is. Operators that change values keep a row's place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph

PLACING = ("concat_rows", "slice_rows", "interleave_rows", "zero_bias")
"""Operators on weights with results that hold rows of their operands, or zeros."""
CHANGING = {"scale_axis": "w", "rotate": "w", "center": "w", "take_axis": "w", "mul": "a"}
"""Operators that change the values of a weight and keep their places, and the operand that is the weight."""
ROUNDING = {"quantize_weight": "w", "quantize_mixed": "w", "upper_nibble": "weight", "dequantize": "weight"}
"""Operators that round a weight or read back what was rounded, and the operand."""


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor: row `places[i]` of it is row `rows[i]` of the value of `node`, a packed weight; int64 [n].

    `added` was added to the values of a vector. `changed`: passes have changed the values in other ways, together with
    those of other weights, so that the model's function stays.
    """

    node: fx.Node
    rows: Tensor
    places: Tensor
    added: float = 0.0
    changed: bool = False


@dataclass(frozen=True)
class Use:
    """One of the values that a tensor of the checkpoint has in an artifact: in an embedding's table, or elsewhere."""

    tensor: str
    table: bool


def origins(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[Use, list[TensorRows]]:
    """Where the rows of each weight are that the step `graph` of an artifact reads; `shapes` by name of node.

    Raises UnsupportedError with the node for a weight that is computed in another way.
    """
    rows_of: dict[Use, list[TensorRows]] = defaultdict(list)
    starts = _starts(graph, shapes)
    names = [name for name, *_ in starts.values()]
    firsts = torch.tensor([first for _, first, _ in starts.values()])
    for node, table in _packed(graph):
        numbers = _numbers(node, starts)
        stored = torch.bucketize(numbers.rows, firsts, right=True) - 1  # -1: rows of zeros
        for index in stored.unique().tolist():
            if index >= 0:
                rows = (stored == index).nonzero().flatten()
                places = numbers.rows[rows] - firsts[index]
                part = TensorRows(node, rows, places, numbers.added, numbers.changed)
                rows_of[Use(names[index], table)].append(part)
    return rows_of


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


@dataclass(frozen=True)
class _Numbers:
    """The numbers of the rows of a value, 0 for rows of zeros; `added` and `changed` as in TensorRows."""

    rows: Tensor
    added: float = 0.0
    changed: bool = False


def _numbers(node: fx.Node, starts: dict[fx.Node, tuple[str, int, int]]) -> _Numbers:
    kind = ops.name_of(node.target) or ""
    if node.op == "get_attr":
        _, first, count = starts[node]
        return _Numbers(torch.arange(first, first + count))
    if kind in ROUNDING:
        return _numbers(ops.operand(node, ROUNDING[kind]), starts)
    if kind == "shift":
        inner = _numbers(ops.operand(node, "x"), starts)
        return replace(inner, added=inner.added + float(ops.operand(node, "offset")))
    if kind in CHANGING or kind == "add":
        changed = ops.operand(node, CHANGING[kind]) if kind in CHANGING else _bias_of(node)
        return replace(_numbers(changed, starts), changed=True)
    if kind not in PLACING:
        raise UnsupportedError(
            f"export: node {node.name}: the checkpoint has no place for the result of {kind}; "
            f"build without the pass that wrote it (qcompile inspect --passes)"
        )
    parts: list[_Numbers] = []

    def plain(source: fx.Node) -> Tensor:
        parts.append(_numbers(source, starts))
        if parts[-1].added:
            raise UnsupportedError(f"export: node {node.name}: {kind} joins weights that a number was added to")
        return parts[-1].rows

    placed: Tensor = ops.reference(kind)(*fx.node.map_arg(node.args, plain))
    return _Numbers(placed, changed=any(part.changed for part in parts))


def _bias_of(node: fx.Node) -> fx.Node:
    """The bias in a sum of one and of what a linear makes of a constant input."""
    terms: list[fx.Node] = [ops.operand(node, name) for name in ("a", "b")]
    return next((term for term in terms if ops.name_of(term.target) != "matvec"), terms[0])
