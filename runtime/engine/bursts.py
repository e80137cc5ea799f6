"""How many steps one call of the executor runs: enough to hide the host's work between calls, few enough to stream."""

from __future__ import annotations

BURST_SECONDS, _MOST_BURST_SECONDS = 16e-3, 48e-3
"""Target time of a call, and what it may become for the sake of _IDLE_SHARE."""
_MOST_STEPS = 128
_FIRST_GUESS = 4e-3
"""Assumed seconds of a step before any was timed; makes the first call short in case the model is slow."""
_IDLE_SHARE = 0.05
"""Share of the time that the executor may have nothing to do between two calls."""


class Bursts:
    """Moving averages of the seconds of a step, and of those between two calls, by number of requests."""

    def __init__(self) -> None:
        self.step_seconds: dict[int, float] = {}
        self._gaps: dict[int, float] = {}

    def steps(self, batch: int) -> int:
        """Steps of the next call for so many requests; for a negative number, rounds."""
        target = min(max(BURST_SECONDS, self._gaps.get(batch, 0.0) / _IDLE_SHARE), _MOST_BURST_SECONDS)
        return max(1, min(_MOST_STEPS, round(target / self.step_seconds.get(batch, _FIRST_GUESS))))

    def note_step(self, batch: int, seconds: float) -> None:
        """Note the time of a step."""
        _update(self.step_seconds, batch, seconds)

    def note_gap(self, batch: int, seconds: float) -> None:
        """Note the time from the end of a call to the start of the next; nobody may have asked for anything in it."""
        _update(self._gaps, batch, min(seconds, _MOST_BURST_SECONDS * _IDLE_SHARE))


def _update(averages: dict[int, float], batch: int, seconds: float) -> None:
    """Update a moving average. Limited, as a single slow call may be due to other programs."""
    known = averages.setdefault(batch, seconds)
    averages[batch] = known + 0.25 * (min(seconds, 2 * known) - known)
