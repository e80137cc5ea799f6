"""Whether one kernel may do the work of two calls: who else reads a buffer, and which memory overlaps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qcompile import ops
from qcompile.codegen import program as p


class Reads:
    """The reads of a program's buffers."""

    def __init__(self, program: p.Program) -> None:
        self._program = program
        self._last = {name: place for place, call in enumerate(program.calls) for name in call.reads}

    def last(self, name: str) -> int:
        """Index of the last call that reads the buffer `name`; -1 if no call does."""
        return self._last.get(name, -1)

    def alone(self, call: p.Call, name: str) -> bool:
        """Whether `call` is the last call that reads the buffer `name`."""
        return self.last(name) == self._program.calls.index(call)

    def disjoint(self, written: Sequence[str], read: Sequence[str]) -> bool:
        """Whether the memory of written buffers overlaps neither that of the read ones nor each other's."""
        places = [self._program.buffer(name) for name in (*written, *dict.fromkeys(read))]
        spans = sorted((b.offset, b.offset + b.row_bytes) for b in places)
        return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))

    def rounded(self, c: p.Gemm | p.Attention, after: p.Call | None) -> str | None:
        """The buffer to which kernels of a GEMM or attention can write their result in bf16, or None.

        They can if only the next call, `after`, reads the result, and only rounds it.
        """
        if not isinstance(after, p.Quantize) or after.x != c.out or self._program.buffer(after.out).dtype != "bf16":
            return None
        if isinstance(c, p.Gemm):
            gated = c.epilogue in ops.GATED
            kept = (gated or c.epilogue == "store") and c.residual is None and not c.blocks and c.format != "f32"
            read, width = c.x, c.n // 2 if gated else c.n
        else:
            kept, read, width = True, c.q, c.heads * c.head_dim
        whole = kept and self._program.buffer(after.out).stride == width
        return after.out if whole and self.alone(after, after.x) and self.disjoint([after.out], [read]) else None
