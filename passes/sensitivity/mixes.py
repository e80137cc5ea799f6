"""Mixes: a format for each unit, such that losses add up to little for the bytes of all weights.

Losses of units are taken as independent, so the loss of a mix is the sum of theirs. From the smallest format of each
unit, mixes grow by the change of one unit that saves the most loss for a byte (the lower convex hull of each unit's
formats): each mix on the way has the least loss of all mixes that are as small, up to one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qcompile.errors import UsageError
from qcompile.passes.sensitivity.units import FormatPair, GemmUnit

Mix = dict[GemmUnit, FormatPair]
Losses = Mapping[tuple[GemmUnit, FormatPair], float]
"""A loss of each unit in each format that it may have."""


@dataclass(frozen=True)
class _Growth:
    """A unit's change to a larger format: the loss that it saves, and the bytes that it takes."""

    unit: GemmUnit
    pair: FormatPair
    saved: float
    bytes: int


def size_of(mix: Mix) -> int:
    """Bytes of all weights."""
    return sum(unit.bytes(pair) for unit, pair in mix.items())


def bits_of_mix(mix: Mix) -> float:
    """Bits per weight, with scales and zero points."""
    return 8 * size_of(mix) / sum(unit.weights for unit in mix)


def bits_for(losses: Losses, size: int) -> float:
    """The bits per weight of a mix of `size` bytes."""
    return 8 * size / sum(unit.weights for unit in dict.fromkeys(unit for unit, _ in losses))


def growing(losses: Losses) -> list[Mix]:
    """The mixes from the smallest to the one with the least loss, each larger by one step than the one before."""
    mix, steps = _start(losses)
    mixes = [dict(mix)]
    for step in steps:
        mix[step.unit] = step.pair
        mixes.append(dict(mix))
    return mixes


def within(losses: Losses, bits: float) -> Mix:
    """The mix of at most `bits` bits per weight. Raises UsageError if the smallest one has more."""
    mix, steps = _start(losses)
    most = bits * sum(unit.weights for unit in mix) / 8
    size = size_of(mix)
    if size > most:
        raise UsageError(f"{bits:g} bits: the smallest of these formats take {bits_of_mix(mix):.3f} bits per weight")
    full: set[GemmUnit] = set()
    for step in steps:
        if step.unit in full:
            continue
        if size + step.bytes > most:
            full.add(step.unit)  # what follows for it takes more
            continue
        mix[step.unit], size = step.pair, size + step.bytes
    return mix


def _start(losses: Losses) -> tuple[Mix, list[_Growth]]:
    """The smallest mix, and the steps from it in order of the loss that they save for a byte."""
    mix: Mix = {}
    steps: list[_Growth] = []
    for unit in dict.fromkeys(unit for unit, _ in losses):
        hull = _hull(unit, [pair for other, pair in losses if other == unit], losses)
        mix[unit] = hull[0]
        for small, large in pairwise(hull):
            saved = losses[unit, small] - losses[unit, large]
            steps.append(_Growth(unit, large, saved, unit.bytes(large) - unit.bytes(small)))
    steps.sort(key=lambda step: -step.saved / step.bytes)  # stable: steps of a unit stay in their order
    return mix, steps


def _hull(unit: GemmUnit, pairs: Sequence[FormatPair], losses: Losses) -> list[FormatPair]:
    """The formats on the lower convex hull of loss over bytes, from the smallest to that with the least loss."""
    hull: list[FormatPair] = []
    for pair in sorted(pairs, key=lambda pair: (unit.bytes(pair), losses[unit, pair])):
        if hull and losses[unit, pair] >= losses[unit, hull[-1]]:
            continue
        while len(hull) > 1 and _slope(unit, hull[-1], pair, losses) <= _slope(unit, hull[-2], hull[-1], losses):
            hull.pop()
        hull.append(pair)
    return hull


def _slope(unit: GemmUnit, small: FormatPair, large: FormatPair, losses: Losses) -> float:
    """The change of loss for a byte, which is negative."""
    return (losses[unit, large] - losses[unit, small]) / (unit.bytes(large) - unit.bytes(small))
