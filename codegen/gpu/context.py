"""Facts that all launches of one program share, and the operands and launches made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qcompile.codegen.buffers import Buffer
from qcompile.codegen.gpu.attention_splits import SplitLimits
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.kv_pages import GpuKV, most_heads
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import ActivationRef, Grid, Operands, ScratchRef, WeightRef
from qcompile.codegen.program import Program
from qcompile.targets import Target


@dataclass(frozen=True)
class PlanContext:
    """A fused program, the KV layout of each layer, positions per attention split, and the GPU.

    Without `inline_asm`, kernels are for Triton's interpreter.
    """

    program: Program
    kvs: tuple[GpuKV, ...]
    split: int
    target: Target
    inline_asm: bool = True

    @property
    def rendered_for(self) -> Target:
        """The GPU for which kernels are rendered; for interpreters, one without programmatic dependent launch."""
        return self.target if self.inline_asm else replace(self.target, capability=80)

    @property
    def capability(self) -> int:
        """The compute capability for which kernels are rendered."""
        return self.rendered_for.capability

    @property
    def limits(self) -> SplitLimits:
        """How decode attention is divided into programs on the target."""
        return SplitLimits(most_heads(self.kvs), self.target.multiprocessors)

    @property
    def hierarchical(self) -> bool:
        """Whether the KV cache is hierarchical."""
        return self.kvs[0].hierarchical

    def buffer(self, name: str) -> Buffer:
        """The buffer called `name`."""
        return self.program.buffer(name)

    def ref(self, name: str, part: Literal["", "scale", "sums"] = "", column: int = 0) -> ActivationRef:
        """Address of a buffer from f32 column `column` on, or of a q8 buffer's scales or sums (`part`)."""
        b = self.buffer(name)
        extra = {"": 0, "scale": b.stride, "sums": b.stride + 4 * b.scales}[part]
        return ActivationRef(b.rows, b.offset + extra, 4 * column)


def weight_refs(**weights: str | None) -> Operands:
    """Addresses of weights by argument; None is left out."""
    return {role: WeightRef(name) for role, name in weights.items() if name is not None}


def single_launch(name: str, by: str, kernel: Kernel, grid: Grid, args: Operands) -> Launch:
    """A launch with one variant, for any number of rows."""
    return Launch(name, by, (Variant(kernel, grid, args),))


def amax_ref(parts: int) -> ScratchRef:
    """Scratch memory for the largest magnitude of each part of a row."""
    return ScratchRef("amax", 4 * parts, ("tokens",))
