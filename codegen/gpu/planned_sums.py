"""The sums over GPUs of a divided model's program: what owners of rows send, and the peer memory for them."""

from __future__ import annotations

import math

from qcompile.codegen.buffers import Buffer
from qcompile.codegen.calls import AllGather, AllReduce, Call
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.context import PlanContext
from qcompile.codegen.gpu.exchange import RowArray, result_bytes
from qcompile.codegen.gpu.peer_memory import PeerLayout

Sum = AllReduce | fused.SumAdd | fused.SumNorm
_SPREAD, _LEAST_SPREAD = 256, 64
"""Most and fewest elements of a program in sums of few rows, unless it has a row."""


def result_of(c: Sum) -> str:
    """The buffer that the row kernel of a sum writes at last."""
    return c.norm.out if isinstance(c, fused.SumNorm) else c.out


def added_to(c: Sum) -> str | None:
    """What a sum over ranks is added to."""
    added = c.sum if isinstance(c, fused.SumNorm) else c
    return added.other if isinstance(added, fused.SumAdd) else None


def sent_arrays(context: PlanContext, c: Sum) -> tuple[RowArray, ...]:
    """What the owner of a row sends: the result, and the sum itself if others read it."""
    out = context.buffer(result_of(c))
    arrays = _arrays_of(out)
    if isinstance(c, fused.SumNorm) and _is_read_whole(context.program.calls, c.total):
        total = context.buffer(c.total)
        arrays += (RowArray("total", total.stride, total.width),)
    return arrays


def _arrays_of(out: Buffer) -> tuple[RowArray, ...]:
    """The arrays of a row kernel's result."""
    size = {"f32": 4, "bf16": 2, "q8": 1}[out.dtype]
    arrays = [RowArray("out", out.stride * size // 4, -(-out.width * size // 4))]
    if out.dtype == "q8":
        arrays.append(RowArray("out_scale", out.scales, out.scales))
        if out.whole_sum:
            arrays.append(RowArray("out_sum", out.groups, out.groups))
    return tuple(arrays)


def _is_read_whole(calls: tuple[Call, ...], name: str) -> bool:
    """Whether a call reads all rows of the sum `name`: any call but the sum's own norm, and sums that add it."""
    for call in calls:
        own = isinstance(call, fused.SumNorm) and call.total == name
        adds = isinstance(call, Sum) and added_to(call) == name and call.x != name
        if name in call.reads and not own and not adds:
            return True
    return False


def sums_in(context: PlanContext) -> list[Sum]:
    """The sums over ranks of the program."""
    return [call for call in context.program.calls if isinstance(call, Sum)]


def peer_layout(context: PlanContext) -> PeerLayout:
    """The layout of the peer memory of the program's exchanges."""
    sums = sums_in(context)
    gathered = [call for call in context.program.calls if isinstance(call, AllGather)]
    width = max((context.buffer(c.x).width for c in sums), default=0)
    results = max((result_bytes(sent_arrays(context, c)) for c in sums), default=0)
    spread = math.gcd(_SPREAD, *(context.buffer(c.x).width for c in sums))
    ranks = next(call.ranks for call in (*sums, *gathered))
    vocab = max((call.width for call in gathered), default=0)
    return PeerLayout(ranks, width, results, vocab, spread if spread >= _LEAST_SPREAD else 0)


def sums_of(context: PlanContext) -> dict[str, int]:
    """What the runtime has to know of exchanges among GPUs, as in a launch plan; empty if there are none."""
    if not any(isinstance(call, Sum | AllGather) for call in context.program.calls):
        return {}
    layout = peer_layout(context)
    result = {"ranks": layout.ranks, "data": layout.data, "group": layout.group_bytes, "state": layout.state_bytes}
    return result | ({"logits": layout.logits} if layout.vocab else {})
