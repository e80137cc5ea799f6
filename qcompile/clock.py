"""Times of build stages, and progress callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total); total is in bytes for `weights`, 1 for stages without steps."""


def silent(stage: str, done: int, total: int) -> None:
    """A Progress that does nothing."""


class Clock:
    """Times stages, and calls the progress callback at the start and end of each. A stage's runs are added up."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str) -> Clock:
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self.progress(self._stage, 0, 1)
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        taken = time.perf_counter() - self._start
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + taken
        if error[0] is None:
            self.progress(self._stage, 1, 1)
