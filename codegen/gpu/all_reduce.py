"""Sums over the GPUs of a divided model, by kernels that write to the memory of all of them (peer memory).

Every GPU has one block of memory that the others write to:

    small     int64 [2][ranks][SMALL_ITEMS]: a part's float32 bits, below the number of the sum in the upper half
    arrived   int32 [ranks][most chunks]: the last sum to which rank r has written its part of an owned chunk
    summed    int32 [most chunks]: the last sum whose total of a chunk is in `data`
    data      float32 [groups][2][ranks][CHUNK]: of `ranks` chunks, the parts of the owned one, and all totals

Sums are numbered by a counter in memory of each GPU, which the last program of a sum advances; so graphs replay them.
All sums are in the order of ranks, element by element: the bits depend neither on timing nor on the number of rows.

Each GPU waits for all others in each sum, and starts a sum only when the one before it has ended. So when it has ended
sum e, all others have ended sum e - 1, and it may write where parts of sum e - 1 were: two places for small sums are
enough. Larger sums need one place, since they end only when all chunks have been summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qcompile.codegen.calls import AllReduce
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.context import PlanContext
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import MOST_ROWS, Launch, Variant
from qcompile.codegen.gpu.operands import CountRef, GridSize, InputRef, Operands, PeerRef, RankRef
from qcompile.targets import has_pdl

SMALL_ITEMS = 1 << 16
"""Most elements of a sum in one exchange: 256 KiB."""
CHUNK = 4096
"""Elements that one program of a larger sum handles at a time."""
_SMALL_BLOCK = 256
"""Elements of a program of a small sum."""
_GLANCES, _PATIENCE = 1 << 8, 1 << 16
"""Looks at memory that another GPU writes to, between two looks at this GPU's word and at the host's, which say whether
a GPU has failed; powers of two. The host's word is read seldom (in about 20 ms), since reads by every warp of memory
beyond PCIe take longer than a whole sum. Who finds it set sets the GPU's, so that all later sums end at once."""


@dataclass(frozen=True)
class PeerLayout:
    """Where the parts of a GPU's peer memory begin, in bytes, if no sum has more than `items` elements."""

    ranks: int
    items: int

    @property
    def chunks(self) -> int:
        """Most chunks of a sum, a multiple of the ranks."""
        return -(-self.items // (CHUNK * self.ranks)) * self.ranks

    @property
    def arrived(self) -> int:
        """Where `arrived` begins."""
        return 2 * self.ranks * SMALL_ITEMS * 8

    @property
    def summed(self) -> int:
        """Where `summed` begins."""
        return self.arrived + 4 * self.ranks * self.chunks

    @property
    def data(self) -> int:
        """Where `data` begins, aligned to 1 KiB."""
        return -(-(self.summed + 4 * self.chunks) // 1024) * 1024


@dataclass(frozen=True)
class SumSpec:
    """out[row] = other[row] + the sum over `ranks` of x[row], rows of `width` f32; strides are in elements.

    Without `other_stride` there is no `other`. `large`: in two steps, by chunks. `layout` is that of peer memory.
    """

    width: int
    x_stride: int
    out_stride: int
    layout: PeerLayout
    large: bool = False
    other_stride: int = 0

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.layout.ranks

    @property
    def programs(self) -> int:
        """Programs per row of a small sum."""
        return -(-self.width // _SMALL_BLOCK)

    def kernel(self, capability: int, asm: bool = True) -> Kernel:
        """The kernel for a compute capability. Without `asm` it does not wait, for Triton's interpreter: run those of
        all ranks two times for a small sum and three times for a large one, with the same number of the sum."""
        arguments = [Argument("x", "*fp32"), Argument("out", "*fp32")]
        arguments += [Argument("other", "*fp32")] * bool(self.other_stride)
        arguments += [Argument("tokens", "i32")] * self.large
        arguments += [Argument("state", "*i32"), Argument("failed", "*i32"), Argument("rank", "i32")]
        arguments += [Argument(name, "*i64") for name in ("own", *(f"peer{rank}" for rank in range(self.ranks)))]
        name = "_".join(("sum", "large" if self.large else "small", str(self.ranks)))
        source = render_template(
            "all_reduce.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            layout=self.layout,
            small_items=SMALL_ITEMS,
            block=CHUNK if self.large else _SMALL_BLOCK,
            patience=_PATIENCE,
            glances=_GLANCES,
            parts=[f"part{rank}" for rank in range(self.ranks)],
            asm=asm,
            pdl=has_pdl(capability),
        )
        return Kernel(name, source, tuple(arguments), 8, 1, has_pdl(capability))


def all_reduce(context: PlanContext, c: AllReduce | fused.SumAdd) -> Iterator[Launch]:
    """The launch of a sum over ranks, in one exchange for few rows."""
    x, out = context.buffer(c.x), context.buffer(c.out)
    args: Operands = {"x": context.ref(c.x), "out": context.ref(c.out), "tokens": CountRef(out.rows)}
    other_stride = 0
    if isinstance(c, fused.SumAdd):
        args["other"], other_stride = context.ref(c.other), context.buffer(c.other).stride
    args |= {"state": InputRef("sums"), "failed": InputRef("failed"), "rank": RankRef(), "own": PeerRef()}
    args |= {f"peer{rank}": PeerRef(rank) for rank in range(c.ranks)}
    layout = PeerLayout(c.ranks, MOST_ROWS * widest_sum(context))
    spec = SumSpec(out.width, x.stride, out.stride, layout, other_stride=other_stride)
    variants = []
    if few := SMALL_ITEMS // out.width:
        grid = GridSize(out.rows), spec.programs, 1
        variants.append(Variant(spec.kernel(context.capability, context.inline_asm), grid, args, few))
    large = SumSpec(out.width, x.stride, out.stride, layout, True, other_stride)
    kernel = large.kernel(context.capability, context.inline_asm)
    variants.append(Variant(kernel, (context.target.multiprocessors, 1, 1), args))
    yield Launch(c.name, out.rows, tuple(variants))


def widest_sum(context: PlanContext) -> int:
    """Elements of a row of the widest sum of the program; 0 if it has none."""
    sums = [call for call in context.program.calls if isinstance(call, AllReduce | fused.SumAdd)]
    return max((context.buffer(call.out).width for call in sums), default=0)


def sums_of(context: PlanContext) -> dict[str, int]:
    """What the runtime has to know of sums over ranks, as in a launch plan; empty if there are none."""
    calls = [call for call in context.program.calls if isinstance(call, AllReduce | fused.SumAdd)]
    if not calls:
        return {}
    layout = PeerLayout(calls[0].ranks, MOST_ROWS * widest_sum(context))
    return {"ranks": layout.ranks, "width": widest_sum(context), "chunk": CHUNK, "data": layout.data}
