"""Sums over the GPUs of a divided model, by kernels that write to the memory of all of them (peer_memory.py).

A sum is in one of three ways, by its size:

    small     one exchange, in which each number carries the number of the exchange: the fewest steps one after another
    medium    one exchange, in which each program writes a flag behind all its parts
    large     two steps among more than two GPUs: each GPU sums some chunks, and sends their totals to all

Each counts its sums in memory of the GPU, so graphs replay them. All add in the order of ranks, element by element: the
bits depend neither on timing nor on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from qcompile.codegen.calls import AllGather, AllReduce
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.context import PlanContext
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import MOST_ROWS, Launch, Variant
from qcompile.codegen.gpu.operands import CountRef, Grid, GridSize, InputRef, Operands, PeerRef, RankRef
from qcompile.codegen.gpu.peer_memory import (
    CHUNK,
    MEDIUM_ITEMS,
    MOST_PROGRAMS,
    SMALL_BLOCK,
    SMALL_PROGRAMS,
    STATE,
    STATE_BYTES,
    PeerLayout,
)
from qcompile.targets import has_pdl

Way = Literal["small", "medium", "large"]
_BLOCK: dict[Way, int] = {"small": SMALL_BLOCK, "medium": 1024, "large": CHUNK}
"""Elements that a program handles at a time."""
RESIDENT = 2
"""Programs a multiprocessor of kernels that exchange in one step: all run at once, since they wait for each other."""
_GLANCES, _PATIENCE = 1 << 8, 1 << 16
"""Looks at memory that another GPU writes to, between two looks at this GPU's word and at the host's, which say whether
a GPU has failed; powers of two. The host's word is read seldom (in about 20 ms), since reads by every warp of memory
beyond PCIe take longer than a whole sum. Who finds it set sets the GPU's, so that all later sums end at once."""


def peer_arguments(ranks: int) -> list[Argument]:
    """The arguments of a kernel that exchanges with other GPUs, behind its others."""
    state = [Argument("state", "*i32"), Argument("failed", "*i32"), Argument("rank", "i32")]
    return state + [Argument(name, "*i64") for name in ("own", *(f"peer{rank}" for rank in range(ranks)))]


def peer_operands(ranks: int) -> Operands:
    """What a launch passes for `peer_arguments`."""
    args: Operands = {"state": InputRef("sums"), "failed": InputRef("failed"), "rank": RankRef(), "own": PeerRef()}
    return args | {f"peer{rank}": PeerRef(rank) for rank in range(ranks)}


def exchange_facts(layout: PeerLayout, capability: int, asm: bool) -> dict[str, Any]:
    """Values for templates of kernels that exchange. Without `asm` kernels do not wait, for Triton's interpreter."""
    return {
        "layout": layout,
        "first_counter": STATE,
        "most_programs": MOST_PROGRAMS,
        "patience": _PATIENCE,
        "glances": _GLANCES,
        "asm": asm,
        "pdl": has_pdl(capability),
    }


@dataclass(frozen=True)
class SumSpec:
    """out[row] = other[row] + the sum over `ranks` of x[row], rows of `width` f32; strides are in elements.

    Without `other_stride` there is no `other`. `way`: see above. `layout` is that of peer memory.
    """

    width: int
    x_stride: int
    out_stride: int
    layout: PeerLayout
    way: Way = "small"
    other_stride: int = 0

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.layout.ranks

    @property
    def programs(self) -> int:
        """Programs per row of a small sum."""
        return -(-self.width // SMALL_BLOCK)

    def kernel(self, capability: int, asm: bool = True) -> Kernel:
        """The kernel for a compute capability. Without `asm` it does not wait, for Triton's interpreter: run those of
        all ranks three times for a large sum and else two times, with the same number of the sum."""
        arguments = [Argument("x", "*fp32"), Argument("out", "*fp32")]
        arguments += [Argument("other", "*fp32")] * bool(self.other_stride)
        arguments += [Argument("tokens", "i32")] * (self.way != "small")
        arguments += peer_arguments(self.ranks)
        name = f"sum_{self.way}_{self.ranks}"
        source = render_template(
            "all_reduce.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            small_items=SMALL_BLOCK * SMALL_PROGRAMS,
            block=_BLOCK[self.way],
            parts=[f"part{rank}" for rank in range(self.ranks)],
            **exchange_facts(self.layout, capability, asm),
        )
        return Kernel(name, source, tuple(arguments), 8, 1, has_pdl(capability))


def all_reduce(context: PlanContext, c: AllReduce | fused.SumAdd) -> Iterator[Launch]:
    """The launch of a sum over ranks, in the way that suits the number of rows."""
    x, out = context.buffer(c.x), context.buffer(c.out)
    args: Operands = {"x": context.ref(c.x), "out": context.ref(c.out), "tokens": CountRef(out.rows)}
    other_stride = 0
    if isinstance(c, fused.SumAdd):
        args["other"], other_stride = context.ref(c.other), context.buffer(c.other).stride
    args |= peer_operands(c.ranks)
    layout = peer_layout(context, c.ranks)

    def variant(way: Way, grid: Grid, most: int = 0) -> Variant:
        spec = SumSpec(out.width, x.stride, out.stride, layout, way, other_stride)
        return Variant(spec.kernel(context.capability, context.inline_asm), grid, args, most)

    programs = -(-out.width // SMALL_BLOCK)
    multiprocessors = context.target.multiprocessors
    variants = []
    if few := SMALL_PROGRAMS // programs:
        variants.append(variant("small", (GridSize(out.rows), programs, 1), few))
    if c.ranks == 2 or (some := MEDIUM_ITEMS // out.width) > few:
        variants.append(variant("medium", (RESIDENT * multiprocessors, 1, 1), 0 if c.ranks == 2 else some))
    if c.ranks > 2:
        variants.append(variant("large", (multiprocessors, 1, 1)))
    yield Launch(c.name, out.rows, tuple(variants))


def peer_layout(context: PlanContext, ranks: int) -> PeerLayout:
    """The layout of the peer memory of the program's exchanges among `ranks` GPUs."""
    gathered = [call.width for call in context.program.calls if isinstance(call, AllGather)]
    return PeerLayout(ranks, MOST_ROWS * widest_sum(context), max(gathered, default=0))


def widest_sum(context: PlanContext) -> int:
    """Elements of a row of the widest sum of the program; 0 if it has none."""
    sums = [call for call in context.program.calls if isinstance(call, AllReduce | fused.SumAdd)]
    return max((context.buffer(call.out).width for call in sums), default=0)


def sums_of(context: PlanContext) -> dict[str, int]:
    """What the runtime has to know of exchanges among GPUs, as in a launch plan; empty if there are none."""
    calls = [call for call in context.program.calls if isinstance(call, AllReduce | fused.SumAdd | AllGather)]
    if not calls:
        return {}
    layout = peer_layout(context, calls[0].ranks)
    result = {"ranks": layout.ranks, "width": widest_sum(context), "chunk": CHUNK, "data": layout.data}
    return result | {"state": STATE_BYTES} | ({"logits": layout.logits} if layout.vocab else {})
