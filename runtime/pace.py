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

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_NOISE, _SHORT = 0.04**2, 0.05**2
"""Variance of the logarithm of a call's time; what is added where the call is a single step or round."""

_UNKNOWN = 4.0
"""Variance of how long plain steps take before the first."""

_TOGETHER, _TILTED, _ALONE = 0.6**2, 0.15**2, 0.04**2
"""Variances of what a table may be wrong by: of all rounds alike, by the logarithm of gamma, and by each gamma."""

_DRIFT = 1e-4
"""What a token adds to the variance of plain steps' time: texts differ in length, machines in what else they do."""

_RATIO_DRIFT, _TILT_DRIFT, _ALONE_DRIFT = 4e-5, 4e-6, 1e-7
"""Likewise to the three variances of rounds, counted in plain steps."""

_HELD_UP = 0.8
"""Noise of a call that took longer than expected, as a part of that: it may have been held up."""

_OUTLIER = 3.0
"""Standard deviations from which on a call counts only if the next one agrees: then all has changed."""


class Pace:
    """Logarithms of what plain steps take, and rounds in plain steps' time, less those of the table.

    gammas: those of the table. State: [plain, rounds of each gamma, smallest first].
    """

    def __init__(self, gammas: Iterable[int]) -> None:
        ordered = sorted(gammas)
        self._at = {gamma: index + 1 for index, gamma in enumerate(ordered)}
        count = len(ordered)
        logs = np.log(np.array(ordered, dtype=np.float64))
        tilt = logs - logs.mean() if count else logs
        alike, tilted, own = np.ones((count, count)), np.outer(tilt, tilt), np.eye(count)
        self._mean: Array = np.zeros(count + 1)
        self._covariance = _joined(_UNKNOWN, _TOGETHER * alike + _TILTED * tilted + _ALONE * own)
        self._drift = _joined(_DRIFT, _RATIO_DRIFT * alike + _TILT_DRIFT * tilted + _ALONE_DRIFT * own)
        self._changed = _joined(1.0, alike)
        self._most = 2 * self._covariance.diagonal()[1:]
        self._doubted = 0
        self._slower = [0.0, 0.0, 0.0]

    @property
    def plain(self) -> float:
        """Of a plain step."""
        return float(self._mean[0])

    def rounds(self, gamma: int) -> float:
        """Of a round, in plain steps."""
        return float(self._mean[self._at[gamma]])

    def doubt(self, gamma: int) -> float:
        """Standard deviation of `rounds`."""
        at = self._at[gamma]
        return math.sqrt(max(0.0, self._covariance[at, at]))

    def apart(self, gamma: int, other: int) -> float:
        """Standard deviation of the difference of `rounds` of two gammas."""
        one, two = self._at[gamma], self._at[other]
        covariance = self._covariance
        return math.sqrt(max(0.0, covariance[one, one] + covariance[two, two] - 2 * covariance[one, two]))

    def passed(self, tokens: float) -> None:
        """So many tokens of a request have come."""
        variances = self._covariance.diagonal()
        if (variances[1:] < self._most).all():
            self._covariance = self._covariance + tokens * self._drift
        else:
            self._covariance[0, 0] += tokens * _DRIFT

    def stepped(self, seen: float, steps: int) -> None:
        """A call of plain steps; seen: logarithm of one's time over the table's."""
        self._see(seen, [0], steps, 1)

    def rounded(self, gamma: int, seen: float, rounds: int) -> None:
        """Likewise a call of rounds."""
        self._see(seen, [0, self._at[gamma]], rounds, 2)

    def _see(self, seen: float, places: list[int], calls: int, kind: int) -> None:
        """`seen`, with noise, is the sum of the state at `places`."""
        wrong = seen - float(self._mean[places].sum())
        noise = _NOISE + _SHORT / calls
        slower = max(0.0, wrong)
        noise += (_HELD_UP * max(0.0, slower - self._slower[kind])) ** 2
        self._slower[kind] = slower
        shared = self._covariance[places].sum(axis=0)
        spread = float(shared[places].sum()) + noise
        if abs(wrong) > _OUTLIER * math.sqrt(spread):
            doubted = kind if wrong > 0 else -kind
            if self._doubted != doubted:
                self._doubted = doubted
                return
            self._covariance = self._covariance + wrong * wrong / 2 * self._changed
            shared = self._covariance[places].sum(axis=0)
            spread = float(shared[places].sum()) + noise
        self._doubted = 0
        self._mean = self._mean + shared * (wrong / spread)
        self._covariance = self._covariance - np.outer(shared, shared) / spread


def _joined(plain: float, rounds: Array) -> Array:
    """A covariance in which plain steps and rounds have nothing to do with each other."""
    whole: Array = np.zeros((len(rounds) + 1, len(rounds) + 1))
    whole[0, 0], whole[1:, 1:] = plain, rounds
    return whole
