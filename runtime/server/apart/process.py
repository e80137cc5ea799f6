"""Starts the process that answers clients, and runs the engine for it until a signal or a failure ends both."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from qcompile.errors import ResourceError
from qcompile.runtime.server.apart.channel import Received, Sender, pair
from qcompile.runtime.server.interpreter import python_of_a_server
from qcompile.system.python_process import module_command, module_environment

_LAST_SECONDS = 5.0
"""How much longer than open answers the process may take to end before it is killed."""


class HostedService(Protocol):
    """What is needed of a service."""

    failure: BaseException | None
    failed: Callable[[BaseException], None]

    def close(self) -> None: ...


class Host(Protocol):
    """What is needed of an `EngineHost`."""

    @property
    def service(self) -> HostedService: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    def asked(self, message: Sequence[Any]) -> None: ...


class FrontProcess:
    """The process that answers clients. module: what it runs, with the numbers of three descriptors: the socket
    `listening`, where it sends, and where it receives."""

    def __init__(self, module: str, listening: socket.socket) -> None:
        its_asks, self.asks = pair()
        tells, its_tells = pair()
        self.tell = Sender(tells).send
        self._ends = self.asks, tells
        given = [each.fileno() for each in (listening, its_asks, its_tells)]
        with its_asks, its_tells:
            # In a session of its own: Ctrl-C in a terminal reaches the engine's process alone, which ends both.
            self._process = subprocess.Popen(
                module_command(module, *map(str, given)),
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                start_new_session=True,
            )

    def kill_after(self, seconds: float) -> None:
        """Kill the process unless it ends within this time. What is sent to it until then may block."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def wait(self) -> int:
        """Wait until the process has ended; returns its exit code, negative after a signal."""
        return self._process.wait()

    def close(self) -> None:
        """End the process if it still runs."""
        for end in self._ends:
            end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_SECONDS)
        self.kill()
        self._process.wait()


def serve_apart(
    host: Host,
    front: FrontProcess,
    options: Mapping[str, Any],
    drain_seconds: float,
    ready: Callable[[], None],
) -> bool:
    """Run an engine for `front`. Returns whether SIGTERM ended it; SIGINT and SIGHUP are raised again at the end.

    options: what the process needs to know beside the model's facts. ready: called when it listens. If the engine
    fails, raises its exception; ResourceError if the other process ends by itself.
    """
    serving = _Serving(host, front, drain_seconds, ready)
    try:
        front.tell(("begin", dict(options), host.facts))
        with python_of_a_server():
            asyncio.run(serving.run())
    finally:
        host.service.close()
    if host.service.failure:
        raise host.service.failure
    return serving.result()


class _Serving(asyncio.Protocol):
    """The channel on which the other process asks, and the signals that end both."""

    def __init__(self, host: Host, front: FrontProcess, drain_seconds: float, ready: Callable[[], None]) -> None:
        self._host, self._front, self._drain_seconds, self._ready = host, front, drain_seconds, ready
        self._received = Received()
        self._signals: list[int] = []
        self._failure: Exception | None = None  # of what this process did for the other one
        self._listens = False
        self._code = 0
        self._over: asyncio.Future[None]

    async def run(self) -> None:
        """Serve until the other process has ended."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._host.service.failed = self._failed
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            handled.append(signal.SIGHUP)
        before = [signal.getsignal(number) for number in handled]
        for number in handled:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            await loop.create_connection(lambda: self, sock=self._front.asks)
            await self._over
            self._code = await asyncio.to_thread(self._front.wait)
        finally:
            for number, handler in zip(handled, before, strict=True):
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def data_received(self, data: bytes) -> None:
        if self._failure is not None:
            return
        try:
            for message in self._received.add(data):
                self._heed(message)
        except Exception as error:  # asyncio would print it and close the channel, for which nobody waits
            self._failure = error
            self._failed(error)

    def _heed(self, message: Sequence[Any]) -> None:
        if message[0] == "listening":
            self._listens = True
            self._ready()
        else:
            self._host.asked(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _signalled(self, number: int) -> None:
        """The first signal lets open answers end, the second one does not wait for them."""
        self._signals.append(number)
        self._end("force" if len(self._signals) > 1 else "end")

    def _failed(self, error: BaseException) -> None:
        """End the other process, as this one has failed. Called in the engine's thread, too."""
        self._front.kill_after(_LAST_SECONDS)
        self._front.tell(("failed", str(error)))

    def _end(self, how: str) -> None:
        self._front.kill_after(self._drain_seconds + _LAST_SECONDS)
        self._front.tell((how,))

    def result(self) -> bool:
        """Whether SIGTERM ended the server. Raises other signals and failures again, and ResourceError if neither
        ended it."""
        if self._failure is not None:
            raise self._failure
        if not self._signals:
            raise _ended(self._code, self._listens)
        for number in (signal.SIGINT, signal.SIGHUP):
            if number in self._signals:
                signal.raise_signal(number)
        return True


def _ended(code: int, listened: bool) -> ResourceError:
    """The error of a process that has ended by itself."""
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    error = ResourceError(f"the process that answers clients has ended ({how}): start the server again")
    if code > 0 and not listened:
        error.exit_code = code
    return error
