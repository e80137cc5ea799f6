"""Regions of a graph that ranks divide among them, and the share of each rank.

A region begins at products (linears and experts) that read whole values: each rank computes some of their outputs. It
ends at products of which each rank reads some inputs: the sum of what they return over all ranks is the whole result.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import networkx as nx
from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.divisible import FEATURES, HEADS, Divisible, Obstacle, analyse, product_of, shape


@dataclass(frozen=True)
class RankShare:
    """The share of a value that a rank has: from `start` to `stop`, of 1."""

    start: Fraction
    stop: Fraction

    def of(self, size: int) -> tuple[int, int]:
        """The places of `size` that the share covers; both are whole numbers where a region was checked."""
        return int(self.start * size), int(self.stop * size)


@dataclass
class Region:
    """Values that ranks divide, along their `axes`.

    `shares` has the number of shares of each, which is less than `ranks` for keys and values that several ranks have
    alike. `producers` compute the values, `consumers` read them and give sums over ranks.
    """

    ranks: int
    shares: dict[fx.Node, int]
    axes: dict[fx.Node, int]
    producers: list[fx.Node]
    consumers: list[fx.Node]

    def share(self, value: fx.Node, rank: int) -> RankShare:
        """What rank `rank` has of `value`."""
        count = self.shares[value]
        part = rank * count // self.ranks
        return RankShare(Fraction(part, count), Fraction(part + 1, count))

    def places(self, value: fx.Node, rank: int) -> tuple[int, int]:
        """The first place along the axis of `value` that `rank` has, and the one after its last."""
        return self.share(value, rank).of(shape(value)[self.axes[value]])


@dataclass(frozen=True)
class Regions:
    """The regions that can be divided, and the products in none with what keeps their outputs and inputs whole."""

    divided: list[Region]
    whole: dict[fx.Node, list[Obstacle]]


class _Chooser:
    """Chooses regions from the last to the first, because a product ends one region or begins another, not both."""

    def __init__(self, graph: Graph, ranks: int, pass_name: str) -> None:
        self.graph, self.ranks, self.pass_name = graph, ranks, pass_name
        self.order = {node: index for index, node in enumerate(graph.fx.nodes)}
        self.divisible: Divisible = analyse(graph)
        self.producers: set[fx.Node] = set()
        self.consumers: set[fx.Node] = set()
        self.whole: dict[fx.Node, list[Obstacle]] = {}

    def choose(self) -> Regions:
        """All regions in the order of the graph. Raises PassError where sizes do not divide."""
        together = nx.compose(self.divisible.ties, self.divisible.meetings)
        candidates = sorted(nx.connected_components(together), key=lambda c: -max(map(self.order.__getitem__, c)))
        divided = []
        for values in candidates:
            region = self._region(sorted(values, key=self.order.__getitem__))
            if region is not None:
                divided.append(region)
                self.producers.update(region.producers)
                self.consumers.update(region.consumers)
        products = self.producers | self.consumers
        ordered = sorted(self.whole.items(), key=lambda item: self.order[item[0]])
        return Regions(divided[::-1], {node: why for node, why in ordered if node not in products})

    def _region(self, values: list[fx.Node]) -> Region | None:
        """The region of tied `values`; None, with an obstacle for each of its products, if it cannot be divided."""
        pairs = [(product_of(value), value) for value in values]
        producers = list(dict.fromkeys(product for product, _ in pairs if product is not None))
        consumers = [node for value in values for node in self.divisible.readers.get(value, [])]
        obstacle = self._obstacle(values, producers, consumers)
        if obstacle is None and consumers:
            shares = self._shares(values)
            axes = {value: self.divisible.axes.get(value, FEATURES) for value in values}
            self._check(values, shares, axes)
            obstacle = self._summed_twice(values, shares)
            if obstacle is None:
                return Region(self.ranks, shares, axes, producers, consumers)
        if obstacle is None and producers:
            obstacle = Obstacle(values[-1], "no product sums over its features")
        if obstacle is not None:
            for product in (*producers, *consumers):
                known = self.whole.setdefault(product, [])
                known += [obstacle] * (obstacle not in known)
        return None

    def _obstacle(self, values: list[fx.Node], producers: list[fx.Node], consumers: list[fx.Node]) -> Obstacle | None:
        for value in values:
            if value in self.divisible.fixed:
                return self.divisible.fixed[value]
        for node in producers:
            if node in self.consumers or node in consumers:
                return Obstacle(node, "it sums over the ranks' inputs already")
        for node in consumers:
            if node in self.producers:
                return Obstacle(node, "ranks divide its outputs, so it reads whole inputs")
        return None

    def _shares(self, values: list[fx.Node]) -> dict[fx.Node, int]:
        """The number of shares of each value: the ranks, or the heads of keys and values if there are fewer."""
        shares = dict.fromkeys(values, self.ranks)
        inside = set(values)
        for tied in nx.connected_components(self.divisible.ties.subgraph(inside)):
            heads = {self.divisible.heads[value] for value in tied if value in self.divisible.heads}
            queries = any(ops.name_of(value.target) == "attention" for value in tied)
            if heads and not queries and max(heads) < self.ranks and self.ranks % max(heads) == 0:
                shares |= dict.fromkeys(tied, max(heads))
        return shares

    def _check(self, values: list[fx.Node], shares: dict[fx.Node, int], axes: dict[fx.Node, int]) -> None:
        """Raise PassError if a share would begin within a head, a group or another unit."""
        for value in sorted(values, key=axes.__getitem__):  # heads first: their number says most
            size, unit = shape(value)[axes[value]], self.divisible.units.get(value)
            if axes[value] == HEADS and size % shares[value]:
                raise PassError(self.pass_name, value.name, f"its {size} heads do not divide over {self.ranks} ranks")
            if size % (shares[value] * (unit.size if unit else 1)) == 0:
                continue
            node, what = (unit.node, f"{unit.noun}s of {unit.size}") if unit else (value, "features")
            side = "outputs" if product_of(value) is node else "inputs"
            reason = f"its {size} {side} in {what}" if unit else f"its {size} features"
            raise PassError(self.pass_name, node.name, f"{reason} do not divide over {self.ranks} ranks")

    def _summed_twice(self, values: list[fx.Node], shares: dict[fx.Node, int]) -> Obstacle | None:
        """A product that would sum over values that several ranks have alike."""
        for value in values:
            for reader in self.divisible.readers.get(value, []):
                if shares[value] < self.ranks:
                    return Obstacle(reader, "it sums over heads that several ranks have")
        return None


def regions(graph: Graph, ranks: int, pass_name: str) -> Regions:
    """The regions of `graph` that `ranks` ranks divide. Raises PassError, of `pass_name`, where sizes do not divide."""
    return _Chooser(graph, ranks, pass_name).choose()
