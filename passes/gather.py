"""Values assembled from features of other values (gather_features), and how nested gathers are flattened."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from qcompile import ops
from qcompile.graph import Graph

Index = NDArray[np.int64]
Cut = Callable[[fx.Node, Index], tuple[fx.Node, Index]]
"""Returns a value that holds features `index` (no duplicates) of another value, and their places in it."""


def flattened(
    sources: Sequence[fx.Node], index: Index, table: Callable[[fx.Node], Index]
) -> tuple[list[fx.Node], Index]:
    """The `sources` and `index` of a gather_features after inlining sources that are gather_features themselves.

    `table` returns the index of such a source. Unused sources are dropped, and duplicates merged.
    """
    starts: dict[fx.Node, Index] = {}  # a source, and the places of its features
    wanted = np.full(len(index), -1)
    start, total = 0, 0
    pieces: list[tuple[fx.Node, Index, Index]] = []
    for source in sources:
        width = source.meta["val"].shape[-1]
        here = np.flatnonzero((index >= start) & (index < start + width))
        pieces += _pieces(source, here, index[here] - start, table)
        start += width
    for source, _, _ in pieces:
        if source not in starts:
            starts[source] = np.arange(total, total + source.meta["val"].shape[-1])
            total += len(starts[source])
    for source, places, features in pieces:
        wanted[places] = starts[source][features]
    return list(starts), wanted


def _pieces(
    source: fx.Node, places: Index, features: Index, table: Callable[[fx.Node], Index]
) -> list[tuple[fx.Node, Index, Index]]:
    """(source, destinations, features) triples that fill `places`; no source is itself a gather."""
    if not len(places):
        return []
    if ops.name_of(source.target) != "gather_features":
        return [(source, places, features)]
    inner, pieces, start = table(source)[features], [], 0
    for each in ops.operand(source, "sources"):
        width = each.meta["val"].shape[-1]
        here = (inner >= start) & (inner < start + width)
        pieces += _pieces(each, places[here], inner[here] - start, table)
        start += width
    return pieces


def trimmed(sources: Sequence[fx.Node], index: Index, cut: Cut) -> tuple[list[fx.Node], Index]:
    """An equivalent gather from sources that `cut` has reduced to the features it uses."""
    made: list[fx.Node] = []
    wanted, start, total = index.copy(), 0, 0
    for source in sources:
        width = source.meta["val"].shape[-1]
        here = (index >= start) & (index < start + width)
        used, first = np.unique(index[here] - start, return_index=True)
        node, places = cut(source, used[np.argsort(first)])
        spread = np.zeros(width, np.int64)
        spread[used[np.argsort(first)]] = places
        wanted[here] = total + spread[index[here] - start]
        made.append(node)
        start, total = start + width, total + node.meta["val"].shape[-1]
    return made, wanted


def table_of(graph: Graph) -> Callable[[fx.Node], Index]:
    """A function that returns the index of a gather_features of `graph`."""

    def table(node: fx.Node) -> Index:
        index: Index = graph.evaluate(ops.operand(node, "index")).numpy()
        return index

    return table


def index_weight(graph: Graph, index: Index) -> fx.Node:
    """A node that reads `index` from the graph's weight store; equal indices share one entry."""
    data = torch.from_numpy(np.ascontiguousarray(index, np.int64))
    number = 0
    while (name := f"gather.{number}") in graph.weights:
        entry = graph.weights.entries[name]
        if (*entry.shape, entry.dtype) == (len(data), data.dtype) and torch.equal(entry.load(), data):
            return graph.weight(name)
        number += 1
    graph.weights.add_tensor(name, data)
    return graph.weight(name)


def gathered(graph: Graph, sources: Sequence[fx.Node], index: Index) -> fx.Node:
    """gather_features of `sources` at the insertion point of a graph that is past raising."""
    flat, index = flattened(sources, index, table_of(graph))
    return graph.call("gather_features", flat, index_weight(graph, index))
