"""The memory that the processes of a divided model share, and the process of each rank but the first.

The library of a divided model sums over ranks in that memory, and rank 0 writes the plan of each step there, which the
others read (codegen/cpu/templates/ranks.h). So this module moves nothing: it starts the processes, sees whether they
live, and ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import qcompile
from qcompile.errors import ResourceError

_FAILED, _ENDED = 0, 1  # words of the header: RankHeader in ranks.h
_PATIENCE = 5.0
"""Seconds that a rank has to end by itself."""
FOLLOW = "from qcompile.runtime.cpu.follower import main; main()"
"""What the process of a rank runs."""


class SharedMemory:
    """Zeroed memory that processes share through the file `descriptor`; rank 0 makes it, others open it."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = size
        if descriptor is None:
            descriptor = os.memfd_create("qcompile-ranks")
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        try:
            self._map = mmap.mmap(descriptor, size)
        except OSError as error:
            raise ResourceError(f"cannot share {size:,} bytes of memory between ranks: {error}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._words = (ctypes.c_uint32 * 2).from_buffer(self._map)

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, so that no step will be complete again."""
        return bool(self._words[_FAILED])

    def fail(self) -> None:
        """Make all steps of all ranks return."""
        self._words[_FAILED] = 1

    def end(self) -> None:
        """Make the other ranks end, after their step."""
        self._words[_ENDED] = 1

    def close(self) -> None:
        """Close the file; the memory stays until nothing refers to it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class QcRanks(ctypes.Structure):
    """`qc_ranks` of the generated library."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("ranks", ctypes.c_int32),
        ("rank", ctypes.c_int32),
    ]


class RankSettings(NamedTuple):
    """What the process of a rank is told, as one line of JSON, so that it opens the model as rank 0 did."""

    root: str
    rank: int
    pages: int
    """Pages of the KV cache."""
    threads: int
    max_batch: int
    max_tokens: int
    max_position: int
    descriptor: int
    size: int
    """Bytes of the shared memory."""
    sealed: str
    """The hash of the manifest that rank 0 has read."""

    def line(self) -> str:
        """The settings as a line."""
        return json.dumps(self._asdict()) + "\n"

    @staticmethod
    def of(line: str) -> RankSettings:
        """The settings that `line` made a line."""
        return RankSettings(**json.loads(line))


class RankProcesses:
    """The processes of ranks 1 and up. If one ends before `close`, steps of all ranks fail from then on.

    Raises ResourceError if a process cannot open its part of the model.
    """

    def __init__(self, memory: SharedMemory, settings: list[RankSettings]) -> None:
        self.memory = memory
        self.problem = ""
        self._closing = False
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for each in settings:
                self._processes.append(_started(each, memory.descriptor))
            for rank, process in enumerate(self._processes, start=1):
                _await_ready(rank, process)
        except BaseException:
            self.close()
            raise
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, from rank 1 on."""
        return [process.pid for process in self._processes]

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        status = process.wait()
        if not self._closing and not self.problem:
            self.problem = f"rank {rank} (process {process.pid}) {_ending(status)}: load the model again"
            self.memory.fail()

    def close(self) -> None:
        """End the processes; those that do not end within seconds are killed. Idempotent."""
        self._closing = True
        self.memory.end()
        for process in self._processes:
            with contextlib.suppress(OSError):  # its end is closed already
                process.stdin.close()  # type: ignore[union-attr]
        for process in self._processes:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        self._processes = []
        self.memory.close()


def _started(settings: RankSettings, descriptor: int) -> subprocess.Popen[str]:
    """A process that opens a rank. It ends when its standard input is closed: when this process ends, in any way."""
    package = str(Path(qcompile.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOW],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[descriptor],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    with contextlib.suppress(OSError):  # it has ended already: seen where it is waited for
        process.stdin.write(settings.line())  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    return process


def _await_ready(rank: int, process: subprocess.Popen[str]) -> None:
    """Wait until a process has opened its rank. Raises ResourceError with what it says, if it has not."""
    said: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # nothing or no JSON: it has ended
        said = json.loads(process.stdout.readline())  # type: ignore[union-attr]
    if said.get("ready"):
        return
    if "error" in said:
        raise ResourceError(f"rank {rank}: {said['error']}")
    raise ResourceError(f"rank {rank} (process {process.pid}) {_ending(process.wait(_PATIENCE))} while it loaded")


def _ending(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def join(library: Any, handle: int, memory: SharedMemory, ranks: int, rank: int) -> None:
    """Join an opened model to its other ranks. Raises ResourceError if the library refuses."""
    given = QcRanks(memory.address, memory.size, ranks, rank)
    if library.qc_join(handle, ctypes.byref(given)):
        raise ResourceError(f"rank {rank} of {ranks} cannot join the others: build the artifact again")
