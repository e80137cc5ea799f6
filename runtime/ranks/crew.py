"""Rank 0 of processes that a launcher has started: it finds the others, has them open models, and tells them the end.

Every other rank (member.py) connects to a socket of rank 0. It stays connected until rank 0 ends. For each model that
rank 0 opens, it starts the process that rank 0 would otherwise start itself, and reports the end of that process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from qcompile import __version__
from qcompile.errors import EXIT_BUG, EXIT_OK, EXIT_SIGNAL, ResourceError, UsageError
from qcompile.runtime.ranks.launcher import LaunchedRank
from qcompile.runtime.ranks.link import Link, free, place_of
from qcompile.runtime.ranks.processes import RankProcess, SpawnedProcess, ending_of

TIMEOUT = "QCOMPILE_LAUNCH_TIMEOUT"
_SECONDS = 60.0
_HELLO_SECONDS = 5.0
"""How long a process that connects may take to say who it is, and to start a process."""
_LATE_SECONDS = 5.0
"""How long rank 0 waits at its end for ranks that have not come yet, to tell them how it ends."""
_NOTE_SECONDS = 2.0
"""How long rank 0 waits without a word."""
_REMEDY = "start all ranks again"
VISIBLE = "CUDA_VISIBLE_DEVICES"

_crews: list[Crew] = []


def patience() -> float:
    """Seconds that ranks wait for each other. Raises UsageError."""
    given = os.environ.get(TIMEOUT, "").strip()
    try:
        seconds = float(given or _SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"{TIMEOUT} is {given!r}: write seconds, as a number above 0")
    return seconds


def assemble(own: LaunchedRank) -> Crew:
    """The crew of this process, which is rank 0: from now on, it listens for the others. Raises ResourceError."""
    if not _crews:
        _crews.append(Crew(own))
    return _crews[0]


def threads_of_each(ranks: int) -> int:
    """As many threads for each of `ranks` processes as there are cores: those that a launcher has given to all of them
    together, or those of this process, which starts the others."""
    cores = [os.sched_getaffinity(0), *(_crews[0].cores.values() if _crews else ())]
    return max(min(len(set().union(*cores)) // ranks, *map(len, cores)), 1)


def start(rank: int, follower: str, descriptors: Sequence[int]) -> RankProcess:
    """The process of rank `rank`, started by the rank that a launcher has started, or here without a launcher.

    follower: the kind of device, of FOLLOWERS. descriptors: files that it inherits, and has the numbers of as
    arguments. Raises ResourceError.
    """
    if _crews:
        return _crews[0].start(rank, follower, descriptors)
    return SpawnedProcess(rank, follower, descriptors)


class Crew:
    """The other ranks of a launcher's run, as far as they have come. cores: those that each may use, by its rank."""

    def __init__(self, own: LaunchedRank) -> None:
        self._own, self._process = own, os.getpid()
        self._links: dict[int, Link] = {}
        self.cores: dict[int, set[int]] = {}
        self._running: dict[int, AdoptedProcess] = {}
        self._place = place_of(own.run)
        self._listening = _listen(self._place, own)
        self._late, self._ended = _LATE_SECONDS, False
        atexit.register(self._finish_script)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [rank for rank in range(1, self._own.size) if rank not in self._links]

    def gather(self) -> None:
        """Wait until all have come. Raises ResourceError with those that have not, in the end."""
        start, limit, told = time.monotonic(), patience(), False
        while self.missing:
            spent = time.monotonic() - start
            if spent > limit:
                self._late = 0.0
                raise ResourceError(
                    f"{self._own.text}, and {_ranks(self.missing)} did not come within {limit:g} s ({TIMEOUT}): "
                    f"{_REMEDY}"
                )
            if spent > _NOTE_SECONDS and not told:
                print(f"qcompile: waiting for {_ranks(self.missing)}", file=sys.stderr, flush=True)
                told = True
            self._admit_next(min(limit - spent, _NOTE_SECONDS) + 0.01)

    def start(self, rank: int, follower: str, descriptors: Sequence[int]) -> AdoptedProcess:
        """Have a rank start its process for a model. Raises ResourceError if it has ended, UsageError if it has one."""
        if rank in self._running and self._running[rank].ending() is None:
            raise UsageError(f"the ranks that {self._own.launcher} started run another model: close that first")
        self._running[rank] = AdoptedProcess(rank, self._links[rank], follower, descriptors)
        return self._running[rank]

    def finish(self, code: int) -> None:
        """Tell all ranks to end with `code`; those that have not come yet too, if they come within seconds.

        A code of a signal is told at once: launchers send signals to all ranks.
        """
        if self._ended or os.getpid() != self._process:
            return
        self._ended = True
        end = time.monotonic() + (self._late if code <= EXIT_SIGNAL else 0.0)
        with contextlib.suppress(ResourceError):
            while self.missing and (left := end - time.monotonic()) > 0:
                self._admit_next(left)
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it has ended
                link.send({"exit": code})
        self._listening.close()
        self._place.unlink(missing_ok=True)

    def _finish_script(self) -> None:
        """At the end of a Python program, which `exits` of the command line is not part of."""
        self.finish(EXIT_BUG if hasattr(sys, "last_value") else EXIT_OK)

    def _admit_next(self, seconds: float) -> None:
        """Take in the next rank that connects within `seconds`. Raises ResourceError for one of another version."""
        self._listening.settimeout(seconds)
        try:
            link = Link(self._listening.accept()[0])
        except TimeoutError:
            return
        with contextlib.suppress(TimeoutError, OSError):
            packet = link.receive(_HELLO_SECONDS) if link.uid == os.geteuid() else None
            hello = packet.content if packet else {}
            rank = hello.get("rank")
            if hello.get("run") == self._own.run and rank in self.missing:
                if (version := hello.get("version")) != __version__:
                    problem = f"rank {rank} (process {link.pid}) runs qcompile {version}, and rank 0 {__version__}"
                    link.send({"refused": problem})
                    raise ResourceError(f"{problem}: install one version for all")
                link.send({"welcome": True})
                self._links[rank], self.cores[rank] = link, set(hello["cores"])
                return
        link.close()


