"""A model of the latency of steps and rounds on this machine now: estimates relative to a table, and their uncertainty.

The times in a table hold where and when they were measured. Later, cores may or may not share a cache, other programs
may compete for memory bandwidth, or texts may be longer. Some of this changes within seconds, and a single call can be
delayed by more than its own time. The estimates are therefore a mean and a covariance that a Kalman filter
(Kalman 1960) updates after each call: calls are weighted by their noise, a measurement of one gamma also corrects the
others according to their correlation, and the uncertainty of old measurements grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

Matrix = list[list[float]]

_CALL_NOISE, _STEP_NOISE = 0.03**2, 0.05**2
"""Variance of the logarithm of a call's time; what a single step or round adds to it (divided by their number)."""

_COMMON, _SLOPE, _SINGLE = 0.6**2, 0.1**2, 0.025**2
"""Initial variances of rounds: common to all gammas, of a slope over the logarithm of gamma, of single gammas."""

_MAX_VARIANCE = 1.0
"""Limit of the variance of rounds."""

_PLAIN_DRIFT = 1e-4
"""Variance that each token adds to plain steps' time: texts grow, and the load of the machine changes."""

_COMMON_DRIFT, _SLOPE_DRIFT, _SINGLE_DRIFT = 5.5e-5, 4e-6, 1e-7
"""Variances that each token adds to the time of rounds relative to plain steps, one for each of the three parts."""

_DELAY_NOISE = 0.8
"""Standard deviation added for a call that took longer than expected, as a share of the excess: it may be a delay."""

_OUTLIER_SIGMAS = 3.0
"""Standard deviations beyond which a call counts only if the next one agrees, which means that the machine changed."""


