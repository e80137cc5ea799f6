"""Who reads a program's buffers, and which of them overlap in memory: what fusion has to know."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qcompile.codegen.calls import Call
from qcompile.codegen.program import Program


class Reads:
    """The reads of a program's buffers."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._last = {name: place for place, call in enumerate(program.calls) for name in call.reads}

    def last(self, name: str) -> int:
        """Index of the last call that reads the buffer `name`; -1 if no call does."""
        return self._last.get(name, -1)

    def alone(self, call: Call, name: str) -> bool:
        """Whether `call` is the last call that reads the buffer `name`."""
        return self.last(name) == self._program.calls.index(call)

    def in_place(self, written: str, read: str) -> bool:
        """Whether both buffers are the same memory, element by element."""
        one, other = self._program.buffer(written), self._program.buffer(read)
        return (one.offset, one.stride, one.row_bytes) == (other.offset, other.stride, other.row_bytes)

    def disjoint(self, written: Sequence[str], read: Sequence[str]) -> bool:
        """Whether the memory of written buffers overlaps neither that of the read ones nor each other's."""
        places = [self._program.buffer(name) for name in (*written, *dict.fromkeys(read))]
        spans = sorted((b.offset, b.offset + b.row_bytes) for b in places)
        return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
