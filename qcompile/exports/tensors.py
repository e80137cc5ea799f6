"""The tensors of a checkpoint, put together from the rows of an artifact's packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.artifact.packed_weights import PackedWeights
from qcompile.exports.origins import TensorRows
from qcompile.formats.registry import STORED_FORMATS
from qcompile.formats.rounding import Parts
from qcompile.formats.weight import Per, WeightFormat


class Tensors:
    """The tensors of a checkpoint by name: where their rows are (`rows`), and their shapes.

    `neutral` are those that the artifact does not hold, and the number that all their elements have.
    """

    def __init__(
        self,
        weights: PackedWeights,
        rows: Mapping[str, list[TensorRows]],
        shapes: Mapping[str, tuple[int, ...]],
        neutral: Mapping[str, float],
    ) -> None:
        self.rows, self.shapes, self.neutral = rows, shapes, neutral
        self._weights = weights
        self._last: tuple[fx.Node, Parts | Tensor] | None = None

    @property
    def changed(self) -> bool:
        """Whether passes have changed values, other than by rounding them."""
        return bool(self.neutral) or any(part.changed for rows in self.rows.values() for part in rows)

    def formats(self, name: str) -> set[WeightFormat]:
        """The formats in which rows of the tensor are rounded; none if all of them are floating-point numbers."""
        formats_of_parts = (format_of(part.node) for part in self.rows[name])
        return {format for format in formats_of_parts if format is not None and not format.is_float}

    def activations(self, name: str) -> set[str]:
        """What the activations are rounded to that the tensor is multiplied with."""
        users = (user for part in self.rows[name] for user in part.node.users)
        return {user.meta["precision"]["activation"] for user in users if "precision" in user.meta}

    def parts(self, name: str) -> dict[str, Tensor]:
        """The parts, by role, of a tensor that is rounded in one format."""
        (format,) = self.formats(name)
        tensors: dict[str, Tensor] = {}
        for piece in self.rows[name]:
            for part, value in zip(format.parts, self._value(piece.node), strict=True):
                if part.per is Per.TENSOR:
                    tensors[part.role] = value.clone()  # a file's tensors share no memory
                    continue
                rows = value[piece.rows]
                shape = (self.shapes[name][0], *rows.shape[1:])
                tensors.setdefault(part.role, rows.new_zeros(shape))[piece.places] = rows
        return tensors

    def floats(self, name: str) -> Tensor:
        """The numbers that a tensor stands for, in float32."""
        shape = self.shapes[name]
        flat = torch.empty((prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape)
        for piece in self.rows[name]:
            flat[piece.places] = self._numbers(piece, shape)[piece.rows] - piece.added
        return flat.view(shape)

    def _numbers(self, piece: TensorRows, shape: tuple[int, ...]) -> Tensor:
        value, format = self._value(piece.node), format_of(piece.node)
        if isinstance(value, Tensor):
            return value.float()
        assert format is not None
        return format.dequantize(value, shape[-1])

    def _value(self, node: fx.Node) -> Parts | Tensor:
        """The value of a packed weight. The last one is kept: joined weights are asked for several times in a row."""
        if self._last is None or self._last[0] is not node:
            self._last = node, self._weights.value(node)
        return self._last[1]


def format_of(node: fx.Node) -> WeightFormat | None:
    """The format of a packed weight; None for vectors and tables."""
    if ops.name_of(node.target) == "quantize_mixed":  # the packing is noted at its operand
        node = ops.operand(node, "w")
    return STORED_FORMATS.get(node.meta["packed"]["kind"]) if "packed" in node.meta else None