class AdoptedProcess(RankProcess):
    """A process that another rank of the launcher's run starts and ends for rank 0."""

    def __init__(self, rank: int, link: Link, follower: str, descriptors: Sequence[int]) -> None:
        self._link, self._program = link, (follower, descriptors)
        self._over, self._how = threading.Event(), ""
        super().__init__(rank)
        threading.Thread(target=self._read, name=f"rank-{rank}-link", daemon=True).start()

    def _start(self, given: int, said: int) -> int:
        follower, descriptors = self._program
        asked = {"open": follower, VISIBLE: os.environ.get(VISIBLE)}
        lost = f"rank {self.rank} (process {self._link.pid})"
        try:
            self._link.send(asked, [given, said, *descriptors])
            packet = self._link.receive(_HELLO_SECONDS)
        except TimeoutError:
            raise ResourceError(f"{lost} does not respond: {_REMEDY}") from None
        except OSError:
            packet = None
        if packet is None:
            raise ResourceError(f"{lost} has ended: {_REMEDY}")
        return int(packet.content["started"])

    def _read(self) -> None:
        """Wait for the end of the process, or of the rank that has started it."""
        packet = self._link.receive()
        if packet is None:
            self.pid, self._how, self.remedy = self._link.pid, "has ended", _REMEDY
        else:
            self._how = ending_of(packet.content["ended"]) or ""
        self._over.set()

    def ending(self) -> str | None:
        """How the process has ended; None while it runs."""
        return self._how if self._over.is_set() else None

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the process ends within `seconds`."""
        return self._over.wait(seconds)

    def kill(self) -> None:
        """Have the process ended at once."""
        with contextlib.suppress(OSError):  # the rank has ended
            self._link.send({"kill": True})


def _listen(place: Path, own: LaunchedRank) -> socket.socket:
    """A socket at `place`, where a process that was killed may have left another one. Raises ResourceError."""
    if not free(place):
        raise ResourceError(f"another process is rank 0 of the ranks that {own.launcher} started (socket {place})")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(str(place))
        listening.listen(own.size)
    except OSError as error:
        listening.close()
        raise ResourceError(f"cannot listen on {place}: {error.strerror}") from error
    return listening


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if numbers[1:] else ''} {', '.join(map(str, numbers))}"
