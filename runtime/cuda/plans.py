"""The plan of a divided model's steps: rank 0 writes what it sends to its GPU and launches there, and others repeat it.

The plan is a ring of records in memory that all processes share. A record has a kind, two numbers, and bytes. Nothing
in it is an object: inputs are the arrays that rank 0 copies to its GPU, and launches are counts as JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from qcompile.errors import ResourceError
from qcompile.runtime.cuda.counts import PARTS, Counts
from qcompile.runtime.ranks.failure import RankFailure

_HEADER = 4096
_FAILED, _WRITTEN, _READ = 0, 8, 16  # words of 64 bits; from _READ on, each rank has a line of them
_LINE, _BEAT = 8, 1
_RECORD = struct.Struct("<hhiii")
_ALIGNMENT = 16
_NAP = 50e-6


class PlanKind(IntEnum):
    """What a record tells the other processes to do."""

    SKIP = 0
    """Nothing: the next record is at the beginning of the ring."""
    INPUTS = 1
    NUMBERS = 2
    """Random numbers and options of sampling, and lists of tokens behind them."""
    MASKS = 3
    COUNTER = 4
    RUN = 5
    FOLLOW = 6
    STATE = 7
    """Copy a slot of recurrent states to another."""
    END = 8


class Record(NamedTuple):
    """One record of a plan, for the model (path 0) or for a draft that all processes compute."""

    path: int
    kind: PlanKind
    first: int
    second: int
    content: memoryview

    @property
    def counts(self) -> Counts:
        """The content, as counts of a step."""
        numbers: Counts = json.loads(bytes(self.content))
        return numbers


class SharedPlan:
    """Shared memory with room for `size` bytes of records. Rank 0 makes it, others open its `descriptor`."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = size
        if descriptor is None:
            descriptor = os.memfd_create("qcompile-plan")
            os.ftruncate(descriptor, _HEADER + size)
        self.descriptor = descriptor
        try:
            memory = mmap.mmap(descriptor, _HEADER + size)
        except OSError as error:
            raise ResourceError(f"cannot share {size:,} bytes of memory between processes: {error}") from error
        self._words: Any = (ctypes.c_uint64 * (_HEADER // 8)).from_buffer(memory)
        self._ring = memoryview(memory)[_HEADER:]

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, so that no step will be complete again."""
        return bool(self._words[_FAILED])

    def fail(self) -> None:
        """Note that a rank has failed."""
        self._words[_FAILED] = 1

    def close(self) -> None:
        """Close the file; the memory stays until nothing refers to it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # ---- rank 0 -------------------------------------------------------------------------------

    def write(self, readers: int, path: int, kind: PlanKind, first: int, second: int, parts: Sequence[Any]) -> None:
        """Append a record, once all `readers` have read what is in its place. Does nothing if a rank has failed."""
        length = sum(len(part) for part in parts)
        need = _padded(_RECORD.size + length)
        if need + _RECORD.size > self.size // 2:
            raise ResourceError(f"a step takes more than half of the {self.size:,} bytes of the plan that ranks share")
        end: int = self._words[_WRITTEN]
        left = self.size - end % self.size
        if left < need + _RECORD.size:  # so a mark always fits
            if not self._await_room(readers, end + left + need):
                return
            _RECORD.pack_into(self._ring, end % self.size, 0, PlanKind.SKIP, 0, 0, left - _RECORD.size)
            end += left
        elif not self._await_room(readers, end + need):
            return
        at = end % self.size
        _RECORD.pack_into(self._ring, at, path, kind, first, second, length)
        at += _RECORD.size
        for part in parts:
            self._ring[at : at + len(part)] = part
            at += len(part)
        self._words[_WRITTEN] = end + need  # after the record: x86 keeps the order of stores

    def _await_room(self, readers: int, end: int) -> bool:
        """Wait until all ranks have read so far that records up to `end` fit; False if one has failed."""
        while any(end - self._words[_READ + rank * _LINE] > self.size for rank in range(1, readers + 1)):
            if self.failed:
                return False
            time.sleep(_NAP)
        return not self.failed

    def beats(self, rank: int) -> int:
        """How often `rank` has said that it runs."""
        return int(self._words[_READ + rank * _LINE + _BEAT])

    def settled(self, rank: int) -> bool:
        """Whether `rank` has done what all records say."""
        return bool(self._words[_READ + rank * _LINE] == self._words[_WRITTEN])

    # ---- other ranks --------------------------------------------------------------------------

    def beat(self, rank: int) -> None:
        """Say that `rank` runs."""
        self._words[_READ + rank * _LINE + _BEAT] += 1

    def records(self, rank: int) -> Iterator[Record]:
        """The records that are there for `rank`, each of which has been read when the next one is asked for."""
        place = _READ + rank * _LINE
        while (at := int(self._words[place])) < self._words[_WRITTEN]:
            path, kind, first, second, length = _RECORD.unpack_from(self._ring, at % self.size)
            begin = at % self.size + _RECORD.size
            if kind != PlanKind.SKIP:
                yield Record(path, PlanKind(kind), first, second, self._ring[begin : begin + length])
            self._words[place] = at + _padded(_RECORD.size + length)


class PlanWriter:
    """Writes the plan of each step of a path, and wakes the ranks by their `bells` (eventfd descriptors)."""

    def __init__(self, memory: SharedPlan, bells: Sequence[int], path: int = 0) -> None:
        self.memory, self._bells, self._path = memory, bells, path

    def of(self, path: int) -> PlanWriter:
        """The writer for another path: records of all paths are read in the order in which they are written."""
        return PlanWriter(self.memory, self._bells, path)

    def _write(self, kind: PlanKind, *parts: Any, first: int = 0, second: int = 0) -> None:
        self.memory.write(len(self._bells), self._path, kind, first, second, parts)
        for bell in self._bells:
            os.eventfd_write(bell, 1)

    def inputs(self, content: memoryview, turn: int) -> None:
        """Write the arrays of a step's rows."""
        self._write(PlanKind.INPUTS, content, first=turn)

    def numbers(self, numbers: memoryview, lists: memoryview) -> None:
        """Write the sampling inputs of sequences: random numbers and options, and lists of tokens."""
        if numbers:
            self._write(PlanKind.NUMBERS, numbers, lists, first=len(numbers))

    def masks(self, content: memoryview) -> None:
        """Write masks of tokens."""
        self._write(PlanKind.MASKS, content)

    def reset_counter(self, turn: int) -> None:
        """Write that the counter of steps is reset."""
        self._write(PlanKind.COUNTER, first=turn)

    def run(self, counts: Counts, feed_back: bool, part: str, times: int) -> None:
        """Write that a part of the launches of `times` steps runs."""
        content = json.dumps(counts).encode()
        self._write(PlanKind.RUN, content, first=2 * PARTS.index(part) + feed_back, second=times)

    def follow(self, counts: Counts) -> None:
        """Write that the launches run that insert tokens of the step before."""
        self._write(PlanKind.FOLLOW, json.dumps(counts).encode())

    def copy_state(self, source: int, target: int) -> None:
        """Write that a slot of recurrent states is copied to another."""
        self._write(PlanKind.STATE, first=source, second=target)

    def end(self) -> None:
        """Write that no step follows."""
        self._write(PlanKind.END)


class OtherRanks(Protocol):
    """The other processes of a divided model, as the executor of rank 0 uses them. plans: what they repeat."""

    plans: PlanWriter
    failure: RankFailure

    def check(self) -> None:
        """Raise ResourceError if one of them has ended."""

    def close(self) -> None:
        """End them."""


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
