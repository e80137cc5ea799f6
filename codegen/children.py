"""Compilers in processes of their own, which end when nobody wants what they make any more."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from threading import Event
from typing import Any

_LOOK_SECONDS = 0.1


class GivenUpError(Exception):
    """The build has failed or was interrupted: its compilers stop."""


def check(given_up: Event | None) -> None:
    """Raises GivenUpError once the event is set."""
    if given_up is not None and given_up.is_set():
        raise GivenUpError


def run(command: Sequence[str], text: str, given_up: Event | None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command on `text` and wait; it is killed, and GivenUpError raised, once the event is set."""
    # Out of a file: through a pipe, communicate() gives no more of it once its first timeout has passed.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as given:
        given.write(text)
        given.seek(0)
        pipes = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes, **options) as child:  # type: ignore[call-overload]
            while True:
                try:
                    out, err = child.communicate(timeout=_LOOK_SECONDS)
                    return subprocess.CompletedProcess(command, child.returncode, out, err)
                except subprocess.TimeoutExpired:
                    if given_up is not None and given_up.is_set():
                        child.kill()
                        raise GivenUpError from None
                except BaseException:
                    child.kill()
                    raise
