"""Asks the process of sandbox.py, which has limits of time and memory, and ends it if it does not answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from qcompile.errors import ResourceError

SECONDS = 2.0
"""Longest processor time that a request may take."""
_MEMORY = 256 << 20
"""Bytes that it may take."""
_USUAL_SECONDS, _LOOK_SECONDS = 0.3, 0.1
"""A request that takes more processor time than the first number goes on at the lowest priority; the second is how
often that is looked at. A normal request takes a millisecond, and the first of a process, with what it imports, 100
to 200. So what is built to take all of its time takes most of it only where nothing else needs it. Where all cores
are busy, a slow request may therefore exceed its time."""
_LOWEST = 19
_PROGRAM = Path(__file__).with_name("sandbox.py")


class EndedError(Exception):
    """The process has ended, or was ended, without an answer."""


class Worker:
    """A process that runs sandbox.py. Several threads may use it one after the other."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-W", "ignore", str(_PROGRAM), str(_MEMORY), str(int(SECONDS))]
        self._socket, theirs = socket.socketpair()
        end = theirs.fileno()
        try:
            process = subprocess.Popen(command, stdin=end, stdout=end, stderr=subprocess.DEVNULL)
        except OSError as error:
            self._socket.close()
            raise ResourceError(
                f"the process for chat templates and grammars does not start: {error.strerror}"
            ) from error
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
        """The answer to a line. Raises EndedError if there is none in time.

        A request that takes much processor time lowers the priority of the process, which cannot be raised again: the
        process ends with the answer, so that the next request has one of normal priority.
        """
        until, used, lowered = time.monotonic() + seconds, self._processor_seconds(), False
        rest = memoryview(line)
        answer = bytearray()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        while not answer.endswith(b"\n"):
            left = max(0.0, until - time.monotonic())
            ready = poll.poll((left if lowered else min(left, _LOOK_SECONDS)) * 1e3)
            if not ready and not lowered and left > _LOOK_SECONDS:
                lowered = self._processor_seconds() - used >= _USUAL_SECONDS and self._yield()
                continue
            if not ready:
                self._end()
                raise EndedError(f"it takes more than {seconds:g} seconds")
            try:
                if ready[0][1] & ~select.POLLOUT:
                    answer += self._read()
                elif len(rest):  # MSG_NOSIGNAL: if the reader has ended, send must raise, not end this process
                    rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
                if not len(rest):
                    poll.modify(self._socket, select.POLLIN)
            except OSError as error:
                self._end()
                raise EndedError("its process has ended") from error
        if lowered:
            self._end()
        result: dict[str, Any] = json.loads(answer)
        return result

    def _yield(self) -> bool:
        """Lower the priority of the process. Returns True: there is no more to do."""
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWEST)
        return True

    def _processor_seconds(self) -> float:
        """Processor time that the process has taken; 0 where the system does not tell, which lowers no priority."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return 0.0

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
