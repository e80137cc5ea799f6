"""Values put together out of features of others: gather_features, and what several of them one after another are."""

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
"""A value that has features `index` (each once) of another, and where in it they are."""


def flattened(
    sources: Sequence[fx.Node], index: Index, table: Callable[[fx.Node], Index]
) -> tuple[list[fx.Node], Index]:
    """`sources` and `index` of a gather_features without others of them among its sources.

    `table` reads the index of such a node's. Sources that nothing is taken of go; each is there once.
    """
    found: dict[fx.Node, Index] = {}  # a source, and where its features are
    wanted = np.full(len(index), -1)
    start, total = 0, 0
    pieces: list[tuple[fx.Node, Index, Index]] = []
    for source in sources:
        width = source.meta["val"].shape[-1]
        here = np.flatnonzero((index >= start) & (index < start + width))
        pieces += _pieces(source, here, index[here] - start, table)
        start += width
    for source, _, _ in pieces:
        if source not in found:
            found[source] = np.arange(total, total + source.meta["val"].shape[-1])
            total += len(found[source])
    for source, places, features in pieces:
        wanted[places] = found[source][features]
    return list(found), wanted


def _pieces(
    source: fx.Node, places: Index, features: Index, table: Callable[[fx.Node], Index]
) -> list[tuple[fx.Node, Index, Index]]:
    """(source, where they go, which): the features that go to `places`, of sources that gather nothing."""
    if not len(places):
        return []
    if ops.name_of(source.target) != "gather_features":
        return [(source, places, features)]
    inner, found, start = table(source)[features], [], 0
    for each in source.args[0]:  # type: ignore[union-attr]
        width = each.meta["val"].shape[-1]  # type: ignore[union-attr]
        here = (inner >= start) & (inner < start + width)
        found += _pieces(each, places[here], inner[here] - start, table)  # type: ignore[arg-type]
        start += width
    return found


def trimmed(sources: Sequence[fx.Node], index: Index, cut: Cut) -> tuple[list[fx.Node], Index]:
    """The same of sources that have little else than what is taken of them, as `cut` gives them."""
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
    """Reads the index of a gather_features of `graph`."""

    def table(node: fx.Node) -> Index:
        found: Index = graph.evaluate(node.args[1]).numpy()  # type: ignore[arg-type]
        return found

    return table


def index_weight(graph: Graph, index: Index) -> fx.Node:
    """A node that reads `index` out of the graph's store, the same for equal ones."""
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
    """gather_features of `sources`, in a graph behind raising, at its insertion point."""
    found, index = flattened(sources, index, table_of(graph))
    return graph.call("gather_features", found, index_weight(graph, index))
