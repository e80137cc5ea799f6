"""How long the stages of a build take, and telling whoever waits."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total); total is bytes for `weights`, 1 for stages that are one piece."""


def silent(stage: str, done: int, total: int) -> None:
    """A Progress that tells nobody."""


class Clock:
    """Times stages and tells the progress callback when each starts and ends."""

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
        self.seconds[self._stage] = time.perf_counter() - self._start
        if error[0] is None:
            self.progress(self._stage, 1, 1)
