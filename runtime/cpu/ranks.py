"""The memory that the processes of a divided model share, and the process of each rank but the first.

The library of a divided model sums over ranks in that memory, and rank 0 writes the plan of each step there, which the
others read (codegen/cpu/templates/ranks.h). So this module moves nothing: it has the processes started, sees whether
they live, and ends them.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from qcompile.errors import ResourceError
from qcompile.runtime.ranks.crew import start
from qcompile.runtime.ranks.failure import RankFailure
from qcompile.runtime.ranks.processes import RankProcess
from qcompile.runtime.ranks.watching import watch

# Words of the header: RankHeader in ranks.h. A count has 16 words; those of finished steps follow that of planned ones.
_FAILED, _ENDED, _PLANNED, _COUNT = 0, 1, 16, 16
_PAGE = 4096
_LAST_WORD = _PAGE // 4 - 1  # of the first path's header; beats of ranks are from there down
_PATIENCE = 5.0
"""Seconds that a rank has to end by itself."""
_NAP = 20e-6
"""Seconds between two looks whether a rank has finished its step: others finish within as much of rank 0."""


class SharedMemory:
    """Zeroed memory that processes share through the file `descriptor`; rank 0 makes it, others open it.

    It has a part for each path of the model, of `sizes` bytes, which begins with a header. Behind them are `numbers`
    numbers, those of the adapters that pages of the cache have.
    """

    def __init__(self, sizes: Sequence[int], descriptor: int | None = None, numbers: int = 0) -> None:
        self.sizes = [-(-size // _PAGE) * _PAGE for size in sizes]
        end = sum(self.sizes)
        size = end + 4 * numbers
        if descriptor is None:
            descriptor = os.memfd_create("qcompile-ranks")
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        try:
            self._map = mmap.mmap(descriptor, size)
        except OSError as error:
            raise ResourceError(f"cannot share {size:,} bytes of memory between ranks: {error}") from error
        starts = list(itertools.accumulate(self.sizes, initial=0))[:-1]
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.addresses = [address + start for start in starts]
        """Where the part of each path begins."""
        self.numbers: Any = (ctypes.c_int32 * numbers).from_buffer(self._map, end) if numbers else None
        self._words = [(ctypes.c_uint32 * (_PAGE // 4)).from_buffer(self._map, start) for start in starts]

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, so that no step will be complete again."""
        return any(words[_FAILED] for words in self._words)

    def fail(self) -> None:
        """Make all steps of all ranks return."""
        for words in self._words:
            words[_FAILED] = 1

    def end(self) -> None:
        """Make the other ranks end, after their step."""
        for words in self._words:
            words[_ENDED] = 1

    def settled(self, rank: int) -> bool:
        """Whether a rank but the first has finished all steps that rank 0 has planned."""
        return all(words[_PLANNED] == words[_PLANNED + _COUNT * (1 + rank)] for words in self._words)

    def beat(self, rank: int) -> None:
        """Say that the process of `rank` runs."""
        self._words[0][_LAST_WORD - rank] += 1

    def beats(self, rank: int) -> int:
        """How often the process of `rank` has said that it runs."""
        return int(self._words[0][_LAST_WORD - rank])

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
        ("other_paths", ctypes.c_void_p),
        ("other_count", ctypes.c_int32),
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
    sizes: list[int]
    """Bytes of the shared memory of each path."""
    drafts: bool
    """Whether draft paths are open."""
    sealed: str
    """The hash of the manifest that rank 0 has read."""
    copies: int = 0
    """Slots for copies of recurrent states, behind those of requests."""
    adapters: Sequence[Sequence[str]] = ()
    """The name and the folder of each adapter of requests, and the hash of its files as rank 0 has read them."""

    kernels: str = ""
    """The hash of the rebuilt kernels that rank 0 has loaded in place of the artifact's own; empty without any."""

    @property
    def numbers(self) -> int:
        """How many numbers of adapters ranks share."""
        return self.pages if self.adapters else 0


class RankProcesses:
    """The processes of ranks 1 and up. If one ends before `close`, or does not run, steps of all ranks fail after that.

    Raises ResourceError if a process cannot open its part of the model.
    """

    def __init__(self, memory: SharedMemory, settings: list[RankSettings]) -> None:
        self.memory = memory
        self.failure, self._closing = RankFailure(), False
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

    def settle(self) -> None:
        """Wait until all have finished the steps that rank 0 has planned, or one has failed, so that no step ends."""
        ranks = range(1, 1 + len(self._processes))
        while not self.memory.failed and not all(map(self.memory.settled, ranks)):
            time.sleep(_NAP)

    def copy_state(self, source: int, target: int) -> None:
        """Have each process copy a slot of recurrent states to another. Raises ResourceError if one cannot."""
        for rank, answer in enumerate(self.ask({"copy": [source, target]}), 1):
            if "problem" in answer:
                raise ResourceError(f"rank {rank}: {answer['problem']}")

    def _watch(self, process: RankProcess) -> None:
        problem = watch(process, self.memory.beats, lambda: self._closing)
        if problem and self.failure.note(problem):
            self.memory.fail()

    def close(self) -> None:
        """End the processes; those that do not end within seconds are killed. Idempotent."""
        self._closing = True
        self.failure.close()
        self.memory.end()
        for process in self._processes:
            process.close_input()
        for process in self._processes:
            process.finish(_PATIENCE)
        self._processes = []
        self.memory.close()


class OpenedPath(Protocol):
    """A path of a divided model: the executor of the model or of a draft that shares its weights."""

    library: Any
    handle: int | None


def join(paths: Sequence[OpenedPath], memory: SharedMemory, ranks: int, rank: int) -> None:
    """Join the opened paths of a rank to those of the others. Raises ResourceError if a library refuses."""
    for number, path in enumerate(paths):
        rest = [address for other, address in enumerate(memory.addresses) if other != number]
        others = (ctypes.c_void_p * len(rest))(*rest)
        place = memory.addresses[number], memory.sizes[number]
        given = QcRanks(*place, ranks, rank, ctypes.addressof(others), len(rest))
        if path.library.qc_join(path.handle, ctypes.byref(given)):
            raise ResourceError(f"rank {rank} of {ranks} cannot join the others: build the artifact again")
