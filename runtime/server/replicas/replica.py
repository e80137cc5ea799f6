"""A replica as the router sees it: a process that serves the model on a Unix socket, and starts again if it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile.errors import ResourceError
from qcompile.system.python_process import module_environment

_FIRST_DELAY, _MOST_DELAY = 1.0, 60.0
"""Seconds before a replica starts again: the first number, twice as many after each end, at most the second."""
_STEADY_SECONDS = 60.0
"""A replica that has answered for so long starts again after the first delay."""


@dataclass(frozen=True)
class ReplicaLaunch:
    """How to start a replica. given: JSON that the process reads from its standard input, as one line.

    The process listens at `socket`, then prints a line of JSON, its facts, on its standard output. It ends at the end
    of its standard input.
    """

    command: Sequence[str]
    given: dict[str, Any]
    socket: Path


class Replica:
    """One replica. say: tells the user a line. needed: whether it is given up if it ends before it was ever ready.

    ready: whether its process takes requests. missed: how often in a row it was asked how it is and did not answer
    (pulse.py). in_flight: requests that it was sent and has not answered. facts: what it said of itself
    when it was last ready. exit_code: that of its process if it was given up. ended, restarted: called when its process
    has ended, and when it starts again. prepare: called when it listens, before it takes requests.
    """

    def __init__(self, number: int, launch: ReplicaLaunch, say: Callable[[str], None], needed: bool = False) -> None:
        self.number, self.launch, self._say, self._needed = number, launch, say, needed
        self.ready, self.missed, self.in_flight = False, 0, 0
        self.facts: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.ended: Callable[[], None] = lambda: None
        self.restarted: Callable[[], None] = lambda: None
        self.prepare: Callable[[], Awaitable[None]] = _nothing
        self._process: Process | None = None
        self._closing = False

    async def keep(self) -> None:
        """Start the process, and start it again whenever it ends, until `close`."""
        delay = _FIRST_DELAY
        while True:
            since = time.monotonic()
            code = await self._run()
            if self._closing:
                return
            if self._needed and not self.facts:
                self.exit_code = code
                return
            delay = _FIRST_DELAY if time.monotonic() - since > _STEADY_SECONDS else delay
            self._say(f"replica {self.number} has ended ({_how(code)}), and starts again in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MOST_DELAY)
            self.restarted()

    async def _run(self) -> int:
        """Run the process once; returns its exit code, negative after a signal."""
        with contextlib.suppress(FileNotFoundError):
            self.launch.socket.unlink()
        # In a session of its own: Ctrl-C in a terminal reaches the router alone, which ends the replicas in order.
        process = await asyncio.create_subprocess_exec(
            *self.launch.command, stdin=PIPE, stdout=PIPE, env=module_environment(), start_new_session=True
        )
        self._process = process
        assert process.stdin and process.stdout
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(self.launch.given).encode() + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
            if line and not self._closing:
                self.facts = json.loads(line)
                await self._prepare()
                self.ready = True
            return await process.wait()
        finally:
            self.ready, self.missed = False, 0
            self.ended()

    async def _prepare(self) -> None:
        try:
            await self.prepare()
        except ResourceError as error:
            self._say(f"replica {self.number}: {error}")

    @property
    def working(self) -> bool:
        """Whether it takes requests, and was not told to end."""
        return self.ready and not self._closing

    @property
    def pid(self) -> int | None:
        """The number of its process; None before it has one."""
        return None if self._process is None else self._process.pid

    def stopped(self) -> bool:
        """Whether a signal has stopped its process (SIGSTOP), which can go on only by another one."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
        except (OSError, IndexError):  # it has ended
            return False

    def kill(self) -> None:
        """End the process at once. It starts again."""
        self._send(signal.SIGKILL)

    def end(self) -> None:
        """Tell the process to answer its open requests and end."""
        self._closing = True
        self._send(signal.SIGTERM)

    async def close(self, seconds: float) -> None:
        """Wait until the process has ended, and kill it after `seconds`."""
        self.end()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self._send(signal.SIGKILL)
            await self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _nothing() -> None:
    """What is to be done before requests are taken, by default."""


def _how(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