class LatencyModel:
    """Logarithms of the time of plain steps, and of rounds relative to plain steps, each minus the table's.

    gammas: those of the table. The state is [plain, rounds of each gamma in ascending order]. It is kept in lists,
    because this code runs between calls of a model that fills the CPU's caches: numpy's code would have to be loaded
    from memory again.
    """

    def __init__(self, gammas: Iterable[int]) -> None:
        logs = {gamma: math.log(gamma) for gamma in sorted(gammas)}
        self._index = {gamma: index + 1 for index, gamma in enumerate(logs)}
        middle = sum(logs.values()) / max(1, len(logs))
        slopes = [value - middle for value in logs.values()]
        self._mean = [0.0] * (len(slopes) + 1)
        self._covariance = _covariance(slopes, 0.0, _COMMON, _SLOPE, _SINGLE)
        self._drift = _covariance(slopes, _PLAIN_DRIFT, _COMMON_DRIFT, _SLOPE_DRIFT, _SINGLE_DRIFT)
        self._change = _covariance(slopes, 1.0, 1.0, 0.0, 0.0)
        self._tokens = 0.0  # since the last call; their drift is not in the covariance yet
        self._begun = False  # whether a plain step was measured: the table's unit of time may be any
        self._outlier = 0  # kind of the last call if it was an outlier; negative if it was faster than expected
        self._delays = [0.0, 0.0, 0.0]  # how much longer than expected the last call took, by kind

    @property
    def plain(self) -> float:
        """Estimate for a plain step."""
        return self._mean[0]

    def rounds(self, gamma: int) -> float:
        """Estimate for a round, relative to plain steps."""
        return self._mean[self._index[gamma]]

    def deviation(self, gamma: int) -> float:
        """Standard deviation of `rounds`."""
        at = self._index[gamma]
        variance = self._covariance[at][at] + self._tokens * self._drift[at][at]
        return math.sqrt(max(0.0, min(variance, _MAX_VARIANCE)))

    def difference_deviation(self, gamma: int, other: int) -> float:
        """Standard deviation of the difference between `rounds` of two gammas."""
        one, two = self._index[gamma], self._index[other]
        known, drift = (m[one][one] + m[two][two] - 2 * m[one][two] for m in (self._covariance, self._drift))
        return math.sqrt(max(0.0, known + self._tokens * drift))

    def advance(self, tokens: float) -> None:
        """Note that a request has advanced by `tokens` tokens, which adds drift."""
        self._tokens += tokens

    def observe_steps(self, seen: float, steps: int) -> None:
        """Note a call of plain steps; seen: logarithm of a step's time over the table's."""
        if not self._begun:
            self._begun, self._mean[0] = True, seen
            first, *others = self._covariance
            first[:] = [_CALL_NOISE + _STEP_NOISE / steps, *(0.0 for _ in others)]
            for row in others:  # what rounds may have told of plain steps counts no more
                row[0] = 0.0
            return
        self._update(seen, 0, steps, 1)

    def observe_rounds(self, gamma: int, seen: float, rounds: int) -> None:
        """Note a call of rounds; seen: logarithm of a round's time over the table's."""
        self._update(seen, self._index[gamma], rounds, 2)

    def _update(self, seen: float, at: int, calls: int, kind: int) -> None:
        """Kalman update with a call of kind 1 (steps) or 2 (rounds).

        `seen` measures state 0, for rounds plus state `at`; `calls` is the number of steps or rounds.
        """
        drifted = self._take_drift()
        residual = seen - self._mean[0] - (self._mean[at] if at else 0.0)
        noise, delay = _CALL_NOISE + _STEP_NOISE / calls, max(0.0, residual)
        noise += (_DELAY_NOISE * max(0.0, delay - self._delays[kind])) ** 2
        self._delays[kind] = delay
        cross, variance = self._observation(at, drifted)
        if abs(residual) > _OUTLIER_SIGMAS * math.sqrt(variance + noise):
            self._covariance, drifted = _sum(self._covariance, drifted, self._drift), 0.0
            outlier = kind if residual > 0 else -kind
            if self._outlier != outlier:
                self._outlier = outlier
                return
            self._covariance = _sum(self._covariance, residual * residual / 2, self._change)
            cross, variance = self._observation(at, 0.0)
        self._outlier = 0
        gains = [share / (variance + noise) for share in cross]
        self._mean = [mean + gain * residual for mean, gain in zip(self._mean, gains, strict=True)]
        self._covariance = [
            [known + drifted * drift - gain * share for known, drift, share in zip(*rows, cross, strict=True)]
            for gain, *rows in zip(gains, self._covariance, self._drift, strict=True)
        ]

    def _observation(self, at: int, drifted: float) -> tuple[list[float], float]:
        """Covariances of the state with the measured quantity, and that quantity's variance, after `drifted` tokens."""
        known, drift = self._covariance, self._drift
        cross = [a + drifted * b for a, b in zip(known[0], drift[0], strict=True)]
        if at:
            cross = [a + b + drifted * c for a, b, c in zip(cross, known[at], drift[at], strict=True)]
        return cross, cross[0] + (cross[at] if at else 0.0)

    def _take_drift(self) -> float:
        """Number of tokens to add the drift of to the covariance.

        None once the variance of rounds has reached its limit; then only plain steps' variance grows, here.
        """
        passed, self._tokens = self._tokens, 0.0
        if self._covariance[-1][-1] < _MAX_VARIANCE:
            return passed
        self._covariance[0][0] += passed * _PLAIN_DRIFT
        return 0.0


def _sum(matrix: Matrix, times: float, other: Matrix) -> Matrix:
    """matrix + times * other."""
    return [[a + times * b for a, b in zip(*rows, strict=True)] for rows in zip(matrix, other, strict=True)]


def _covariance(slopes: list[float], plain: float, common: float, slope: float, single: float) -> Matrix:
    """A covariance matrix in which plain steps and rounds are independent."""
    rounds = [
        [0.0, *(common + slope * a * b + (single if row == column else 0.0) for column, b in enumerate(slopes))]
        for row, a in enumerate(slopes)
    ]
    return [[plain, *(0.0 for _ in slopes)], *rounds]
