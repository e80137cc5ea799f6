"""The logits of a divided model: each GPU writes those that it has computed to the memory of all (peer_memory.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qcompile.codegen.calls import AllGather
from qcompile.codegen.gpu.context import PlanContext, single_launch
from qcompile.codegen.gpu.exchange import exchange_facts, peer_arguments, peer_operands
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import Launch
from qcompile.codegen.gpu.operands import CountRef
from qcompile.codegen.gpu.peer_memory import PeerLayout
from qcompile.codegen.gpu.planned_sums import peer_layout
from qcompile.codegen.gpu.sample import choosing
from qcompile.targets import has_pdl

BLOCK = 1024
"""Elements that a program handles at a time."""
RESIDENT = 2
"""Programs a multiprocessor: all run at once, since they wait for those of other GPUs."""


@dataclass(frozen=True)
class AllGatherSpec:
    """logits[row] = x[row] of all ranks side by side, `part` f32 of each; a row of logits has `layout.vocab`."""

    part: int
    x_stride: int
    layout: PeerLayout

    def kernel(self, capability: int, asm: bool = True) -> Kernel:
        """The kernel for a compute capability. Without `asm` it does not wait, for Triton's interpreter."""
        ranks = self.layout.ranks
        arguments = [Argument("x", "*fp32"), Argument("rows", "i32"), *peer_arguments(ranks)]
        facts = exchange_facts(self.layout, capability, asm)
        name = f"gather_{ranks}"
        source = render_template("all_gather.py.jinja", spec=self, name=name, arguments=arguments, block=BLOCK, **facts)
        return Kernel(name, source, tuple(arguments), 8, 1, has_pdl(capability))


def all_gather(context: PlanContext, c: AllGather) -> Iterator[Launch]:
    """The launches that gather logits and choose tokens."""
    x = context.buffer(c.x)
    spec = AllGatherSpec(x.width, x.stride, peer_layout(context))
    kernel = spec.kernel(context.capability, context.inline_asm)
    args = {"x": context.ref(c.x), "rows": CountRef("outputs"), **peer_operands(c.ranks)}
    yield single_launch(c.name, "outputs", kernel, (RESIDENT * context.target.multiprocessors, 1, 1), args)
    yield from choosing(c.name, c.width, context.capability)
