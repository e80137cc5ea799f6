"""Which weights of a checkpoint an artifact keeps to the bit, where the checkpoint stores them in few bits.

Also how much rounding changes tables of embeddings. It is measured when a weight is packed: the numbers that its parts
represent are compared with those that the reader gave. Passes join weights before they are rounded, so rows are traced
to the tensors they come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import weight_format
from qcompile.formats.rounding import Parts
from qcompile.formats.weight import Per, WeightFormat
from qcompile.graph import Graph

PLACING = ("concat_rows", "slice_rows", "interleave_rows", "interleave_experts", "expert_rows", "zero_bias")
"""Operators on weights with results that hold rows of their operands, or zeros."""
ROUNDING = ("quantize_weight", "quantize_mixed")
BAND = 1024
"""Rows that are compared at once: no second tensor of the weight's size."""


@dataclass
class _Tally:
    """The rows of one tensor so far. `moved` and `size` are sums of squares of their changes and of their numbers."""

    rows: int = 0
    kept: int = 0
    moved: float = 0.0
    size: float = 0.0
    changed: bool = False

    @property
    def error(self) -> float:
        return math.sqrt(self.moved / self.size) if self.size else 0.0


@dataclass
class Fidelity:
    """What becomes of the weights of linears that a checkpoint stores in few bits, and of tables, by their tensors."""

    _tensors: dict[str, _Tally] = field(default_factory=dict)
    _tables: dict[str, _Tally] = field(default_factory=dict)

    @staticmethod
    def rounding(graph: Graph, node: fx.Node) -> fx.Node | None:
        """The node that rounds the packed weight `node`, if it is a table or its numbers are stored in few bits."""
        if _is_table(node):
            return node
        while ops.name_of(node.target) not in ROUNDING:
            if not ops.has_operand(node, "weight"):
                return None
            node = ops.operand(node, "weight")
        few_bits = any(graph.weights.entries[name].few_bits for name in _tensors_of(ops.operand(node, "w")))
        return node if few_bits else None

    def compare(self, graph: Graph, rounding: fx.Node, w: Tensor, parts: Parts) -> None:
        """Count the rows of `w` [N, K], which the node `rounding` has rounded to `parts`."""
        source: fx.Node = ops.operand(rounding, "w")
        names = _tensors_of(source)
        owner, changed = _owners(source, names)
        same, moved, size = _differences(_format(rounding), parts, w)
        if _is_table(rounding):
            self._tables[rounding.name] = _Tally(len(same), int(same.sum()), float(moved.sum()), float(size.sum()))
        for number, name in enumerate(names, start=1):
            if graph.weights.entries[name].few_bits and bool((mine := owner == number).any()):
                tensor = self._tensors.setdefault(name, _Tally())
                tensor.rows += int(mine.sum())
                tensor.kept += int(same[mine].sum())
                tensor.moved += float(moved[mine].sum())
                tensor.size += float(size[mine].sum())
                tensor.changed |= number in changed

    @property
    def table_error(self) -> float | None:
        """The norm of what rounding changes of tables, divided by that of their numbers; None if none is rounded."""
        if not self._tables:
            return None
        return _Tally(*(sum(getattr(each, part) for each in self._tables.values()) for part in _SUMS)).error

    def facts(self) -> Mapping[str, Any] | None:
        """For the manifest; None if the checkpoint stores no linear in few bits.

        `weights` is the number of tensors, `kept` that of tensors with the same numbers as stored. `changed` counts
        tensors that a pass has changed: the function is kept, the numbers are not. Of the tensors that are not kept,
        `rows_kept` is the share of rows that are the same, and `error` the norm of the change divided by that of the
        numbers; `worst` is the largest error of one tensor.
        """
        if not self._tensors:
            return None
        rounded = {name: each for name, each in self._tensors.items() if each.changed or each.kept < each.rows}
        worst = max(rounded, key=lambda name: rounded[name].error, default="")
        total = _Tally(*(sum(getattr(each, part) for each in rounded.values()) for part in _SUMS))
        return {
            "weights": len(self._tensors),
            "kept": len(self._tensors) - len(rounded),
            "changed": sum(each.changed for each in rounded.values()),
            "rows_kept": total.kept / total.rows if total.rows else 1.0,
            "error": total.error,
            "worst": {worst: rounded[worst].error} if worst else {},
        }


_SUMS = ("rows", "kept", "moved", "size")


def _is_table(node: fx.Node) -> bool:
    """Whether embeddings are rows of the rounded weight `node`."""
    return any(ops.name_of(user.target) == "dequantize" for user in node.users)


def _tensors_of(node: fx.Node) -> list[str]:
    """Names of the stored weights that give an expression its rows: by its first operands, or by all that it joins."""
    if node.op == "get_attr":
        return [str(node.target)]
    sources = node.all_input_nodes
    if ops.name_of(node.target) not in PLACING:
        sources = sources[:1]  # of other operators the rest are factors, signs or orders
    return list(dict.fromkeys(name for source in sources for name in _tensors_of(source)))


def _owners(node: fx.Node, names: list[str]) -> tuple[Tensor, set[int]]:
    """For each row [N] of a weight expression the number of its tensor, from 1 on, 0 for rows of zeros.

    Also the numbers of the tensors that an operator changes.
    """
    changed: set[int] = set()

    def rows(source: fx.Node) -> Tensor:
        """The numbers of the rows [..., 1]."""
        if ops.name_of(source.target) in PLACING:
            placed: Tensor = ops.reference(ops.name_of(source.target) or "")(*fx.node.map_arg(source.args, rows))
            return placed
        shape = (*source.meta["val"].shape[:-1], 1)
        if source.op == "get_attr":
            return torch.full(shape, names.index(str(source.target)) + 1)
        changed.update(names.index(name) + 1 for name in _tensors_of(source))
        inner = rows(source.all_input_nodes[0])
        return inner if inner.shape == shape else torch.full(shape, int(inner.flatten()[0]))

    return rows(node).flatten(), changed


def _format(rounding: fx.Node) -> WeightFormat:
    mixed = ops.name_of(rounding.target) == "quantize_mixed"
    return MIX_4_8 if mixed else weight_format(ops.operand(rounding, "format"))


def _differences(format: WeightFormat, parts: Parts, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of w [N, K]: whether `parts` represent the same numbers, the squared change, and its square; [N]."""
    bands = []
    for start in range(0, len(w), BAND):
        band = slice(start, start + BAND)
        pairs = zip(format.parts, parts, strict=True)
        numbers = format.dequantize(
            [part if kind.per is Per.TENSOR else part[band] for kind, part in pairs], w.shape[1]
        )
        change = (numbers - w[band]).double()
        bands.append((change.eq(0).all(1), change.square().sum(1), w[band].double().square().sum(1)))
    same, moved, size = (torch.cat(column) for column in zip(*bands, strict=True))
    return same, moved, size
