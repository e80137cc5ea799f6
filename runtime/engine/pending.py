"""Asynchronous steps: an executor runs a step while the host does other work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qcompile.runtime.engine.plan import StepPlan
from qcompile.runtime.step import Rows


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that has been started and not waited for. Its requests count its tokens (`SequenceState.begin_step`).

    wait: returns the step's tokens. started, queued: when the host began and ended to start it, on the monotonic clock;
    the step may have run later, after the step before it. decoding: whether each request had only its last token to
    compute. is_read: whether drafts need what the executor returns beside the tokens, so that no step may start before
    this one has ended.
    """

    plan: StepPlan
    rows: Sequence[Rows]
    wait: Callable[[], list[int]]
    started: float
    queued: float
    decoding: bool
    is_read: bool

    @staticmethod
    def begin(
        plan: StepPlan, rows: Sequence[Rows], wait: Callable[[], list[int]], started: float, is_read: bool
    ) -> PendingStep:
        """The step of `plan`, which has just been started. Notes in its requests that it is pending."""
        step = PendingStep(plan, rows, wait, started, time.monotonic(), plan.decoding, is_read)
        outputs, steps = 0, plan.steps
        for request, row in zip(plan.requests, rows, strict=True):
            outputs += row.outputs
            request.sequence.begin_step(steps * len(row.tokens), steps * (row.outputs > row.known), outputs - 1)
        return step

    def result(self) -> list[int]:
        """Wait for the step, and return its tokens."""
        return self.wait()

    def end(self) -> None:
        """Note in the requests that the step is no longer pending, except in those that have ended since its start."""
        steps = self.plan.steps
        for request, row in zip(self.plan.requests, self.rows, strict=True):
            if request.output.finish_reason is None:
                request.sequence.end_step(steps * len(row.tokens), steps * (row.outputs > row.known))
