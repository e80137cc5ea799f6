"""What a command prints: results on stdout, everything else on stderr, progress with the time left."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

QUIET_SECONDS = 2.0
"""Work shorter than this shows no progress."""

LINE_SECONDS = 5.0
"""How often progress is printed where stderr is not a terminal."""


def log(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """`value` as one JSON document on stdout."""
    print(json.dumps(value, indent=1, allow_nan=False), flush=True)


def print_json_line(value: Any) -> None:
    """`value` as one line of JSON on stdout."""
    print(json.dumps(value, allow_nan=False), flush=True)


def byte_size(count: float) -> str:
    """`52428800` as `50.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text columns, the first aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in (header, *rows):
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class Progress:
    """A callback `(stage, done, total)` that shows on stderr how far a stage is, and the time it has left.

    A bar on a terminal, a line every few seconds elsewhere; nothing in the first two seconds.
    """

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._stage, self._stage_start = "", self._start
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._stage_start = stage, now
            if self._bar and self._task is not None:
                self._bar.reset(self._task, description=stage)
        if now - self._start < QUIET_SECONDS:
            return
        if sys.stderr.isatty():
            self._show_bar(done, total)
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            log(f"{stage}: {_portion(done, total, now - self._stage_start)}")

    def _show_bar(self, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self._bar = Bar(*columns, *times, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._stage)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total if total > 1 else None)


def _portion(done: int, total: int, seconds: float) -> str:
    """How far, and the time left at the pace so far; only the time spent where there are no parts."""
    if total <= 1 or done <= 0:
        return f"{seconds:.0f} s so far"
    return f"{100 * done // total} %, {seconds * (total - done) / done:.0f} s left"
