"""How long steps and rounds take here and now, against what a table says, and how far that is known.

What a table says holds where and when it was measured. Elsewhere cores share a cache or do not, other programs want
the memory, the text is longer; some of this changes within seconds, and single calls are held up for longer than they
take. So what is known is a mean and a covariance, followed call by call as a Kalman filter does (Kalman 1960): calls
that agree count as much as their noise allows, what was learned of one gamma is learned of the others as far as they
go together, and what was learned long ago is known less well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

Matrix = list[list[float]]

_NOISE, _SHORT = 0.03**2, 0.05**2
"""Variance of the logarithm of a call's time; what is added where the call is a single step or round."""

_UNKNOWN = 4.0
"""Variance of how long plain steps take before the first."""

_TOGETHER, _TILTED, _ALONE = 0.6**2, 0.1**2, 0.025**2
"""Variances of what a table may be wrong by: of all rounds alike, by the logarithm of gamma, and by each gamma."""

_MOST = 1.0
"""The most that the variance of rounds becomes."""

_DRIFT = 1e-4
"""What a token adds to the variance of plain steps' time: texts differ in length, machines in what else they do."""

_RATIO_DRIFT, _TILT_DRIFT, _ALONE_DRIFT = 5.5e-5, 4e-6, 1e-7
"""Likewise to the three variances of rounds, counted in plain steps."""

_HELD_UP = 0.8
"""Noise of a call that took longer than expected, as a part of that: it may have been held up."""

_OUTLIER = 3.0
"""Standard deviations from which on a call counts only if the next one agrees: then all has changed."""


class Pace:
    """Logarithms of what plain steps take, and rounds in plain steps' time, less those of the table.

    gammas: those of the table. State: [plain, rounds of each gamma, smallest first]. Lists, because this runs between
    two calls of a model that leaves nothing in the caches: what arrays' functions are made of would have to come back.
    """

    def __init__(self, gammas: Iterable[int]) -> None:
        logs = {gamma: math.log(gamma) for gamma in sorted(gammas)}
        self._at = {gamma: index + 1 for index, gamma in enumerate(logs)}
        middle = sum(logs.values()) / max(1, len(logs))
        tilts = [value - middle for value in logs.values()]
        self._mean = [0.0] * (len(tilts) + 1)
        self._covariance = _covariance(tilts, _UNKNOWN, _TOGETHER, _TILTED, _ALONE)
        self._drift = _covariance(tilts, _DRIFT, _RATIO_DRIFT, _TILT_DRIFT, _ALONE_DRIFT)
        self._changed = _covariance(tilts, 1.0, 1.0, 0.0, 0.0)
        self._passed = 0.0
        self._doubted = 0
        self._slower = [0.0, 0.0, 0.0]

    @property
    def plain(self) -> float:
        """Of a plain step."""
        return self._mean[0]

    def rounds(self, gamma: int) -> float:
        """Of a round, in plain steps."""
        return self._mean[self._at[gamma]]

    def doubt(self, gamma: int) -> float:
        """Standard deviation of `rounds`."""
        at = self._at[gamma]
        variance = self._covariance[at][at] + self._passed * self._drift[at][at]
        return math.sqrt(max(0.0, min(variance, _MOST)))

    def apart(self, gamma: int, other: int) -> float:
        """Standard deviation of the difference of `rounds` of two gammas."""
        one, two = self._at[gamma], self._at[other]
        known, drift = (m[one][one] + m[two][two] - 2 * m[one][two] for m in (self._covariance, self._drift))
        return math.sqrt(max(0.0, known + self._passed * drift))

    def passed(self, tokens: float) -> None:
        """So many tokens of a request have come."""
        self._passed += tokens

    def stepped(self, seen: float, steps: int) -> None:
        """A call of plain steps; seen: logarithm of one's time over the table's."""
        self._see(seen, 0, steps, 1)

    def rounded(self, gamma: int, seen: float, rounds: int) -> None:
        """Likewise a call of rounds."""
        self._see(seen, self._at[gamma], rounds, 2)

    def _see(self, seen: float, at: int, calls: int, kind: int) -> None:
        """`seen`, with noise, is what plain steps take, and of rounds what those at `at` take beside it."""
        drifted = self._drifted()
        wrong = seen - self._mean[0] - (self._mean[at] if at else 0.0)
        noise, slower = _NOISE + _SHORT / calls, max(0.0, wrong)
        noise += (_HELD_UP * max(0.0, slower - self._slower[kind])) ** 2
        self._slower[kind] = slower
        shared, spread = self._shared(at, drifted)
        if abs(wrong) > _OUTLIER * math.sqrt(spread + noise):
            self._covariance, drifted = _sum(self._covariance, drifted, self._drift), 0.0
            doubted = kind if wrong > 0 else -kind
            if self._doubted != doubted:
                self._doubted = doubted
                return
            self._covariance = _sum(self._covariance, wrong * wrong / 2, self._changed)
            shared, spread = self._shared(at, 0.0)
        self._doubted = 0
        gains = [share / (spread + noise) for share in shared]
        self._mean = [mean + gain * wrong for mean, gain in zip(self._mean, gains, strict=True)]
        self._covariance = [
            [known + drifted * drift - gain * share for known, drift, share in zip(*rows, shared, strict=True)]
            for gain, *rows in zip(gains, self._covariance, self._drift, strict=True)
        ]

    def _shared(self, at: int, drifted: float) -> tuple[list[float], float]:
        """Covariances of the state with what is seen, and the variance of that, after so many tokens of drift."""
        known, drift = self._covariance, self._drift
        shared = [a + drifted * b for a, b in zip(known[0], drift[0], strict=True)]
        if at:
            shared = [a + b + drifted * c for a, b, c in zip(shared, known[at], drift[at], strict=True)]
        return shared, shared[0] + (shared[at] if at else 0.0)

    def _drifted(self) -> float:
        """How many tokens' drift is to be added: none where it is at its limit, but to plain steps."""
        passed, self._passed = self._passed, 0.0
        if self._covariance[-1][-1] < _MOST:
            return passed
        self._covariance[0][0] += passed * _DRIFT
        return 0.0


def _sum(matrix: Matrix, times: float, other: Matrix) -> Matrix:
    """matrix + times * other."""
    return [[a + times * b for a, b in zip(*rows, strict=True)] for rows in zip(matrix, other, strict=True)]


def _covariance(tilts: list[float], plain: float, alike: float, tilted: float, alone: float) -> Matrix:
    """A covariance in which plain steps and rounds have nothing to do with each other."""
    rounds = [
        [0.0, *(alike + tilted * a * b + (alone if row == column else 0.0) for column, b in enumerate(tilts))]
        for row, a in enumerate(tilts)
    ]
    return [[plain, *(0.0 for _ in tilts)], *rounds]
