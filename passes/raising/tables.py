"""Tables over the position, stored or precomputed: learned embeddings, and tables proven to be rotary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.nodes import operator_name, rounds
from qcompile.passes.raising.raiser import LENGTHS, Raiser, Weight, features
from qcompile.passes.raising.values import TERM, Value, identity

FLOAT32 = 2.0**-23
"""Rounding of the table's angles to float32: entry p is off by about p * freq * FLOAT32."""

Column = NDArray[np.float64]


def rows_of(r: Raiser, node: fx.Node, source: fx.Node, dim: int) -> Value | None:
    """`node`: rows 0 .. tokens - 1 of the weight `source` along `dim`. It must have one other dimension."""
    shape = [int(size) for size in source.meta["val"].shape]
    wide = [d for d in range(len(shape)) if d != dim and shape[d] > 1]
    if r.shape(node)[dim] != LENGTHS["T"] or len(wide) != 1:
        return None
    require_rows(r, source, shape[dim])
    made = r.call("embedding", r.positions, r.matrix(source, dim, wide[0]))
    return identity(
        made, tuple("T" if d == dim else "F" if d in wide else "" for d in range(len(shape))), features(made)
    )


def gathered(r: Raiser, node: fx.Node, source: fx.Node, index: fx.Node) -> Value | None:
    """`node` [B, T, D]: rows of a weight [P, D] (repeated over the batch) at the position."""
    while operator_name(source) in ("repeat", "expand", "to", "unsqueeze") and not rounds(source):
        source = source.args[0]  # type: ignore[assignment]
    place = r.known.get(index)
    shape = [int(size) for size in source.meta["val"].shape if size != 1] if r.is_static(source.meta["val"]) else []
    if not isinstance(r.known.get(source), Weight) or len(shape) != 2 or not isinstance(place, Value):
        return None
    moving = place.base is None and len(place.terms) == 1 and (place.terms["kind"] == values.POSITION).all()
    if not moving or (place.terms["coef"] != 1).any() or r.shape(node) != [LENGTHS["B"], LENGTHS["T"], shape[1]]:
        return None
    require_rows(r, source, shape[0])
    rows, columns = (d for d, size in enumerate(source.meta["val"].shape) if size != 1)
    made = r.call("embedding", r.positions, r.matrix(source, rows, columns))
    return identity(made, ("B", "T", "F"), (shape[1],))


def require_rows(r: Raiser, table: fx.Node, rows: int) -> None:
    """Raise unless a table over the position has a row for every position of the model's context."""
    longest = r.source.info.max_position
    if rows < longest:
        raise r.unsupported(table, f"has fewer rows than the {longest} positions the model is said to hold")


def as_rotary(r: Raiser, value: Value) -> Value | None:
    """The value of a table over the position if every column is proven to be cos or sin of position * freq."""
    base = value.base
    if base is None or ops.name_of(base.target) != "embedding" or base.args[0] is not r.positions:
        return None
    columns = r.proven_columns(base)
    if columns is None or not value.is_plain():
        return None
    found = columns[value.terms["index"]]
    found["coef"] *= value.terms["coef"]
    return replace(value, base=None, terms=found)


def same_turning(a: Column, b: Column, longest: int) -> bool:
    """Whether cos(p * a) and cos(p * b) agree in float32 for p < longest; measured frequencies differ slightly."""
    places = np.arange(longest)[:, None]
    error = np.abs(np.cos(places * a.ravel()) - np.cos(places * b.ravel()))
    return bool((error <= 8 * FLOAT32 * (1 + places * b.ravel())).all())


def prove_columns(table: torch.Tensor) -> NDArray[np.void] | None:
    """One term per column of `table` [P, F], each of which must be cos or sin of p * freq in every row; else None."""
    data = table.double().numpy()
    found = np.zeros(data.shape[1], TERM)
    found["index"], found["coef"] = -1, 1.0
    for place in range(data.shape[1]):
        column = data[:, place]
        is_cos = bool(abs(column[0] - 1) < FLOAT32)
        if len(column) < 3 or not (is_cos or abs(column[0]) < FLOAT32):
            return None
        freq = _frequency(column, is_cos)
        if freq is None:
            return None
        found[place]["kind"], found[place]["freq"] = values.COS if is_cos else values.SIN, freq
    return found


def _frequency(column: Column, is_cos: bool) -> float | None:
    """freq with column[p] = cos (or sin) of p * freq for every p; None if there is none up to pi / 2.

    The angle at p determines freq up to full turns, with an error that falls with p. So it is read at p = 1, 2, 4, ...,
    where the function is not flat, and the previous estimate selects the turn.
    """
    inverse = np.arccos if is_cos else np.arcsin
    freq, best = float(inverse(np.clip(column[1], -1, 1))), 0.0
    for power in range(1, len(column).bit_length()):
        place = min(2**power, len(column) - 1)
        angle = float(inverse(np.clip(column[place], -1, 1)))
        flat = abs(np.sin(angle) if is_cos else np.cos(angle))
        if flat * place < best or (flat < 0.05 and place < len(column) - 1):
            continue
        options = (angle, -angle) if is_cos else (angle, np.pi - angle)
        turns = 2 * np.pi * np.round((freq * place - np.array(options)) / (2 * np.pi)) + np.array(options)
        freq = float(turns[np.abs(turns - freq * place).argmin()]) / place
        best = flat * place
    places = np.arange(len(column))
    error = np.abs((np.cos if is_cos else np.sin)(places * freq) - column)
    return freq if (error <= 4 * FLOAT32 * (1 + places * freq)).all() else None
