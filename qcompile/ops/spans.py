"""Operators that take a rank's part of a weight: runs of rows or columns of it.

`spans` lists first and last places in turn, [start, stop, start, stop, ...]; the last ones are excluded. Runs may
overlap, and are joined in their order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError
from qcompile.formats.registry import weight_format
from qcompile.formats.weight import Part, Per, WeightFormat
from qcompile.ops.registry import define


def pairs(spans: list[int]) -> Iterator[tuple[int, int]]:
    """The (start, stop) pairs of `spans`."""
    return zip(spans[::2], spans[1::2], strict=True)


def _fake_taken(w: Tensor, spans: list[int], axis: int) -> Tensor:
    shape = list(w.shape)
    shape[axis] = sum(stop - start for start, stop in pairs(spans))
    return w.new_empty(shape)


@define(_fake_taken)
def take_spans(w: Tensor, spans: list[int], axis: int) -> Tensor:
    """The runs `spans` of a weight or bias along `axis`."""
    return _taken(w, spans, axis)


def _taken(w: Tensor, spans: list[int], axis: int) -> Tensor:
    return torch.cat([w.narrow(axis, start, stop - start) for start, stop in pairs(spans)], axis)


def _part_spans(part: Part, kind: WeightFormat, spans: list[int], axis: int) -> list[int] | None:
    """`spans` along `axis` of a weight [N, K] (0: rows) in entries of `part`; None if the part has no such axis."""
    group, together = kind.group, kind.rows_together
    if axis == 0 and part.per is Per.WEIGHT and together > 1:
        if uneven := [place for place in spans if place % together]:
            reason = f"codes of {together} outputs are stored together, and no such sequence begins at {uneven[0]}"
            raise UnsupportedError(f"weights in {kind.name} cannot be divided here: {reason}")
        return [place // together for place in spans]
    if part.per is Per.TENSOR or (axis == 1 and part.per is Per.ROW):
        return None
    if axis == 1 and part.per is Per.GROUP:
        if not group:
            return None  # one group is the whole row
        return [place for start, stop in pairs(spans) for place in (start // group, -(-stop // group))]
    return spans


def _fake_parts(weight: list[Tensor], format: str, spans: list[int], axis: int) -> list[Tensor]:
    kind = weight_format(format)
    places = [_part_spans(part, kind, spans, axis) for part in kind.parts]
    pieces = zip(weight, places, strict=True)
    return [torch.empty_like(w) if own is None else _fake_taken(w, own, axis) for w, own in pieces]


@define(_fake_parts, since="quantize")
def take_parts(weight: list[Tensor], format: str, spans: list[int], axis: int) -> list[Tensor]:
    """The runs `spans` of rows (`axis` 0) or columns (1) of the quantized weight [N, K] that `weight` has the parts of.

    Columns are cut between groups. Scales and codes stay those of the whole weight, however it is divided.
    """
    kind = weight_format(format)
    places = [_part_spans(part, kind, spans, axis) for part in kind.parts]
    pieces = zip(weight, places, strict=True)
    return [w.clone() if own is None else _taken(w, own, axis) for w, own in pieces]
