"""Renders chat templates in a process of their own, with limits of time, memory and output."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from qcompile.errors import ResourceError, UsageError

SECONDS = 2.0
"""Longest time that a template may take."""
_MEMORY = 256 << 20
"""Bytes that it may take."""
_CHARACTERS, _COPIES = 1 << 20, 4
"""Most characters of its text: the first number, and as many as the second copies of the conversation have."""
_START_SECONDS = 30.0
"""Longest time in which the process must start: a loaded machine may take seconds."""
_MOST_CALLERS = 16
"""Most callers at once: each may be a thread of a server. A normal template takes less than a millisecond."""
_MESSAGE = 300
"""Most characters of an error that are shown: a template may raise a text of any length."""
_PROGRAM = Path(__file__).with_name("sandbox.py")


class TemplateError(UsageError):
    """A template is malformed, exceeds a limit, or does not take what it is given."""


class Renderer:
    """The templates of a model by name. Several threads may use it. Its process starts with the first use."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_CALLERS)
        self._worker: _Worker | None = None

    def reads(self) -> frozenset[str]:
        """The names of the variables that the templates read. Raises TemplateError, ResourceError."""
        return frozenset(self._ask({"reads": True})["names"])

    def render(self, name: str, values: dict[str, Any]) -> str:
        """The text of the template of this name. Raises TemplateError, ResourceError."""
        try:
            given = json.dumps(values)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"its variables cannot be written as JSON: {error}") from error
        most = _CHARACTERS + _COPIES * len(given)
        text: str = self._ask({"render": name, "most": most}, given)["text"]
        return text

    def _ask(self, request: dict[str, Any], values: str = "null") -> dict[str, Any]:
        line = f'{json.dumps(request)[:-1]}, "values": {values}}}\n'.encode()
        if not self._places.acquire(blocking=False):
            raise ResourceError("too many conversations wait for the chat template: try again later")
        try:
            with self._lock:
                found = self._running().ask(line, SECONDS)
        except _EndedError as error:
            raise TemplateError(str(error)) from None
        finally:
            self._places.release()
        if "error" in found:
            raise TemplateError(" ".join(found["error"].split())[:_MESSAGE])
        return found

    def _running(self) -> _Worker:
        """The process that renders; a new one if the last has ended, or belongs to the parent of this process."""
        if self._worker is None or not self._worker.alive:
            self._worker = _Worker()
            try:
                self._worker.ask(json.dumps({"templates": self._sources}).encode() + b"\n", _START_SECONDS)
            except _EndedError as error:
                raise ResourceError(f"the process for chat templates does not start: {error}") from None
        return self._worker


class _EndedError(Exception):
    """The process has ended, or was ended, without an answer."""


class _Worker:
    """A process that runs sandbox.py."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-W", "ignore", str(_PROGRAM), str(_MEMORY), str(int(SECONDS))]
        self._socket, theirs = socket.socketpair()
        end = theirs.fileno()
        try:
            process = subprocess.Popen(command, stdin=end, stdout=end, stderr=subprocess.DEVNULL)
        except OSError as error:
            self._socket.close()
            raise ResourceError(f"the process for chat templates does not start: {error.strerror}") from error
        finally:
            theirs.close()
        self._process, self._owner = process, os.getpid()
        self._socket.setblocking(False)
        self._end = weakref.finalize(self, _end, process, self._socket, self._owner)

    @property
    def alive(self) -> bool:
        """Whether it can be asked, by this process."""
        return self._owner == os.getpid() and self._end.alive and self._process.poll() is None

    def ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        """The answer to a line. Raises _EndedError if there is none in time."""
        until = time.monotonic() + seconds
        rest = memoryview(line)
        answer = bytearray()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        while not answer.endswith(b"\n"):
            ready = poll.poll(max(0.0, until - time.monotonic()) * 1e3)
            if not ready:
                self._end()
                raise _EndedError(f"it takes more than {seconds:g} seconds")
            try:
                if ready[0][1] & ~select.POLLOUT:
                    answer += self._read()
                elif len(rest):  # without the signal that would end a process whose reader has ended
                    rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
                if not len(rest):
                    poll.modify(self._socket, select.POLLIN)
            except OSError as error:
                self._end()
                raise _EndedError("its process has ended") from error
        found: dict[str, Any] = json.loads(answer)
        return found

    def _read(self) -> bytes:
        part = self._socket.recv(1 << 16)
        if not part:
            raise BrokenPipeError
        return part


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:  # else this is a copy in a child that was forked
        process.kill()
        process.wait()
