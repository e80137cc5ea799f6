"""Data flow of a program on the CPU: private copies of buffers, and columns split over threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qcompile.codegen.buffers import Buffer
from qcompile.codegen.calls import Attention, Call, Gemm, Hadamard, Norm, QuantizeRows, RopeAppend, TakeRows
from qcompile.codegen.feature_calls import WriteFeatures
from qcompile.codegen.program import Program
from qcompile.codegen.sizes import round_up
from qcompile.ops import GATED

ALIGNMENT = 64
"""Offsets in the arena are multiples of this: the bytes of a cache line."""
LINE_COLUMNS = 32
"""bf16 columns per cache line: threads that write whole lines do not share lines."""


def writes_outputs(program: Program, call: Call) -> bool:
    """Whether a call computes only the rows with requested logits, or the logits."""
    names = call.reads if isinstance(call, WriteFeatures) else call.writes
    return all(program.buffer(name).rows == "outputs" for name in names)


def own_buffers(program: Program) -> frozenset[str]:
    """Buffers that only rowwise calls write, each from one other buffer: threads may have private copies."""
    alone = Norm | QuantizeRows | Hadamard | TakeRows
    rowwise = {name for c in program.calls if isinstance(c, alone) for name in [c.out]}
    shared = {name for c in program.calls if not isinstance(c, alone) for name in c.writes}
    attended = {c.q for c in program.calls if isinstance(c, Attention)}
    return frozenset(rowwise - shared - attended)


def overlap(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers share bytes of the arena."""
    return a.rows == b.rows and a.offset < b.offset + b.row_bytes and b.offset < a.offset + a.row_bytes


@dataclass(frozen=True)
class Share:
    """A thread's share of a buffer's columns, split by `units` of `columns` columns each.

    `units` and `where` (the start of the condition) are C++ expressions. Every share consists of whole groups of `step`
    columns if and only if `condition` holds at run time.
    """

    units: str
    columns: int
    step: int
    where: str = ""

    @property
    def condition(self) -> str:
        """The C++ condition for whole groups, see Step::whole."""
        return f"{self.where}s.whole({self.units}, {self.columns}, {self.step})"

    @property
    def range(self) -> str:
        """The C++ expression for this thread's columns, see Step::columns."""
        return f"s.columns({self.units}, {self.columns})"


def producer_share(program: Program, index: int) -> Share | None:
    """The columns that each thread quantizes in call `index` right after producing them, before a barrier; else None.

    The call before must split its output by columns, its result must have no other reader, and at run time a share must
    be whole scale groups (Step::whole). The quantized values are the same as with a barrier between the calls, and
    threads exchange a quarter or half of the bytes.
    """
    call, maker = program.calls[index], program.calls[index - 1] if index else None
    if not isinstance(call, QuantizeRows) or maker is None or call.x not in maker.writes:
        return None
    x, out = program.buffer(call.x), program.buffer(call.out)
    step = out.kind.group if out.dtype == "q8" else LINE_COLUMNS
    if not step or x.width % step or (out.dtype == "q8" and (not out.group or step % out.group)):
        return None
    if x.rows != "tokens" or sum(call.x in c.reads for c in program.calls) != 1:
        return None
    if isinstance(maker, Attention):
        heads = maker.kv_heads
        return Share(str(heads), maker.heads // heads * maker.value_dim, step, f"s.by_head({heads}) && ")
    if isinstance(maker, Gemm) and not maker.blocks and maker.epilogue in ("store", *GATED):
        return Share(str(-(-maker.n // 32)), 16 if maker.epilogue in GATED else 32, step)
    return None


def separate_buffers(program: Program) -> Program:
    """The program with buffers that are split by columns moved to separate memory, after all other buffers.

    In memory reused by buffers with another split, every line would need a read-for-ownership from another core's
    cache before it is written. Buffers of the same shape and type share memory, as their columns are split alike.
    """
    names = {call.qkv: None for call in program.calls if isinstance(call, RopeAppend)}
    for index, call in enumerate(program.calls):
        if isinstance(call, QuantizeRows) and producer_share(program, index):
            names |= {call.x: None, call.out: None}
    places: dict[tuple[str, int, int, str], list[tuple[int, list[range]]]] = {}
    moved = _without_gaps([b for b in program.buffers if b.rows == "tokens" and b.name not in names])
    end = max((round_up(b.offset + b.row_bytes, ALIGNMENT) for b in moved.values()), default=0)
    for name in names:
        buffer, life = program.buffer(name), _live_range(program, name)
        alike = places.setdefault((buffer.dtype, buffer.width, buffer.group, buffer.activation), [])
        free = (
            place
            for place in alike
            if not any(life.start < other.stop and other.start < life.stop for other in place[1])
        )
        place = next(free, None)
        if place is None:
            place = end, []
            alike.append(place)
            end += round_up(buffer.row_bytes, ALIGNMENT)
        place[1].append(life)
        moved[name] = replace(buffer, offset=place[0])
    return replace(program, buffers=tuple(moved.get(buffer.name, buffer) for buffer in program.buffers))


def _without_gaps(buffers: Sequence[Buffer]) -> dict[str, Buffer]:
    """These buffers by name, moved down so that no bytes between them are unused; those that overlap still do."""
    moved: dict[str, Buffer] = {}
    end = gap = 0
    for buffer in sorted(buffers, key=lambda buffer: buffer.offset):
        if buffer.offset > end:
            gap += buffer.offset - end
        end = max(end, round_up(buffer.offset + buffer.row_bytes, ALIGNMENT))
        moved[buffer.name] = replace(buffer, offset=buffer.offset - gap)
    return moved


def _live_range(program: Program, name: str) -> range:
    """Live range of a buffer: from the first call that uses it to 4 calls past the last.

    The extension covers how far a faster thread may run ahead without a barrier: through q, k, v and their attention.
    """
    used = [i for i, call in enumerate(program.calls) if name in call.writes or name in call.reads]
    return range(used[0], used[-1] + 5)
