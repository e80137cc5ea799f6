"""What is known of how long steps and rounds take: found from noisy calls, in spite of those held up, and forgotten."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompile.runtime.speculation import pace as module
from qcompile.runtime.speculation.pace import Pace

GAMMAS = range(1, 9)
wrongs = st.floats(-1.0, 1.0)


def steps(pace: Pace, plain: float, draw: random.Random, calls: int = 1) -> None:
    for _ in range(calls):
        pace.stepped(plain + draw.gauss(0, 0.03), 20)
        pace.passed(20)


def rounds(pace: Pace, gamma: int, seen: float, draw: random.Random, calls: int = 1) -> None:
    for _ in range(calls):
        pace.rounded(gamma, seen + draw.gauss(0, 0.03), 5)
        pace.passed(20)


@settings(max_examples=50, deadline=None, derandomize=True)  # of random noise some goes beyond what is asked here
@given(wrongs, wrongs, st.sampled_from(GAMMAS), st.integers(0, 1 << 16))
def test_what_a_table_is_wrong_by_is_found_for_all_gammas(plain: float, ratio: float, gamma: int, seed: int) -> None:
    pace, draw = Pace(GAMMAS), random.Random(seed)
    for _ in range(6):
        steps(pace, plain, draw)
        rounds(pace, gamma, plain + ratio, draw, 2)
    assert pace.plain == pytest.approx(plain, abs=0.1)  # three standard deviations of a call
    assert pace.rounds(gamma) == pytest.approx(ratio, abs=0.12) and pace.doubt(gamma) < 0.08
    for other in GAMMAS:  # as far as the table is wrong by the same for all: 0.15 a unit of log gamma is not known
        assert abs(pace.rounds(other) - pace.rounds(gamma)) < 0.6 * abs(ratio) * abs(math.log(other / gamma)) + 0.1
        assert pace.apart(other, gamma) <= 0.15 * abs(math.log(other / gamma)) + 0.06


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.floats(-3, 3), st.integers(1, 30)), max_size=60))
def test_nothing_that_is_seen_makes_a_variance_negative(calls: list[tuple[int, float, int]]) -> None:
    pace = Pace(GAMMAS)
    for gamma, seen, count in calls:
        if gamma:
            pace.rounded(gamma, seen, count)
        else:
            pace.stepped(seen, count)
        pace.passed(count)
    eigenvalues = np.linalg.eigvalsh(pace._covariance)
    assert eigenvalues.min() > -1e-9 * max(1.0, eigenvalues.max())
    assert all(math.isfinite(pace.rounds(gamma)) for gamma in GAMMAS)


def known() -> tuple[Pace, random.Random]:
    pace, draw = Pace(GAMMAS), random.Random(5)
    for _ in range(10):
        steps(pace, 0.0, draw)
        rounds(pace, 4, 0.0, draw, 3)
    return pace, draw


@pytest.mark.parametrize("seen", [0.2, 0.7, 2.0])
def test_a_call_that_is_held_up_tells_little(seen: float) -> None:
    for gamma in (0, 4):
        pace, draw = known()
        before = pace.rounds(4)
        if gamma:
            rounds(pace, gamma, seen, draw)
        else:
            steps(pace, seen, draw)
        assert abs(pace.rounds(4) - before) < 0.08
        assert abs(pace.plain) < 0.15


@pytest.mark.parametrize("seen", [-0.7, 0.7])
def test_a_change_is_doubted_once_and_then_followed(seen: float) -> None:
    pace, draw = known()
    rounds(pace, 4, seen, draw, 3)
    assert pace.doubt(4) > 0.15  # steps or rounds, who knows
    steps(pace, 0.0, draw, 3)
    rounds(pace, 4, seen, draw, 3)
    assert pace.rounds(4) == pytest.approx(seen, abs=0.15) and pace.plain == pytest.approx(0.0, abs=0.1)


def test_what_is_not_done_is_forgotten_up_to_a_limit() -> None:
    pace, draw = known()
    steps(pace, 0.0, draw)
    doubts = [pace.doubt(4)]
    for _ in range(4):
        steps(pace, 0.0, draw, 100)
        doubts.append(pace.doubt(4))
    assert doubts == sorted(doubts) and doubts[1] > 2 * doubts[0]
    for _ in range(10):
        steps(pace, 1.0, draw, 200)
    assert pace.doubt(4) <= 1.0 and pace.plain == pytest.approx(1.0, abs=0.1)


def test_a_table_without_rounds_has_plain_steps() -> None:
    pace, draw = Pace([]), random.Random(1)
    steps(pace, 0.5, draw, 20)
    assert pace.plain == pytest.approx(0.5, abs=0.05)


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
    pace, draw = Pace(GAMMAS), np.random.default_rng(seed)
    mean, later = np.zeros(9), {True: 0.0, False: 0.0}
    known = spread_of(module._INITIAL_PLAIN, module._COMMON, module._SLOPE, module._SINGLE)
    drift = spread_of(module._PLAIN_DRIFT, module._COMMON_DRIFT, module._SLOPE_DRIFT, module._SINGLE_DRIFT)
    for _ in range(40):
        gamma, calls, tokens = int(draw.integers(0, 9)), int(draw.integers(1, 30)), int(draw.integers(1, 200))
        sees = np.zeros(9)
        sees[[0, gamma]] = 1
        seen = float(sees @ mean + draw.normal(0, 0.03))
        pace.passed(tokens)
        (pace.rounded(gamma, seen, calls) if gamma else pace.stepped(seen, calls))
        known = known + tokens * drift
        wrong = seen - sees @ mean
        noise = module._CALL_NOISE + module._STEP_NOISE / calls
        noise += (module._DELAY_NOISE * max(0.0, max(0.0, wrong) - later[gamma > 0])) ** 2
        later[gamma > 0] = max(0.0, wrong)
        gain = known @ sees / (sees @ known @ sees + noise)
        mean, known = mean + gain * wrong, known - np.outer(gain, known @ sees)
        pace.passed(50)  # what has passed since counts, too
        known = known + 50 * drift
        assert [pace.plain, *map(pace.rounds, GAMMAS)] == pytest.approx(mean.tolist(), abs=1e-9)
        assert [pace.doubt(g) for g in GAMMAS] == pytest.approx(np.sqrt(known.diagonal()[1:]).tolist())
        apart = known[3, 3] + known[7, 7] - 2 * known[3, 7]
        assert pace.apart(3, 7) == pytest.approx(math.sqrt(apart), abs=1e-9)


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
    pace, _ = known()
    for gamma, seen in calls:
        (pace.rounded(gamma, seen, 5) if gamma else pace.stepped(seen, 5))
    moved = abs(pace.plain + (pace.rounds(4) if gamma else 0.0))
    assert moved > 0.5 if believed else moved < 0.1


def test_rounds_are_not_forgotten_without_end_but_plain_steps_are() -> None:
    pace, _ = known()
    pace.passed(1e6)
    assert pace.doubt(4) == 1.0
    pace.stepped(0.0, 20)
    apart = pace.apart(1, 8)
    pace.passed(1e5)
    pace.stepped(0.0, 20)
    assert pace.apart(1, 8) == pytest.approx(apart)
    pace.passed(1e5)
    pace.stepped(0.5, 20)  # no surprise after so long
    assert pace.plain == pytest.approx(0.5, abs=1e-2)
