"""A step or a burst that an executor runs while the host does something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qcompile.runtime.engine.scheduler import Plan, Request
from qcompile.runtime.step import Rows


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that runs, with these rows, since `started` or since the step has ended that it is queued behind.

    wait: returns its tokens. decoding: whether each request had only its last token to compute.
    """

    plan: Plan
    rows: list[Rows]
    wait: Callable[[], list[int]]
    started: float
    decoding: bool

    def begin(self) -> None:
        """Note in its requests that it runs."""
        at = 0
        for (request, rows, tokens), row in zip(self._shares(), self.rows, strict=True):
            at += row.outputs
            request.fly(rows, tokens, at - 1)

    def end(self) -> None:
        """Note that it has ended in its requests, except those that have ended before."""
        for request, rows, tokens in self._shares():
            if request.output.finish_reason is None:
                request.land(rows, tokens)

    def _shares(self) -> Iterator[tuple[Request, int, int]]:
        """Its requests, each with how many rows it computes and how many tokens it appends."""
        steps = self.plan.steps
        for request, row in zip(self.plan.requests, self.rows, strict=True):
            yield request, steps * len(row.tokens), steps * (row.outputs > row.known)
