"""Tables of terms of the meanings of tensors: none is made for sizes that hold the numbers of batch and tokens."""

from __future__ import annotations

import pytest

from qcompile.passes.raising import values
from qcompile.passes.raising.facts import LENGTHS
from qcompile.passes.raising.values import MOST_FEATURES, Value, make_terms

PAIRS = 2 * LENGTHS["B"] * LENGTHS["T"]


def table(*sizes: int) -> Value:
    return Value(None, ("F",) * len(sizes), make_terms(sizes, coef=2.0))


@pytest.mark.parametrize("source", [Value(None, ("",), make_terms(())), table(1)])
def test_expansions_are_bounded(source: Value) -> None:
    made = values.expand(source, [6], LENGTHS)
    assert made is not None and made.sizes == (6,)
    assert values.expand(source, [PAIRS], LENGTHS) is None


@pytest.mark.parametrize("inner", [False, True])
def test_repetitions_are_bounded(inner: bool) -> None:
    made = values.repeat(table(3), 0, 2, inner)
    assert made is not None and made.sizes == (6,)
    assert values.repeat(table(3), 0, PAIRS, inner) is None


def test_broadcasts_are_bounded() -> None:
    half = int(MOST_FEATURES**0.5)
    tall, wide = table(2 * half, 1), table(1, half)
    assert values.multiply(table(6, 1), table(1, 5)) is not None
    assert values.add(tall, wide) is None and values.multiply(tall, wide) is None
