"""What is known of how long steps and rounds take: found from noisy calls, in spite of those held up, and forgotten."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompile.runtime.speculation import latency as module
from qcompile.runtime.speculation.latency import LatencyModel

GAMMAS = range(1, 9)
wrongs = st.floats(-1.0, 1.0)


def steps(model: LatencyModel, plain: float, draw: random.Random, calls: int = 1) -> None:
    for _ in range(calls):
        model.observe_steps(plain + draw.gauss(0, 0.03), 20)
        model.advance(20)


def rounds(model: LatencyModel, gamma: int, seen: float, draw: random.Random, calls: int = 1) -> None:
    for _ in range(calls):
        model.observe_rounds(gamma, seen + draw.gauss(0, 0.03), 5)
        model.advance(20)


@settings(max_examples=50, deadline=None, derandomize=True)  # of random noise some goes beyond what is asked here
@given(wrongs, wrongs, st.sampled_from(GAMMAS), st.integers(0, 1 << 16))
def test_what_a_table_is_wrong_by_is_found_for_all_gammas(plain: float, ratio: float, gamma: int, seed: int) -> None:
    model, draw = LatencyModel(GAMMAS), random.Random(seed)
    for _ in range(6):
        steps(model, plain, draw)
        rounds(model, gamma, plain + ratio, draw, 2)
    assert model.plain == pytest.approx(plain, abs=0.1)  # three standard deviations of a call
    assert model.rounds(gamma) == pytest.approx(ratio, abs=0.12) and model.deviation(gamma) < 0.08
    for other in GAMMAS:  # as far as the table is wrong by the same for all: 0.15 a unit of log gamma is not known
        assert abs(model.rounds(other) - model.rounds(gamma)) < 0.6 * abs(ratio) * abs(math.log(other / gamma)) + 0.1
        assert model.difference_deviation(other, gamma) <= 0.15 * abs(math.log(other / gamma)) + 0.06


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.floats(-3, 3), st.integers(1, 30)), max_size=60))
def test_nothing_that_is_seen_makes_a_variance_negative(calls: list[tuple[int, float, int]]) -> None:
    model = LatencyModel(GAMMAS)
    for gamma, seen, count in calls:
        if gamma:
            model.observe_rounds(gamma, seen, count)
        else:
            model.observe_steps(seen, count)
        model.advance(count)
    eigenvalues = np.linalg.eigvalsh(model._covariance)
    assert eigenvalues.min() > -1e-9 * max(1.0, eigenvalues.max())
    assert all(math.isfinite(model.rounds(gamma)) for gamma in GAMMAS)


def known() -> tuple[LatencyModel, random.Random]:
    model, draw = LatencyModel(GAMMAS), random.Random(5)
    for _ in range(10):
        steps(model, 0.0, draw)
        rounds(model, 4, 0.0, draw, 3)
    return model, draw


@pytest.mark.parametrize("seen", [0.2, 0.7, 2.0])
def test_a_call_that_is_held_up_tells_little(seen: float) -> None:
    for gamma in (0, 4):
        model, draw = known()
        before = model.rounds(4)
        if gamma:
            rounds(model, gamma, seen, draw)
        else:
            steps(model, seen, draw)
        assert abs(model.rounds(4) - before) < 0.08
        assert abs(model.plain) < 0.15


@pytest.mark.parametrize("seen", [-0.7, 0.7])
def test_a_change_is_doubted_once_and_then_followed(seen: float) -> None:
    model, draw = known()
    rounds(model, 4, seen, draw, 3)
    assert model.deviation(4) > 0.15  # steps or rounds, who knows
    steps(model, 0.0, draw, 3)
    rounds(model, 4, seen, draw, 3)
    assert model.rounds(4) == pytest.approx(seen, abs=0.15) and model.plain == pytest.approx(0.0, abs=0.1)


def test_what_is_not_done_is_forgotten_up_to_a_limit() -> None:
    model, draw = known()
    steps(model, 0.0, draw)
    doubts = [model.deviation(4)]
    for _ in range(4):
        steps(model, 0.0, draw, 100)
        doubts.append(model.deviation(4))
    assert doubts == sorted(doubts) and doubts[1] > 2 * doubts[0]
    for _ in range(10):
        steps(model, 1.0, draw, 200)
    assert model.deviation(4) <= 1.0 and model.plain == pytest.approx(1.0, abs=0.1)


def test_a_table_without_rounds_has_plain_steps() -> None:
    model, draw = LatencyModel([]), random.Random(1)
    steps(model, 0.5, draw, 20)
    assert model.plain == pytest.approx(0.5, abs=0.05)


def spread_of(plain: float, alike: float, tilted: float, alone: float) -> np.ndarray:
    """Covariance of plain steps and rounds, of what they have in common and what each has of its own."""
    tilt = np.log(np.array(GAMMAS)) - np.log(np.array(GAMMAS)).mean()
    whole = np.zeros((9, 9))
    whole[0, 0] = plain
    whole[1:, 1:] = alike + tilted * np.outer(tilt, tilt) + alone * np.eye(8)
    return whole


@pytest.mark.parametrize("seed", range(4))
def test_calls_are_weighed_as_a_kalman_filter_does(seed: int) -> None:
    """Against the textbook's: drift with each token, noise by the number of steps, and by how much later it came than
    the last call of its kind did."""
    model, draw = LatencyModel(GAMMAS), np.random.default_rng(seed)
    mean, later = np.zeros(9), {True: 0.0, False: 0.0}
    model.observe_steps(0.0, 4)  # taken as it is: the unit of the table's times may be any
    known = spread_of(module._CALL_NOISE + module._STEP_NOISE / 4, module._COMMON, module._SLOPE, module._SINGLE)
    drift = spread_of(module._PLAIN_DRIFT, module._COMMON_DRIFT, module._SLOPE_DRIFT, module._SINGLE_DRIFT)
    for _ in range(40):
        gamma, calls, tokens = int(draw.integers(0, 9)), int(draw.integers(1, 30)), int(draw.integers(1, 200))
        sees = np.zeros(9)
        sees[[0, gamma]] = 1
        seen = float(sees @ mean + draw.normal(0, 0.03))
        model.advance(tokens)
        (model.observe_rounds(gamma, seen, calls) if gamma else model.observe_steps(seen, calls))
        known = known + tokens * drift
        wrong = seen - sees @ mean
        noise = module._CALL_NOISE + module._STEP_NOISE / calls
        noise += (module._DELAY_NOISE * max(0.0, max(0.0, wrong) - later[gamma > 0])) ** 2
        later[gamma > 0] = max(0.0, wrong)
        gain = known @ sees / (sees @ known @ sees + noise)
        mean, known = mean + gain * wrong, known - np.outer(gain, known @ sees)
        model.advance(50)  # what has passed since counts, too
        known = known + 50 * drift
        assert [model.plain, *map(model.rounds, GAMMAS)] == pytest.approx(mean.tolist(), abs=1e-9)
        assert [model.deviation(g) for g in GAMMAS] == pytest.approx(np.sqrt(known.diagonal()[1:]).tolist())
        apart = known[3, 3] + known[7, 7] - 2 * known[3, 7]
        assert model.difference_deviation(3, 7) == pytest.approx(math.sqrt(apart), abs=1e-9)


@pytest.mark.parametrize(
    ("calls", "believed"),
    [
        ([(4, -1.0)], False),
        ([(4, -1.0), (4, -1.0)], True),
        ([(0, -1.0), (0, -1.0)], True),
        ([(4, -1.0), (0, -1.0)], False),  # of another kind
        ([(4, -1.0), (4, 0.0), (4, -1.0)], False),
        ([(4, 1.0), (4, 1.0)], False),  # the first was held up, as far as is known
        ([(4, 1.0), (4, 1.0), (4, 1.0)], True),
        ([(4, 1.0), (4, 1.0), (4, -1.0)], False),
    ],
)
def test_what_cannot_be_is_believed_when_it_comes_twice(calls: list[tuple[int, float]], believed: bool) -> None:
    model, _ = known()
    for gamma, seen in calls:
        (model.observe_rounds(gamma, seen, 5) if gamma else model.observe_steps(seen, 5))
    moved = abs(model.plain + (model.rounds(4) if gamma else 0.0))
    assert moved > 0.5 if believed else moved < 0.1


def test_rounds_are_not_forgotten_without_end_but_plain_steps_are() -> None:
    model, _ = known()
    model.advance(1e6)
    assert model.deviation(4) == 1.0
    model.observe_steps(0.0, 20)
    apart = model.difference_deviation(1, 8)
    model.advance(1e5)
    model.observe_steps(0.0, 20)
    assert model.difference_deviation(1, 8) == pytest.approx(apart)
    model.advance(1e5)
    model.observe_steps(0.5, 20)  # no surprise after so long
    assert model.plain == pytest.approx(0.5, abs=1e-2)
