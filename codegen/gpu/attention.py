"""GPU kernels of attention over the paged KV cache (kv_pages.py: its layout; append.py: what writes it).

Batch invariance: the order of summation depends only on the query's position. Positions are summed in leaves,
several leaves in a split, GROUP_SPLITS splits in a group. The maximum that softmax weights are relative to is
rounded to an integer (base 2), so merging rescales partial results by powers of two, which is exact, and only the order
of additions determines the bits. (If weights differ by a factor of 2^126 or more, which position biases can cause, sums
that one order drops are rounded away in the others, unless what they are added to cancels to 0.) Depending on the
amount of work, a program computes one leaf, one split, several splits in a loop, or all positions of a sequence.

Large heads leave few registers beside one set of sums. Where prompts matter most (GpuKV.chained), leaves of a split are
summed one after the other in the accumulators of the same MMAs, and no program computes a leaf alone. Weights are
relative to the maximum of the first leaf that a row sees, or of a later one that is more than RISE above it, so sums
are rarely rescaled.

Codes reach the tensor cores as code minus zero point, which 16-bit floats hold exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qcompile.codegen.gpu.attention_splits import CHAINED_LEAVES, GROUP_SPLITS, MIN_LEAF_POSITIONS
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template, result_argument
from qcompile.codegen.gpu.kv_pages import GpuKV, page_arguments
from qcompile.codegen.gpu.operands import Grid, GridSize
from qcompile.codegen.gpu.unpack_pages import UNPACKED_ARGUMENTS, unpacked_block_bytes
from qcompile.codegen.gpu.visible_keys import VisibleKeys
from qcompile.codegen.sizes import power_of_two
from qcompile.formats.kv import HIER_GROUP, RING_GROUPS
from qcompile.targets import has_pdl

COLUMNS = 8
"""The N of an MMA."""
LARGE_HEAD = 256
"""Most features of a head of which two warps have registers for the sums of few rows, and eight warps for those of as
many rows as a wgmma has."""
ONE_WARP_SUMS = 1024
"""Most accumulators, rows times features, that one warp has registers for if it reads 4-bit codes."""
RISE = 8
"""How far (base 2) the maximum of a chained leaf may be above what weights are relative to: they are at most 2^RISE."""
CONSUMERS = 2
"""Consumer warp groups of a warp-specialized program, each with FAR_ROWS rows."""


@dataclass(frozen=True)
class AttentionSpec(VisibleKeys):
    """Flash attention over pages, softmax(q k^T * scale) v.

    A program's `rows` are query positions times the heads of a GQA group, in `octets` of 8, or more if one position
    alone has more heads. In the kernels they are the columns (N) of MMAs. q is f32 [tokens, q_stride].

    `cut` is what a program computes. In the decode class (split-KV) that is a "leaf", or a "split" of `split`
    positions, and MergeSpec merges the partial results; with `multi_split` a program loops over several splits of a
    sequence. With "whole" a program computes all positions in the same order and writes [tokens, heads * dim] as `out`.
    With `paired` it does so for two blocks of rows, one as far from the sequence's start as the other is from its end,
    which balances the load. A row's bits depend neither on the cut nor on a program's rows or warps (batch invariance):
    multiply-adds are fused only where written as fma, and sums over a leaf have a fixed order.

    With `query_rows` (sm_90, cut "whole") the queries are the A operand of MMAs of that many rows, and keys and values
    the B operand in shared memory, unpacked once for all of them. With `warp_specialized` too, producer warps unpack
    them for two groups of rows, one of which computes softmax weights while the tensor cores work for the other; if
    `unpacked`, a kernel has unpacked them before (unpack_pages.py), and producer warps only copy them.

    `direct` loads the ring's keys and values into registers instead of pipelining them through shared memory, so that
    more programs are resident. With `centered`, a weight [KV heads, dim] has been subtracted from the keys in pages,
    and scores are corrected for it before soft capping. If `bias_positions` is not 0, the capped score of a key gets
    key_bias[head, key position] - key_bias[head, query position], from a weight f32 [heads, bias_positions]. With
    `sinks`, a weight f32 [heads] holds attention sinks: scores that are only part of the softmax denominator, to which
    they are added once, in the final sum.
    """

    kv: GpuKV
    heads: int
    q_stride: int
    scale: float
    softcap: float = 0.0
    split: int = 512
    cut: Literal["leaf", "split", "whole"] = "split"
    octets: int = 2
    multi_split: bool = False
    stages: int = 2
    centered: bool = False
    inline_asm: bool = True
    paired: bool = False
    direct: bool = False
    bias_positions: int = 0
    sinks: bool = False
    query_rows: int = 0
    warp_specialized: bool = False
    unpacked: bool = False
    out: Literal["f32", "bf16"] = "f32"

    @property
    def title(self) -> str:
        """Title of the generated source."""
        sizes = {"leaf": str(self.leaf), "split": str(self.split), "whole": "all"}
        heads = f"{self.heads} heads over {self.kv.format} pages"
        return f"Attention of {heads}, {self.rows} rows, {sizes[self.cut]} positions"

    @property
    def leaf(self) -> int:
        """Positions per leaf."""
        if not self.kv.chained:
            return self.split // self.kv.leaves
        return min(32 if self.kv.dim > 128 else 64, max(MIN_LEAF_POSITIONS, self.split // CHAINED_LEAVES))

    @property
    def rows(self) -> int:
        """Rows per program, enough for all heads of a GQA group."""
        group = self.heads // self.kv.heads
        most = self.query_rows * (CONSUMERS if self.warp_specialized else 1)
        return most or COLUMNS * max(self.octets, -(-group // COLUMNS))

    @property
    def block(self) -> int:
        """Features per plane, padded to a size that MMAs take."""
        return max(power_of_two(self.kv.width), 16)

    @property
    def warps(self) -> int:
        """Warps per program: two, dividing a leaf's tokens and features, if one lacks registers for accumulators.

        With `query_rows`, four of 64 rows, or eight, which divide the features of values, for heads over 128.
        """
        if self.query_rows:
            return self.query_rows // 16 * (2 if self.kv.dim > 128 and not self.warp_specialized else 1)
        if self.kv.dim > LARGE_HEAD:
            return 8 if self.cut == "whole" and self.rows > COLUMNS else 4
        few = self.rows * self.kv.dim <= ONE_WARP_SUMS and self.cut != "whole"
        return 1 if self.block < 32 or (few and self.kv.bits == 4) else 2

    @property
    def staged(self) -> bool:
        """Whether a step's own keys and values are read from a staging buffer bf16 [tokens, 2, KV heads, dim]."""
        return self.kv.hierarchical and self.cut == "whole"

    @property
    def queries(self) -> int:
        """Query positions per program."""
        consumers = CONSUMERS if self.warp_specialized else 1
        return self.rows // consumers // (self.heads // self.kv.heads) * consumers

    @property
    def value_parts(self) -> int:
        """Programs that divide the features of the values of one block of rows, each with all its scores."""
        return 2 if self.query_rows and self.kv.dim > LARGE_HEAD else 1

    @property
    def prompt_grid(self) -> Grid:
        """The grid for a step of prompts."""
        queries = GridSize("prompt_queries", self.queries * (2 if self.paired else 1))
        return queries, self.kv.heads * self.value_parts, GridSize("prompts")

    @property
    def arguments(self) -> list[Argument]:
        """The kernel's arguments in order."""
        arguments = [Argument("q", "*fp32"), *(UNPACKED_ARGUMENTS if self.unpacked else page_arguments(self.kv))]
        arguments += [Argument(name, "*i32") for name in ("positions", "query_start")]
        arguments += [Argument("block_table", "*i32")] * (not self.unpacked)
        arguments += [Argument("center", "*fp32")] * self.centered + [Argument("staged", "*bf16")] * self.staged
        arguments += [Argument("key_bias", "*fp32")] * bool(self.bias_positions)
        arguments += [Argument("sinks", "*fp32")] * (self.sinks and self.cut == "whole")
        partial = [Argument(name, "*fp32") for name in ("parts", "stats")]
        arguments += [result_argument(self.out)] if self.cut == "whole" else partial
        arguments += [Argument("unpacked" if self.unpacked else "table_stride", "i32")]
        return arguments + [Argument("splits", "i32")] * (self.cut != "whole")

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        name = f"attention_{self.kv.format}_{self.cut}"
        # PDL only for short programs: long ones would all start on the multiprocessors that become free first.
        pdl = self.inline_asm and has_pdl(capability) and self.cut == "leaf"
        source = render_template(
            self._template,
            spec=self,
            name=name,
            arguments=self.arguments,
            triggers_dependents=self.inline_asm and has_pdl(capability),
            pdl=pdl,
            asm=self.inline_asm,
            block=self.block,
            columns=self.query_rows or COLUMNS,
            octets=range(1 if self.query_rows else self.rows // COLUMNS),
            planes=range(self.kv.planes),
            inside_head=self.block != self.kv.width,
            inside_mask=" & (d < WIDTH)[:, None]" if self.block != self.kv.width else "",
            float="" if self.inline_asm else ".to(tl.float32)",
            warp_rows=min(16, self.leaf // 2),
            # Two stages at most: with 16-bit elements, more would take shared memory that other programs need.
            ring_stages=1 if self.direct or (self.rows > 16 and capability >= 100) else 2,
            splits_a_group=GROUP_SPLITS,
            rise=RISE,
            both=self.kv.hierarchical and not self.kv.upper_only,
            # A draft masks value codes in place: as subnormal fp16 they are the code times 2^-24 or 2^-20.
            units=(-24, -20, -24, -20) if self.kv.upper_only else (0, 0, 0, 0),
            group_tokens=HIER_GROUP,
            ring_pages=RING_GROUPS * HIER_GROUP // self.kv.page_tokens,
            sinks=self.sinks and self.cut == "whole",
            log2_e=math.log2(math.e),
            q_scale=self.scale if self.softcap else self.scale * math.log2(math.e),
            consumers=CONSUMERS,
            # Of a thread of the second consumer and of the producer; the first consumer has as many as the second.
            registers=[240, 24] if self.kv.bits == 16 or self.unpacked else [216, 72],
            unpacked_bytes=unpacked_block_bytes(self.kv),
        )
        most = self._most_registers(capability)
        return Kernel(name, source, tuple(self.arguments), self.warps, self.stages, pdl, False, most)

    @property
    def _template(self) -> str:
        if self.warp_specialized:
            return "attention_warp_specialized.py.jinja"
        return "attention_hier.py.jinja" if self.kv.hierarchical else "attention.py.jinja"

    def _most_registers(self, capability: int) -> int:
        """Enough registers a thread for one program, but few enough for the occupancy that the largest steps need."""
        if self.warp_specialized:
            return 168  # the mean of all warps
        hierarchical, bits = self.kv.hierarchical, self.kv.bits
        nibbles = bits == 4 and not hierarchical
        registers = 0
        if self.rows == 8 and self.kv.dim <= 128 and self.cut == "split" and capability > 80 and self.warps == 2:
            registers = 168 if hierarchical else 128 if bits == 8 else 0
        if self.bias_positions and self.rows == 8 and self.kv.dim <= 128 and capability > 80:
            # Prefetched position biases take registers: accumulators would spill, or occupancy would drop.
            both = hierarchical and not self.kv.upper_only
            registers = 168 if (both and self.cut == "leaf") or (nibbles and self.cut == "whole") else registers
        variant = nibbles, self.cut, self.stages, self.warps, capability, self.bias_positions
        if variant == (True, "leaf", 1, 2, 90, 0):
            return 128  # what programs of the most rows need if no loads are in flight
        if variant == (True, "leaf", 2, 1, 90, 0):
            return 255  # no limit: left alone, the assembler stops at 128 registers, which takes 7 % longer
        return registers
