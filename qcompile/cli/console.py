"""Output of the commands: results on stdout, everything else on stderr, and progress with the time left."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, cast

from qcompile.errors import UsageError, escaped

if TYPE_CHECKING:
    from qcompile.cli.estimate import Estimate

QUIET_SECONDS = 2.0
"""Work shorter than this shows no progress."""

LINE_SECONDS = 5.0
"""How often progress is printed where stderr is not a terminal."""


QUIET, NORMAL, VERBOSE = -1, 0, 1
verbosity = NORMAL
"""How much is printed on stderr: QUIET is errors only."""

interrupts: list[int] = []
"""Signals that must end the command. They are kept because the KeyboardInterrupt of a signal may be swallowed, by a
module that is being imported or by a destructor."""


class EscapingStream(io.TextIOWrapper):
    """A text stream that writes `escaped` texts."""

    def write(self, text: str) -> int:
        super().write(escaped(text))
        return len(text)

    def write_sequences(self, text: str) -> int:
        """Write a text of this program's own, with its escape sequences."""
        return super().write(text)


class _Bar(io.TextIOBase):
    """stderr for a progress bar, which is drawn with escape sequences."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        write = getattr(self._stream, "write_sequences", None)
        self.write = write or self._stream.write  # type: ignore[method-assign]
        self.flush = self._stream.flush  # type: ignore[method-assign]
        self.isatty = self._stream.isatty  # type: ignore[method-assign]


def heed_interrupts() -> None:
    """Raise KeyboardInterrupt again if one was swallowed."""
    if interrupts:
        raise KeyboardInterrupt


def open_streams() -> None:
    """Make the standard streams usable, in whatever state the parent process left them.

    A closed stream is opened on /dev/null, so that no later file gets its number. Characters that the encoding of an
    output lacks are escaped, and on stderr those that control a terminal: names in messages come from checkpoints.
    Bytes of the input that are not text are kept, and refused where the text is used.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="surrogateescape" if mode == "r" else "backslashreplace")
    if type(sys.stderr) is io.TextIOWrapper:
        plain = sys.stderr
        sys.stderr = EscapingStream(plain.detach(), plain.encoding, plain.errors, write_through=True)


def everything() -> str:
    """All of stdin, with its line ends unchanged."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="")
    return sys.stdin.read()


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`128,512` as numbers. Raises UsageError that names the option."""
    try:
        parsed = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise UsageError(f"{option} {text}: write whole numbers with commas between") from None
    if any(number < 1 for number in parsed):
        raise UsageError(f"{option} {text}: numbers must be at least 1")
    return parsed


def log(text: str) -> None:
    """Print one line on stderr. Errors of stderr are ignored: messages must not change how a command ends."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print one line on stderr that says what the command does, unless it shall be quiet."""
    if verbosity >= NORMAL:
        log(text)


def show(text: str, end: str = "\n") -> None:
    """Print a result on stdout: lines with names that may come from a checkpoint."""
    print(escaped(text), end=end, flush=True)


def show_generated(text: str, end: str = "") -> None:
    """Print a text of a model on stdout: as it is, unless a terminal would obey what it holds."""
    print(escaped(text) if sys.stdout.isatty() else text, end=end, flush=True)


def detail(text: str) -> None:
    """Print one line on stderr that few want to know."""
    if verbosity >= VERBOSE:
        log(f"qcompile: {text}")


def print_json(value: Any) -> None:
    """`value` as one JSON document on stdout."""
    print(json.dumps(value, indent=1, allow_nan=False), flush=True)


def print_json_line(value: Any) -> None:
    """`value` as one line of JSON on stdout."""
    print(json.dumps(value, allow_nan=False), flush=True)


def left_out(modules: Mapping[str, int]) -> str:
    """A line about the modules that no text reaches, with their bytes in the checkpoint; empty if there are none."""
    largest = sorted(modules.items(), key=lambda item: -item[1])
    named = ", ".join(f"{path} ({byte_size(size)})" for path, size in largest)
    return f"left out, as no text reaches them: {named}\n" if named else ""


def remarks(said: Sequence[str]) -> str:
    """Lines of what a checkpoint has to no use, or lacks; empty without any."""
    return "".join(f"note: {remark}\n" for remark in said)


def byte_size(count: float) -> str:
    """`52428800` as `50.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str] = ()) -> str:
    """Plain text columns, the first and those headed by `words` aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    left = [at == 0 or name in words for at, name in enumerate(header)]
    for row in (header, *rows):
        columns = zip(row, widths, left, strict=True)
        cells = [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in columns]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class Progress:
    """A callback `(stage, done, total)` that shows on stderr how far a stage is, and the time left.

    A thread prints it, so that a stage that rarely calls back is shown too: a bar on a terminal, else a line every few
    seconds, and nothing in the first two seconds. A call raises KeyboardInterrupt after an interrupt.
    """

    def __init__(self, estimate: Estimate | None = None) -> None:
        self._estimate = estimate
        self._start = time.monotonic()
        self._stage, self._stage_start, self._done, self._total = "starting", self._start, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Progress:
        if verbosity > QUIET:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._tell()

    def __call__(self, stage: str, done: int, total: int) -> None:
        heed_interrupts()
        if stage != self._stage:
            self._tell()
            if self._estimate:
                self._estimate.enter(stage)
            self._stage, self._stage_start = stage, time.monotonic()
        self._done, self._total = done, total

    def _tell(self) -> None:
        """Say how long the stage took that is over, if somebody wants to know."""
        detail(f"{self._stage}: {time.monotonic() - self._stage_start:.1f} s")

    def line(self, now: float) -> str:
        """The share done and the time left at the speed so far; the time spent if the stage has no parts.

        With an estimate, both are of all stages.
        """
        if self._estimate:
            percent, left = self._estimate.left(self._share)
            return f"{percent} %, {left:.0f} s left ({self._stage})"
        seconds, done, total = now - self._stage_start, self._done, self._total
        if total <= 1 or done <= 0:
            return f"{self._stage}: {seconds:.0f} s so far"
        return f"{self._stage}: {100 * done // total} %, {seconds * (total - done) / done:.0f} s left"

    @property
    def _share(self) -> float | None:
        """What is done of the stage; None if it has no parts."""
        return self._done / self._total if self._total > 1 and self._done > 0 else None

    def _watch(self) -> None:
        if self._over.wait(QUIET_SECONDS):
            return
        if sys.stderr.isatty():
            self._show_bar()
            return
        while not self._over.wait(LINE_SECONDS):
            log(self.line(time.monotonic()))

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        with Bar(
            BarColumn(), TextColumn("{task.description}"), console=Console(file=cast("IO[str]", _Bar())), transient=True
        ) as bar:
            task = bar.add_task("")
            while not self._over.wait(0.1):
                done, total = self._done, self._total if self._total > 1 else None
                if self._estimate:
                    done, total = self._estimate.left(self._share)[0], 100
                bar.update(
                    task,
                    description=escaped(self.line(time.monotonic())).replace("[", "\\["),
                    completed=done,
                    total=total,
                )


def context_text(context: int, stated: int | None) -> str:
    """A context for people, and why it is less than the `stated` one, if it is."""
    if stated is None:
        return str(context)
    return f"{context} of {stated} tokens that the model states: it computes longer sequences with other values"
