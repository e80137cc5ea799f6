"""The process of a rank but the first, as rank 0 starts, asks, watches and ends it.

The process reads lines of JSON from its standard input and answers by lines of JSON. It ends when its standard input
is closed, so with the process of rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from qcompile.errors import ResourceError
from qcompile.system.python_process import module_command, module_environment

FOLLOWERS = {"cpu": "qcompile.runtime.cpu.follower", "cuda": "qcompile.runtime.cuda.follower"}
"""The program of a rank's process, by the kind of device. Its arguments are numbers of inherited file descriptors."""


def popen(
    follower: str, descriptors: Sequence[int], given: int, said: int, more: dict[str, str]
) -> subprocess.Popen[bytes]:
    """The process of a rank, with `descriptors`, and with `given` and `said` as standard input and output.

    more: further variables of its environment.
    """
    return subprocess.Popen(
        module_command(FOLLOWERS[follower], *map(str, descriptors)),
        stdin=given,
        stdout=said,
        pass_fds=list(descriptors),
        env=module_environment() | more,
    )


class RankProcess(ABC):
    """The process of rank `rank`. pid: its number. remedy: what to do once it has ended."""

    remedy = "load the model again"

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, 0
        self._to, given = socket.socketpair()  # unlike a pipe's, its reader's end need not send SIGPIPE
        said, answers = os.pipe()
        self._said = os.fdopen(said)
        try:
            self.pid = self._start(given.fileno(), answers)
        except BaseException:
            self._close()
            raise
        finally:
            given.close()
            os.close(answers)

    @abstractmethod
    def _start(self, given: int, said: int) -> int:
        """Start the process with these ends of pipes as its standard input and output. Returns its number."""

    @abstractmethod
    def ending(self) -> str | None:
        """How the process has ended; None while it runs."""

    @abstractmethod
    def wait(self, seconds: float | None = None) -> bool:
        """Whether the process ends within `seconds`."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once."""

    @property
    def name(self) -> str:
        """The rank and the process, for messages."""
        return f"rank {self.rank} (process {self.pid})"

    def tell(self, what: dict[str, Any]) -> None:
        """Send a line."""
        with contextlib.suppress(OSError):  # it has ended: seen where its answer is read
            self._to.sendall(json.dumps(what).encode() + b"\n", socket.MSG_NOSIGNAL)

    def answer(self, seconds: float | None = None, doing: str = "while it loaded") -> dict[str, Any]:
        """The next line. Raises ResourceError with what it says if it has failed, and if none comes in `seconds`.

        doing: when that was, for messages.
        """
        said: dict[str, Any] = {}
        if not select.select([self._said], [], [], seconds)[0]:
            raise ResourceError(f"{self.name} did not answer for {seconds:.0f} s {doing}: {self.remedy}")
        with contextlib.suppress(ValueError):  # nothing or no JSON: it has ended
            said = json.loads(self._said.readline())
        if "error" in said:
            raise ResourceError(f"rank {self.rank}: {said['error']}")
        if not said:
            self.wait(_PATIENCE)
            raise ResourceError(f"{self.name} {self.ending() or 'said nothing'} {doing}")
        return said

    def close_input(self) -> None:
        """Have the process end by itself."""
        with contextlib.suppress(OSError):  # the other end is closed already
            self._to.close()

    def finish(self, seconds: float) -> None:
        """Wait until the process ends; kill it if that takes longer than `seconds`."""
        self.close_input()
        if not self.wait(seconds):
            self.kill()
            self.wait(seconds)
        self._close()

    def _close(self) -> None:
        self.close_input()
        self._said.close()


_PATIENCE = 3.0
"""Seconds in which a process has ended that has closed its standard output."""


class SpawnedProcess(RankProcess):
    """A child of this process."""

    def __init__(self, rank: int, follower: str, descriptors: Sequence[int]) -> None:
        self._program = follower, descriptors
        super().__init__(rank)

    def _start(self, given: int, said: int) -> int:
        self._process = popen(*self._program, given, said, {})
        return self._process.pid

    def ending(self) -> str | None:
        """How the process has ended; None while it runs."""
        return ending_of(self._process.poll())

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the process ends within `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()


def ending_of(status: int | None) -> str | None:
    """How a process with this exit status has ended; None while it runs."""
    if status is None:
        return None
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
