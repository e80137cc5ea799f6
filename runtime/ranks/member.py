"""A rank above 0 of processes that a launcher has started: it does what rank 0 (crew.py) asks, and ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from qcompile import __version__
from qcompile.errors import ResourceError
from qcompile.runtime.ranks.crew import TIMEOUT, VISIBLE, patience
from qcompile.runtime.ranks.launcher import LaunchedRank
from qcompile.runtime.ranks.link import Link, Packet, free, place_of
from qcompile.runtime.ranks.processes import popen

_LOOK_SECONDS = 0.05
_PATIENCE = 3.5
"""Seconds that the process of a model has to end by itself, once rank 0 has."""


def follow(own: LaunchedRank) -> NoReturn:
    """Do the part of a rank above 0 until rank 0 ends, and raise SystemExit with its code.

    Raises ResourceError if there is no rank 0, if it refuses this process, or if it ends without a code.
    """
    link = _connected(own)
    with _signals_left_to_rank_0():
        raise SystemExit(_Member(own, link).serve())


def _connected(own: LaunchedRank) -> Link:
    """A connection to rank 0, which need not have accepted it yet."""
    place, limit = place_of(own.run), patience()
    end = time.monotonic() + limit
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(place))
            break
        except OSError:  # rank 0 is not there yet; a socket that nobody listens on may be of an earlier run
            connection.close()
        if time.monotonic() > end:
            raise ResourceError(
                f"rank {own.rank}: rank 0 did not come within {limit:g} s ({TIMEOUT}): start all ranks again"
            )
        time.sleep(_LOOK_SECONDS)
    link = Link(connection)
    if link.uid != os.geteuid():
        raise ResourceError(f"rank {own.rank}: the process at {place} is another user's ({link.uid})")
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # it has ended: seen where its answer is read
        link.send({"rank": own.rank, "run": own.run, "version": __version__, "cores": cores})
    return link


@contextlib.contextmanager
def _signals_left_to_rank_0() -> Iterator[None]:
    """Ignore signals that launchers send to all ranks: rank 0 may answer requests to the end. Children ignore them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Member:
    """What a rank above 0 does for rank 0."""

    def __init__(self, own: LaunchedRank, link: Link) -> None:
        self._own, self._link = own, link
        self._child: subprocess.Popen[bytes] | None = None

    def serve(self) -> int:
        """Do what rank 0 asks, until it ends. Returns its exit code. Raises ResourceError."""
        try:
            while (packet := self._link.receive()) is not None:
                content = packet.content
                if "exit" in content:
                    return int(content["exit"])
                if "refused" in content:
                    raise ResourceError(f"rank {self._own.rank}: rank 0 refuses it: {content['refused']}")
                if "open" in content:
                    self._open(packet)
                elif "kill" in content and self._child:
                    self._child.kill()
        finally:
            self._end_child()
        free(place_of(self._own.run))
        raise ResourceError(f"rank {self._own.rank}: rank 0 (process {self._link.pid}) has ended")

    def _open(self, packet: Packet) -> None:
        """Start the process of a model, and report its end."""
        given, said, *descriptors = packet.descriptors
        visible = packet.content[VISIBLE]
        try:
            more = {} if visible is None else {VISIBLE: visible}
            self._child = child = popen(packet.content["open"], descriptors, given, said, more)
        finally:
            for descriptor in packet.descriptors:
                os.close(descriptor)
        self._send(started=child.pid)
        threading.Thread(target=lambda: self._send(ended=child.wait()), daemon=True).start()

    def _send(self, **content: Any) -> None:
        with contextlib.suppress(OSError):  # rank 0 has ended
            self._link.send(content)

    def _end_child(self) -> None:
        """Wait for the end of the process, which rank 0's end brings about."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_PATIENCE)
            self._child.kill()
