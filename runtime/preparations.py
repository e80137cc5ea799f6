"""When an executor has prepared what later calls are spared, as graphs of launches.

A call that has waited for this took longer than others of its kind will, so the time tells nothing of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_MOST = 32
"""Preparations remembered: more than a call has."""


class Preparations:
    """The last preparations of an executor, on the monotonic clock. Not safe for two threads."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MOST)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note that the block prepares something."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spans.append((began, time.monotonic()))

    def within(self, began: float, ended: float) -> float:
        """Seconds of preparations between two times."""
        return sum(max(0.0, min(last, ended) - max(first, began)) for first, last in self._spans)
