"""GPU kernels of attention over one key head; its last features are the values (passes/latent.py).

All query heads read the same keys, so they are the rows of matrix products with pages of keys: scores, and sums of the
values, which are part of what was loaded for the scores. Batch invariance is as in codegen/gpu/attention.py, with one
level of sums less: pages are summed in order within a split, and splits in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.kv_pages import GpuKV, page_arguments
from qcompile.codegen.gpu.operands import GridSize
from qcompile.codegen.gpu.visible_keys import VisibleKeys
from qcompile.codegen.sizes import power_of_two
from qcompile.formats.kv import LATENT_GROUP, PAGE_TOKENS

LEAST_ROWS = 16
"""Fewest rows that an MMA takes."""
MOST_ROWS = {90: 64}
"""Most rows of a program by compute capability: those of a wgmma. Its sums fill the registers of 8 warps."""
OTHER_ROWS = 32
"""Most rows with other MMAs: they also have their first operand in registers."""
WHOLE_PAGES = 160 << 10
"""Fewest bytes of shared memory that hold the keys of two pages, one of which is loaded during products with the other.
With less, half a page is loaded at a time."""
SUMS = 64
"""Sums per thread, if that takes at most MOST_WARPS."""
MOST_WARPS = 8
SPECIALIZED_ROWS = 64
"""Rows of a wgmma, and of a warp-specialized program: with fewer heads some are idle, which costs no time there."""
SPECIALIZED_VALUES, SPECIALIZED_SHARED = (128, 256, 512), 64
"""Features of values, and those that keys have besides, in whole swizzled rows of shared memory of 128 bytes."""
MEAN_REGISTERS = 168
"""Registers of a thread, on average over all three groups of warps."""


@dataclass(frozen=True)
class LatentSpec(VisibleKeys):
    """Flash attention of `heads` query heads over pages of latents. A program has `rows` rows: (token, head) pairs.

    q is f32 [tokens, q_stride]. `cut` "split": a program sums `split` positions, and MergeSpec merges the partial
    results. "whole": it sums all positions in the same order, and writes f32 [tokens, heads * value features]. Scores
    are capped, biased by position and joined by sinks as in AttentionSpec.
    """

    kv: GpuKV
    heads: int
    q_stride: int
    scale: float
    softcap: float = 0.0
    split: int = 512
    cut: Literal["split", "whole"] = "split"
    rows: int = LEAST_ROWS
    leaf: int = PAGE_TOKENS
    """Positions that are loaded at a time."""
    stages: int = 2
    """Stages of the pipeline of loads."""
    inline_asm: bool = True
    bias_positions: int = 0
    sinks: bool = False
    warp_specialized: bool = False
    """Whether warps that copy, and two groups of warps that compute, do so at the same time (sm_90, 64 rows, bf16)."""

    @property
    def title(self) -> str:
        """Title of the generated source."""
        positions = "all" if self.cut == "whole" else str(self.split)
        return f"Attention of {self.heads} heads over {self.kv.format} latents, {self.rows} rows, {positions} positions"

    @property
    def warps(self) -> int:
        """Warps per program; with `warp_specialized`, those of one of three groups."""
        return (
            4
            if self.warp_specialized
            else max(4, min(MOST_WARPS, self.rows * power_of_two(self.kv.value_dim) // (32 * SUMS)))
        )

    @property
    def arguments(self) -> list[Argument]:
        """The kernel's arguments in order."""
        arguments = [Argument("q", "*fp32"), *page_arguments(self.kv)]
        arguments += [Argument(name, "*i32") for name in ("positions", "query_start", "block_table")]
        arguments += [Argument("key_bias", "*fp32")] * bool(self.bias_positions)
        if self.cut == "whole":
            arguments += [Argument("sinks", "*fp32")] * self.sinks
            return [*arguments, Argument("out", "*fp32"), Argument("table_stride", "i32")]
        arguments += [Argument(name, "*fp32") for name in ("parts", "stats")]
        return [*arguments, Argument("table_stride", "i32"), Argument("splits", "i32")]

    @property
    def aligned(self) -> bool:
        """Whether both parts of a key are whole groups of a scale, as many as a power of two."""
        sizes = (self.kv.dim - self.kv.value_dim, self.kv.value_dim)
        return all(size == power_of_two(size) and size >= LATENT_GROUP for size in sizes)

    def programs(self, count: str) -> GridSize:
        """An upper bound of the programs for as many query positions as the step's `count`."""
        return GridSize(count, max(1, self.rows // self.heads), -(-self.heads // self.rows))

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        assert self.kv.value is not None
        name = f"latent_attention_{self.kv.format}_{self.cut}"
        log2_e = math.log2(math.e)
        source = render_template(
            f"attention_latent{'_warp_specialized' * self.warp_specialized}.py.jinja",
            spec=self,
            name=name,
            arguments=self.arguments,
            asm=self.inline_asm,
            block=max(power_of_two(self.kv.value_dim), 16),
            shared_block=max(power_of_two(self.kv.value[0]), 16),
            group=LATENT_GROUP,
            float="" if self.inline_asm else ".to(tl.float32)",
            sinks=self.sinks and self.cut == "whole",
            log2_e=log2_e,
            q_scale=self.scale if self.softcap else self.scale * log2_e,
        )
        registers = MEAN_REGISTERS if self.warp_specialized else 0
        return Kernel(
            name, source, tuple(self.arguments), self.warps, self.stages, self.warp_specialized, False, registers
        )


def shape_for(spec: LatentSpec, capability: int, shared_bytes: int) -> LatentSpec:
    """`spec` with rows and positions for a GPU, the same for every step: all rows take the same instructions."""
    rows = max(LEAST_ROWS, min(power_of_two(spec.heads), MOST_ROWS.get(capability, OTHER_ROWS)))
    sizes = spec.kv.value_dim in SPECIALIZED_VALUES and spec.kv.dim - spec.kv.value_dim == SPECIALIZED_SHARED
    if capability == 90 and spec.kv.bits == 16 and sizes and spec.inline_asm and not spec.bias_positions:
        return replace(spec, rows=SPECIALIZED_ROWS, leaf=PAGE_TOKENS, stages=2, warp_specialized=True)
    # Loads to come take shared memory: without whole groups words do, and without wgmma codes of 8 bits do twice.
    pipelined = spec.kv.bits == 16 or (spec.aligned and (spec.kv.bits == 4 or capability in MOST_ROWS))
    leaf = PAGE_TOKENS if shared_bytes >= WHOLE_PAGES else PAGE_TOKENS // 2
    return replace(spec, rows=rows, leaf=leaf, stages=2 if pipelined else 1)
