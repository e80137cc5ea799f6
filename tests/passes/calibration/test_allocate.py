"""Allocation of bits: blocks are bought by salience over time, whole, and within what was asked for."""

from __future__ import annotations

import pytest
import torch

from qcompile.errors import QualityError
from qcompile.passes.calibration import allocate
from qcompile.passes.calibration.trial import fewest
from qcompile.roofline import Peaks

MEMORY = Peaks(25e9, {"int8": 400e9})


def test_blocks_hold_the_most_salient_features_together() -> None:
    score = torch.randperm(40, generator=torch.Generator().manual_seed(0)).double()
    blocks = allocate.ranked([score], [64], MEMORY)
    assert [len(block.rows) for block in blocks] == [16, 16, 8]
    assert sorted(torch.cat([block.rows for block in blocks]).tolist()) == list(range(40))
    assert float(score[blocks[0].rows].min()) > float(score[blocks[1].rows].max())
    assert [block.bits for block in blocks] == [4 * 64 * 16, 4 * 64 * 16, 4 * 64 * 8]


def test_a_feature_that_costs_twice_must_matter_twice() -> None:
    one = torch.ones(16)
    for factor, first in ((1.9, 0), (2.1, 1)):
        blocks = allocate.ranked([one, factor * one], [128, 256], MEMORY)
        assert blocks[0].linear == first
    assert blocks[0].us == pytest.approx(2 * blocks[1].us)


def test_what_a_kernel_costs_anyhow_does_not_count() -> None:
    slow_start = Peaks(25e9, {"int8": 400e9}, 100.0)
    assert allocate.ranked([torch.ones(16)], [64], slow_start)[0].us == pytest.approx(64 * 8 / 25e9 * 1e6)


def test_eight_bits_are_nearly_free_where_computing_takes_the_time() -> None:
    computing = Peaks(1e15, {"int8": 1e9})
    block = allocate.ranked([torch.ones(16)], [128], computing)[0]
    assert block.us == pytest.approx(0.01 * 2 * 128 * 16 / 1e9 * 1e6)


@pytest.mark.parametrize("bits", [4.0, 4.4, 6.0, 8.0])
def test_bits_stay_within_what_was_asked(bits: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes, inputs = [48, 40, 320], [96, 200, 64]
    scores = [torch.rand(n, generator=generator) for n in sizes]
    blocks = allocate.ranked(scores, inputs, MEMORY)
    weights = sum(n * k for n, k in zip(sizes, inputs, strict=True))
    count = allocate.within_bits(blocks, weights, bits)
    wide = allocate.marks(blocks[:count], sizes)
    used = 4 + 4 * sum(int(mark.sum()) * k for mark, k in zip(wide, inputs, strict=True)) / weights
    largest = max(block.bits for block in blocks) / weights
    assert bits - largest < used <= bits + 1e-9
    assert all(mark.shape == (n,) for mark, n in zip(wide, sizes, strict=True))


def test_the_fewest_blocks_that_keep_the_limit_are_found_by_few_trials() -> None:
    tried = []

    def increase(count: int) -> float:
        tried.append(count)
        return 0.2 - 0.019 * count**0.5

    count, result = fewest(100, 0.1, increase)
    assert increase(count) == result <= 0.1
    assert 28 <= count <= 33 and len(tried) <= 9  # 27.7 would do
    assert fewest(100, 0.3, increase) == (0, 0.2)
    with pytest.raises(QualityError, match=r"cannot be kept: 8 bits wherever they may be raise perplexity by 0\.0100"):
        fewest(100, 0.001, increase)
