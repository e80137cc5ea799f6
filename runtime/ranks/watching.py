"""How rank 0 notices that the process of another rank has ended, or does not run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

_LOOK_SECONDS = 0.1
"""How often a process is looked at."""
BEAT_SECONDS = 0.5
"""How often the process of a rank says that it runs."""
_SILENT_LOOKS = 40
"""A process that said nothing while it was looked at so often, in 4 seconds, has failed. Looks are counted, not
seconds, since processes that are stopped together, and continued, are all well."""


class WatchedProcess(Protocol):
    """The process of a rank (processes.py)."""

    rank: int
    remedy: str

    @property
    def name(self) -> str: ...

    def ending(self) -> str | None: ...

    def kill(self) -> None: ...


def watch(process: WatchedProcess, beats: Callable[[int], int], closing: Callable[[], bool]) -> str:
    """Wait until a process ends or does not run any more, and then is killed. Returns the problem.

    beats: how often the process of a rank has said that it runs. Empty once `closing`.
    """
    seen, looks = -1, 0
    while (ending := process.ending()) is None and not closing():
        if (now := beats(process.rank)) != seen:
            seen, looks = now, 0
        elif (looks := looks + 1) > _SILENT_LOOKS:
            process.kill()
            return f"{process.name} does not respond: {process.remedy}"
        time.sleep(_LOOK_SECONDS)
    return "" if ending is None else f"{process.name} {ending}: {process.remedy}"
