"""Mixes of formats: each is the best of its size, and a limit of bits holds."""

from __future__ import annotations

from itertools import product

import pytest

from qcompile.errors import UsageError
from qcompile.passes.sensitivity.mixes import bits_of_mix, growing, size_of, within
from qcompile.passes.sensitivity.units import FormatPair, GemmUnit

SMALL, MIDDLE, LARGE = (FormatPair(name, "int8") for name in ("w4_asym_g128", "w4_asym_g32", "w8_sym_channel"))
FIRST, SECOND, THIRD = (
    GemmUnit(f"gemm{number}", number, ("down",), (f"w{number}",), n, 128) for number, n in enumerate((64, 128, 256))
)
LOSSES = {
    **{(FIRST, SMALL): 1.0, (FIRST, MIDDLE): 0.9, (FIRST, LARGE): 0.1},  # the middle one is above the hull
    **{(SECOND, SMALL): 0.5, (SECOND, MIDDLE): 0.2, (SECOND, LARGE): 0.19},
    **{(THIRD, SMALL): 0.3, (THIRD, MIDDLE): 0.31, (THIRD, LARGE): 0.01},  # larger and worse
}
PAIRS = (SMALL, MIDDLE, LARGE)


def loss(mix: dict[GemmUnit, FormatPair]) -> float:
    return sum(LOSSES[key] for key in mix.items())


def test_each_mix_on_the_way_is_the_best_of_its_size() -> None:
    every = [dict(zip((FIRST, SECOND, THIRD), pairs, strict=True)) for pairs in product(PAIRS, repeat=3)]
    way = growing(LOSSES)
    assert way[0] == dict.fromkeys((FIRST, SECOND, THIRD), SMALL) and way[-1] == dict.fromkeys(way[0], LARGE)
    assert len(way) == 5 and {FIRST: MIDDLE}.items() not in [mix.items() for mix in way]
    for mix in way:
        assert loss(mix) == pytest.approx(min(loss(one) for one in every if size_of(one) <= size_of(mix)))


def test_a_limit_of_bits_is_kept_and_used() -> None:
    for bits in (4.5, 5.0, 6.0, 9.0):
        mix = within(LOSSES, bits)
        assert bits_of_mix(mix) <= bits
    assert within(LOSSES, 9.0) == growing(LOSSES)[-1]
    assert within(LOSSES, 5.0)[FIRST] == LARGE and within(LOSSES, 5.0)[THIRD] == SMALL
    with pytest.raises(UsageError, match=r"4 bits: the smallest of these formats take 4\.\d+ bits per weight"):
        within(LOSSES, 4.0)
