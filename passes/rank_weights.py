"""Gives a rank its part of the weights of divided regions, and makes operators state the sizes of its part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.divisible import ELEMENTWISE, PRODUCTS, is_gated, product_of, shape, slices_of
from qcompile.passes.regions import Region

Places = NDArray[np.int64]
Run = tuple[int, int]


class RankRewriter:
    """Rewrites the operators of divided regions into those of rank `rank`. Shapes are to be inferred afterwards."""

    def __init__(self, graph: Graph, ranks: int, rank: int) -> None:
        self.graph, self.ranks, self.rank = graph, ranks, rank
        self._outputs: dict[fx.Node, Run] = {}  # of products, or of the slices through which they are read

    def divide(self, region: Region) -> None:
        """Rewrite the operators of `region`, but for the outputs of its producers, which `finish` divides."""
        for value in region.shares:
            places = region.places(value, self.rank)
            if product_of(value) is not None:
                self._outputs[value] = places
            else:
                self._take_vectors(region, value, places)
                self._resize(value, places)
            for consumer in region.consumers:
                if ops.operand(consumer, "x") is value:
                    self._take_inputs(consumer, places)

    def finish(self) -> None:
        """Divide the outputs of the producers of all regions."""
        for product in self.graph.calls(*PRODUCTS):
            slices = slices_of(product)
            if product in self._outputs:
                self.take_outputs(product, np.arange(*self._outputs[product]))
            elif any(part in self._outputs for part in slices):
                self._take_slices(product, slices)

    # ---- operators between products ---------------------------------------------------------------

    def _resize(self, node: fx.Node, places: Run) -> None:
        kind, size = ops.name_of(node.target), places[1] - places[0]
        if kind == "split_heads":
            ops.set_operands(node, heads=size)
        elif kind == "quantize_activation" and ops.operand(node, "group") == shape(node)[-1]:
            ops.set_operands(node, group=size)  # one sum for the whole row

    def _take_vectors(self, region: Region, node: fx.Node, places: Run) -> None:
        """Give `node` its rank's part of operands that are weights with an entry for each feature or head."""
        kind = ops.name_of(node.target)
        if kind == "attention":
            key: fx.Node = ops.operand(node, "k")
            keys = region.places(key, self.rank) if key in region.shares else (0, shape(key)[-2])
            self._take(node, "sinks", places, 0)
            self._take(node, "key_bias", places, 0)
            self._take(node, "center", _times(keys, shape(key)[-1]), 0)
        elif kind in (*ops.NORMS, "rotate_heads"):
            heads, size = shape(node)[-2:]
            for name in ("weight", "bias", "center"):
                given = ops.operand(node, name) if ops.has_operand(node, name) else None
                if given is not None and shape(given)[0] == heads * size and heads > 1:
                    self._take(node, name, _times(places, size), 0)
        elif kind in ELEMENTWISE:
            axis = region.axes[node]
            for name, given in ops.named(node).items():
                if not isinstance(given, fx.Node) or name == "curve" or not self.graph.is_weight(given):
                    continue
                sizes = shape(given)
                if len(sizes) >= -axis and sizes[axis] == shape(node)[axis] > 1:
                    self._take(node, name, places, len(sizes) + axis)

    def _take(self, node: fx.Node, name: str, places: Run, axis: int) -> None:
        """Replace operand `name` of `node`, a weight, by its `places` along `axis`."""
        weight = ops.operand(node, name)
        if weight is not None and places != (0, shape(weight)[axis]):
            ops.set_operands(node, **{name: self.graph.call_weight("take_spans", weight, list(places), axis)})

    # ---- products ---------------------------------------------------------------------------------

    def _take_inputs(self, product: fx.Node, places: Run) -> None:
        """Let `product` read the inputs `places` only. Its bias is added once: on rank 0."""
        given = ops.operands(product)
        inputs = shape(given.x)[-1]
        self._take_weight(product, list(places), 1)
        if given.bias is not None and self.rank:
            ops.set_operands(product, bias=self.graph.call_weight("scale", given.bias, 0.0))
        if ops.has_operand(product, "group") and given.group == inputs:
            ops.set_operands(product, group=places[1] - places[0])

    def _take_slices(self, product: fx.Node, slices: list[fx.Node]) -> None:
        """Take the outputs of `product` that its slices read, one after the other."""
        made: dict[tuple[Run, Run], Run] = {}
        parts, end = [], 0
        for part in sorted(slices, key=lambda n: (ops.operand(n, "start"), ops.operand(n, "stop"))):
            start, stop = ops.operand(part, "start"), ops.operand(part, "stop")
            own = first, last = self._outputs.get(part, (0, stop - start))
            known = (start, stop), own
            if known not in made:
                parts.append(np.arange(start + first, start + last))
                made[known] = end, end + last - first
                end += last - first
            ops.set_operands(part, start=made[known][0], stop=made[known][1])
        self.take_outputs(product, np.concatenate(parts))

    def take_outputs(self, product: fx.Node, outputs: Places) -> None:
        """Let `product` compute `outputs` only."""
        rows = _gated_rows(outputs) if is_gated(product) else outputs
        kind, bias = ops.name_of(product.target), ops.operand(product, "bias")
        if kind == "expert_gemm":
            experts, stored = ops.operand(product, "experts"), shape(ops.operand(product, "weight"))[0]
            short = -len(rows) % ops.GATE_BLOCK
            rows = np.concatenate((rows, np.repeat(rows[-1:], short)))  # outputs that nothing reads
            rows = (rows + np.arange(experts)[:, None] * (stored // experts)).ravel()
        spans = _spans(rows)
        self._take_weight(product, spans, 0)
        if bias is not None:
            axis = int(kind in ("expert_linear", "gated_experts"))
            ops.set_operands(product, bias=self.graph.call_weight("take_spans", bias, spans, axis))
        if ops.has_operand(product, "width"):
            ops.set_operands(product, width=len(outputs))

    def _take_weight(self, product: fx.Node, spans: list[int], axis: int) -> None:
        """Replace the weight of `product` by `spans` of its outputs (`axis` 0) or inputs (1)."""
        weight, kind = ops.operand(product, "weight"), ops.name_of(product.target)
        if ops.name_of(weight.target) == "upper_nibble":  # of a part: so a draft reads the model's codes
            nested = ops.operand(weight, "weight")
            taken = self.graph.call_weight("take_parts", nested, ops.operand(nested, "format"), spans, axis)
            taken = self.graph.call_weight("upper_nibble", taken)
        elif ops.has_operand(product, "format"):
            taken = self.graph.call_weight("take_parts", weight, ops.operand(product, "format"), spans, axis)
        else:
            first = int(kind in ("expert_linear", "gated_experts"))
            taken = self.graph.call_weight("take_spans", weight, spans, first + axis)
        ops.set_operands(product, weight=taken)


def _times(places: Run, size: int) -> Run:
    return places[0] * size, places[1] * size


def _gated_rows(outputs: Places) -> Places:
    """Rows of a weight that interleaves gate and up in blocks: of its `outputs`, padded with others to whole blocks."""
    block = ops.GATE_BLOCK
    blocks = np.concatenate((outputs, np.repeat(outputs[-1:], -len(outputs) % block))).reshape(-1, block)
    gate = blocks // block * (2 * block) + blocks % block
    return np.stack((gate, gate + block), 1).ravel()


def _spans(places: Places) -> list[int]:
    """`places` as runs [start, stop, start, stop, ...]."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    runs = np.split(places, cuts)
    return [int(place) for run in runs for place in (run[0], run[-1] + 1)]
