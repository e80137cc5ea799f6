"""Times of the executor's calls, and how many steps the next call should have.

A call of several decode steps (multi-step decode), or of several rounds of speculation, hides the host's work between
calls. A call of few steps lets streams grow smoothly and lets new requests start soon.
"""

from __future__ import annotations

import time

from qcompile.runtime.engine.plan import StepPlan

CALL_SECONDS, _MOST_CALL_SECONDS = 16e-3, 48e-3
"""Target time of a call, and the longest target for the sake of _IDLE_SHARE."""
_MOST_STEPS = 128
_FIRST_GUESS = 4e-3
"""Assumed seconds of a step before any was timed; makes the first call short in case the model is slow."""
_IDLE_SHARE = 0.05
"""Share of the time that the executor may be idle between two calls."""
_WAITED = 1e-4
"""Seconds of waiting for an asynchronous step from which on its end is known well."""


class StepsPerCall:
    """Moving averages of the seconds of a step and of the gap before a call, by number of requests."""

    def __init__(self) -> None:
        self.step_seconds: dict[int, float] = {}
        self._gaps: dict[int, float] = {}

    def count(self, batch: int) -> int:
        """Steps that the next call should have for `batch` requests."""
        target = min(max(CALL_SECONDS, self._gaps.get(batch, 0.0) / _IDLE_SHARE), _MOST_CALL_SECONDS)
        return max(1, min(_MOST_STEPS, round(target / self.step_seconds.get(batch, _FIRST_GUESS))))

    def note_step(self, batch: int, seconds: float) -> None:
        """Note the time of a step."""
        _update(self.step_seconds, batch, seconds)

    def note_gap(self, batch: int, seconds: float) -> None:
        """Note the time from the end of a call to the start of the next. In a long gap there was nothing to do."""
        _update(self._gaps, batch, min(seconds, _MOST_CALL_SECONDS * _IDLE_SHARE))


def _update(averages: dict[int, float], batch: int, seconds: float) -> None:
    """Update a moving average. The new value is limited: other programs may have delayed a single call."""
    known = averages.setdefault(batch, seconds)
    averages[batch] = known + 0.25 * (min(seconds, 2 * known) - known)


class CallTimer:
    """Measures the executor's calls, those of plain steps and those of rounds apart."""

    def __init__(self) -> None:
        self.steps, self.rounds = StepsPerCall(), StepsPerCall()
        self.ended = 0.0
        """When the last call ended, on the monotonic clock; 0 before the first."""

    def begin(self, plan: StepPlan) -> float:
        """The current time, which is noted in the requests that a step has for the first time."""
        started = time.monotonic()
        for request in plan.requests:
            if not request.metrics.first_scheduled_time:
                request.metrics.first_scheduled_time = started
        return started

    def end(self) -> float:
        """Note that a call has ended. Returns the current time."""
        self.ended = time.monotonic()
        return self.ended

    def note_gap(self, plan: StepPlan, started: float) -> None:
        """Note how long the executor was idle before a step that began at `started`."""
        if plan.decoding and self.ended:
            self.steps.note_gap(len(plan.requests), started - self.ended)

    def note_pending(self, plan: StepPlan, decoding: bool, waited_from: float, seconds: float) -> float:
        """Note an asynchronous call of `seconds` in all, for which the host has waited since `waited_from`.

        If the host hardly waited, the call may have ended long before: it took at most `seconds`. Returns the seconds
        that it took, as far as is known.
        """
        batch, each = len(plan.requests), seconds / plan.steps
        known = self.steps.step_seconds.get(batch)
        if self.ended - waited_from <= _WAITED and known is not None and each >= known:
            return known * plan.steps
        if decoding:
            self.steps.note_step(batch, each)
        return seconds
