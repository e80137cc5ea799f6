"""The memory that the processes of a divided model share, and the process of each rank but the first.

The library of a divided model sums over ranks in that memory, and rank 0 writes the plan of each step there, which the
others read (codegen/cpu/templates/ranks.h). So this module moves nothing: it has the processes started, sees whether
they live, and ends them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any, NamedTuple

from qcompile.errors import ResourceError
from qcompile.runtime.ranks.crew import start
from qcompile.runtime.ranks.failure import RankFailure
from qcompile.runtime.ranks.processes import RankProcess

# Words of the header: RankHeader in ranks.h. A count has 16 words; those of finished steps follow that of planned ones.
_FAILED, _ENDED, _PLANNED, _COUNT = 0, 1, 16, 16
_PATIENCE = 5.0
"""Seconds that a rank has to end by itself."""


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
        self._words = (ctypes.c_uint32 * (size // 4)).from_buffer(self._map)

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

    def settled(self, rank: int) -> bool:
        """Whether a rank but the first has finished all steps that rank 0 has planned."""
        return bool(self._words[_PLANNED] == self._words[_PLANNED + _COUNT * (1 + rank)])

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
    """What the process of a rank is told first, as one line of JSON, so that it opens the model as rank 0 did."""

    root: str
    rank: int
    pages: int
    """Pages of the KV cache."""
    threads: int
    max_batch: int
    max_tokens: int
    max_position: int
    size: int
    """Bytes of the shared memory."""
    sealed: str
    """The hash of the manifest that rank 0 has read."""


class RankProcesses:
    """The processes of ranks 1 and up. If one ends before `close`, steps of all ranks fail from then on.

    Raises ResourceError if a process cannot open its part of the model.
    """

    def __init__(self, memory: SharedMemory, settings: list[RankSettings]) -> None:
        self.memory = memory
        self.failure = RankFailure()
        self._processes: list[RankProcess] = []
        try:
            for each in settings:
                self._processes.append(start(each.rank, "cpu", [memory.descriptor]))
                self._processes[-1].tell(each._asdict())
            for process in self._processes:
                process.answer()
        except BaseException:
            self.close()
            raise
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), name=f"rank-{process.rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, from rank 1 on."""
        return [process.pid for process in self._processes]

    def ask(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer of each process to a line of JSON. No step may run. Raises ResourceError if one has ended."""
        for process in self._processes:
            process.tell(what)
        return [process.answer(doing="after it loaded") for process in self._processes]

    def _watch(self, process: RankProcess) -> None:
        process.wait()
        if self.failure.note(f"{process.name} {process.ending()}: {process.remedy}"):
            self.memory.fail()

    def close(self) -> None:
        """End the processes; those that do not end within seconds are killed. Idempotent."""
        self.failure.close()
        self.memory.end()
        for process in self._processes:
            process.close_input()
        for process in self._processes:
            process.finish(_PATIENCE)
        self._processes = []
        self.memory.close()


def join(library: Any, handle: int, memory: SharedMemory, ranks: int, rank: int) -> None:
    """Join an opened model to its other ranks. Raises ResourceError if the library refuses."""
    given = QcRanks(memory.address, memory.size, ranks, rank)
    if library.qc_join(handle, ctypes.byref(given)):
        raise ResourceError(f"rank {rank} of {ranks} cannot join the others: build the artifact again")
