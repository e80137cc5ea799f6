"""Rotary embeddings, recognized in the terms of a value and in stored tables over the position."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Facts
from qcompile.passes.raising.values import COS, ONE, SIN, TERM, Terms, Value, identity, operator_of

FLOAT32 = 2.0**-23
"""Rounding of the table's angles to float32: entry p is off by about p * freq * FLOAT32."""

Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotary embedding of heads: the features `source` [H, D] of the base, of which the first 2 R are rotated.

    `inv_freq` [R] are the angles per position; the rotated features are multiplied by `scaling`; `interleaved` says
    whether feature 2 i is paired with 2 i + 1, or i with i + R.
    """

    source: NDArray[np.int64]
    inv_freq: Column
    scaling: float
    interleaved: bool


def rotated(
    facts: Facts, build: Builder, node: fx.Node, value: Value, shape: tuple[int, int] | None = None
) -> Value | None:
    """A Value over all of a qcompile::rope [B, T, H, D] if `value` holds rotated heads (of `shape`, if known)."""
    heads, head_dim = shape or (1, 1, *value.sizes)[-2:]
    if value.base is None or heads * head_dim != value.count:
        return None
    terms = value.terms.reshape(len(value.terms), heads, head_dim)
    rotation = rotation_of(terms, facts.longest)
    if rotation is None:
        return None
    plain = Value(value.base, value.dims, values.make_terms((heads, head_dim), rotation.source))
    made = build.emit(plain, (heads, head_dim), node)
    frequencies = build.constant("inv_freq", torch.from_numpy(rotation.inv_freq.astype(np.float32)))
    made = build.call("rope", made, build.positions, frequencies, rotation.scaling, rotation.interleaved)
    return identity(made, value.dims, value.sizes)


def rotation_of(terms: Terms, longest: int) -> Rotation | None:
    """The rotary embedding that `terms` [n, H, D] are, for positions below `longest`; None if they are none."""
    own, other = _by_kind(terms, (ONE, COS)), _by_kind(terms, (SIN,))
    if own is None or other is None or (own["coef"] == 0).any() or (own["index"] < 0).any():
        return None
    moving = own["kind"] == COS
    rotary = int(moving[0].sum())
    if rotary == 0 or rotary % 2 or not moving[:, :rotary].all() or moving[:, rotary:].any():
        return None
    cosines, sines = own["freq"][0, :rotary], other["freq"][0, :rotary]
    if not (cosines == sines).all() and _same_angles(cosines, sines, longest):
        own["freq"] = np.where(moving, other["freq"], own["freq"])
    scaling = float(own["coef"][0, 0])
    if not (own["coef"][:, :rotary] == scaling).all() or not (own["coef"][:, rotary:] == 1).all():
        return None
    for interleaved, sense in itertools.product((False, True), (1.0, -1.0)):
        inv_freq = own["freq"][0, :rotary:2] if interleaved else own["freq"][0, : rotary // 2]
        if _is_rotary(own, other, inv_freq, scaling, interleaved, sense):
            return Rotation(own["index"], sense * inv_freq, scaling, interleaved)
    return None


def _by_kind(terms: Terms, kinds: tuple[int, ...]) -> Terms | None:
    """The single term of each element with a kind in `kinds`, zero if it has none; None if one has two."""
    picked = np.isin(terms["kind"], kinds) & (terms["coef"] != 0)
    if (picked.sum(0) > 1).any():
        return None
    first = np.take_along_axis(terms, picked.argmax(0)[None], 0)[0]
    return np.where(picked.any(0), first, np.zeros((), terms.dtype))


def _is_rotary(own: Terms, other: Terms, inv_freq: Column, scaling: float, interleaved: bool, sense: float) -> bool:
    """Whether feature i is cos * x[i] -+ sin * x[partner of i] as in qcompile::rope; `sense` -1 rotates backwards."""
    half = len(inv_freq)
    place = np.arange(2 * half)
    pair, second = (place // 2, place % 2) if interleaved else (place % half, place // half)
    partner = place + np.where(second == 0, 1, -1) * (1 if interleaved else half)
    sign = np.where(second == 0, -sense, sense)
    freq = inv_freq[pair]
    head = other[:, : 2 * half]
    return bool(
        (own["freq"][:, : 2 * half] == freq).all()
        and (head["freq"] == freq).all()
        and (head["index"] == own["index"][:, partner]).all()
        and (head["coef"] == sign * scaling).all()
        and not other[:, 2 * half :]["coef"].any()
    )


# ---- stored tables -------------------------------------------------------------------------------------


def as_rotary(facts: Facts, build: Builder, value: Value) -> Value | None:
    """A table over the position without base, if every column is proven to be cos or sin of position * freq."""
    if value.base is None or operator_of(value) != "embedding":
        return None
    source = ops.operands(value.base)
    if source.ids is not build.positions:
        return None
    table = source.weight
    columns = facts.once(("columns", str(table.target)), lambda: _prove_columns(build.out.evaluate(table)))
    if columns is None or not value.is_plain():
        return None
    terms = columns[value.terms["index"]]
    terms["coef"] *= value.terms["coef"]
    return replace(value, base=None, terms=terms)


def _same_angles(a: Column, b: Column, longest: int) -> bool:
    """Whether cos(p * a) and cos(p * b) agree in float32 for p < longest; measured frequencies differ slightly."""
    places = np.arange(longest)[:, None]
    error = np.abs(np.cos(places * a.ravel()) - np.cos(places * b.ravel()))
    return bool((error <= 8 * FLOAT32 * (1 + places * b.ravel())).all())


def _prove_columns(table: torch.Tensor) -> Terms | None:
    """One term per column of `table` [P, F], each of which must be cos or sin of p * freq in every row; else None."""
    data = table.double().numpy()
    terms = np.zeros(data.shape[1], TERM)
    terms["index"], terms["coef"] = -1, 1.0
    for place in range(data.shape[1]):
        column = data[:, place]
        is_cos = bool(abs(column[0] - 1) < FLOAT32)
        if len(column) < 3 or not (is_cos or abs(column[0]) < FLOAT32):
            return None
        freq = _frequency(column, is_cos)
        if freq is None:
            return None
        terms[place]["kind"], terms[place]["freq"] = COS if is_cos else SIN, freq
    return terms


def _frequency(column: Column, is_cos: bool) -> float | None:
    """freq with column[p] = cos (or sin) of p * freq for every p; None if there is none up to pi / 2.

    The angle at p determines freq up to full turns, with an error that falls with p. So the angle is read at p = 1, 2,
    4, ..., where the function is not flat, and the previous estimate selects the turn.
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
