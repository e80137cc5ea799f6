"""Run compilers in child processes, which are killed when the build is abandoned."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from threading import Event
from typing import Any

_POLL_SECONDS = 0.1
_PATIENCE = 1.0
"""Seconds that a compiler gets to remove its temporary files."""


class GivenUpError(Exception):
    """The build failed or was interrupted, so its compilers stop."""


def check(given_up: Event | None) -> None:
    """Raise GivenUpError if the event is set."""
    if given_up is not None and given_up.is_set():
        raise GivenUpError


def run(command: Sequence[str], text: str, given_up: Event | None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with `text` as standard input and wait; once the event is set, kill it and raise GivenUpError."""
    # stdin is a file: with a pipe, communicate() stops sending input after its first timeout.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as given:
        given.write(text)
        given.seek(0)
        pipes = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        group = {"process_group": 0}  # what a compiler starts is in it, too, and can be ended with it
        with subprocess.Popen(command, text=True, **pipes, **group, **options) as child:  # type: ignore[call-overload]
            while True:
                try:
                    out, err = child.communicate(timeout=_POLL_SECONDS)
                    return subprocess.CompletedProcess(command, child.returncode, out, err)
                except subprocess.TimeoutExpired:
                    if given_up is not None and given_up.is_set():
                        _kill(child)
                        raise GivenUpError from None
                except BaseException:
                    _kill(child)
                    raise


def _kill(child: subprocess.Popen[str]) -> None:
    """End a compiler and what it has started: politely first, since only then does it remove its temporary files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, number)
            child.wait(_PATIENCE)
            return
