"""GPU kernels over the paged KV cache: attention, and the merge of its partial results (append.py writes pages).

A page holds kv.PAGE_TOKENS positions. The arena is [layer][page][KV head] blocks. A block contains, in order:

    keys         bf16 [page tokens][dim], or 16-bit items [page tokens][width]: item j holds the codes of elements j,
                 j + width, ..., lowest bits first: two of 8 bits or four of 4 bits
    values       bf16 [page tokens][dim], or items like those of the keys, [width][page tokens]
    key words    int32 [page tokens], then value words likewise (8 and 4 bits only): bits 0-7 are the zero point, the
                 rest the upper 24 bits of the float32 scale; value = (code - zero) * scale

A hierarchical cache (kv_hier, or kv_hier4 for a draft that reads only the upper bits) keeps the newest three groups of
128 positions in a ring, in bf16, and older ones rounded (QuantSpec 4.2). In a sequence's block table the ring comes
first: entry 2 (p / 64 mod 6) is the page with the key of position p, the next entry the page with its value, both bf16
[page tokens][dim]. Entries from 12 on are pages of 64 rounded positions, x = scale * (u + l / 16) + least:

    upper codes  u of the keys as items of four codes like above, then those of the values
    value words  float32 scale [page tokens], then -least / scale [page tokens]
    key words    per pair of adjacent channels two words of two fp16 each, the same in both pages of a group: 16 scale,
                 and least - 16.5 scale, because few instructions turn codes into 1 + (16 u + l + 8) / 256
    lower codes  l + 8 of the keys, then of the values, laid out like the upper ones

Each item belongs to one token, so tokens can be appended in parallel, and both products take items directly as the A
operand of an MMA.

Batch invariance: the order of summation depends only on the query's position. Positions are summed in leaves,
GpuKV.leaves leaves in a split, GROUP_SPLITS splits in a group. The maximum that softmax weights are relative to is
rounded to an integer (base 2), so merging rescales partial results by powers of two, which is exact, and only the order
of additions determines the bits. (If weights differ by a factor of 2^126 or more, which position biases can cause, sums
that one order drops are rounded away in the others, unless what they are added to cancels to 0.) Depending on the
amount of work, a program computes one leaf, one split, several splits in a loop, or all positions of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from qcompile.codegen.gpu.compile import Argument, Kernel, render_template
from qcompile.codegen.gpu.operands import Grid, GridSize
from qcompile.codegen.program import RING_GROUPS
from qcompile.errors import UnsupportedError
from qcompile.formats.kv import HIER_GROUP, PAGE_TOKENS, KVFormat, kv_format
from qcompile.targets import TUNED_ON

MOST_QUERIES = 16
"""Most query positions per sequence in the decode class; steps with more are prefill."""
GROUP_SPLITS = 16
"""Splits that are merged into one group before groups are merged."""
MIN_LEAF_POSITIONS = 16
"""Fewest positions of a leaf: the K of the MMA with the values."""
COLUMNS, MOST_OCTETS = 8, 3
"""The N of an MMA, and the most blocks of that many columns that a program has registers for."""
FINE_PROGRAMS = 3072
"""Most programs of a launch that takes one leaf per program, on an H200, and in proportion on other GPUs; half as many
with 16 bits, where one split per program is faster sooner."""
ONE_WARP_SUMS = 1024
"""Most accumulators, rows times features, that one warp has registers for if it reads 4-bit codes."""
RESIDENT_PROGRAMS = 6
"""Most programs resident at once on a multiprocessor if loads from the ring are pipelined."""
MAX_UNPAIRED_QUERIES = 256
"""Most query positions of a prefill whose programs compute one block of rows each; with more, pairs of blocks make
enough programs. Over a hierarchical cache the blocks have one octet of rows up to half as many positions."""
NEAR_SPLITS = 1
"""Most splits of a prompt's step for which programs take few rows: they are faster to begin and to end."""
FAR_ROWS = 64
"""Rows of programs with the queries as the A operand: those of one wgmma of four warps."""
CONSUMERS = 2
"""Consumer warp groups of a warp-specialized program, each with FAR_ROWS rows."""
FEW_FAR_ROWS = {16: 64, 8: 128, 4: 128}
"""Most rows of a step that programs of few rows take with many splits too, by bits: larger ones would be too few."""
SOME_FAR_ROWS = 256
"""Most rows of a step over rounded pages that programs of FAR_ROWS rows take: of twice as many there are too few."""
SHARING_PROGRAMS = {False: 8, True: 5}
"""Most programs per multiprocessor that loop over splits, by whether the cache is hierarchical."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class GpuKV:
    """Layout of pages with `heads` KV heads of `dim` elements; `format` is kv16, kv8, kv4, kv_hier or kv_hier4.

    Each split is summed in `leaves` separate parts.
    """

    format: str
    heads: int
    dim: int
    page_tokens: int = PAGE_TOKENS
    leaves: int = 8

    def __post_init__(self) -> None:
        if self.kind.bits > 16:
            raise UnsupportedError(f"GPU kernels have no {self.format} cache; there are kv16, kv8, kv4, kv_hier")
        if self.dim % 4 or self.dim > 256:
            raise UnsupportedError(f"head size {self.dim}: GPU attention takes multiples of 4 up to 256")

    @property
    def kind(self) -> KVFormat:
        """The format of keys and values."""
        return kv_format(self.format)

    @property
    def hierarchical(self) -> bool:
        """Whether the newest positions are kept unrounded, in a ring."""
        return self.kind.hierarchical

    @property
    def upper_only(self) -> bool:
        """Whether only the upper nibbles of a hierarchical cache are read."""
        return self.hierarchical and self.bits == 4

    @property
    def bits(self) -> int:
        """Bits read per element (per rounded element, in a hierarchical cache)."""
        return self.kind.read_bits or self.kind.bits

    @property
    def planes(self) -> int:
        """Codes per 16-bit item."""
        return 4 if self.hierarchical else 16 // self.bits

    @property
    def width(self) -> int:
        """Items per token of a head's keys (or values)."""
        return self.dim // self.planes

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of one head's key (or value) at one position."""
        return 2 * self.width

    @property
    def part_bytes(self) -> int:
        """Bytes of the codes of a block's keys (or values)."""
        return -(-self.page_tokens * self.row_bytes // 16) * 16

    @property
    def key_word_bytes(self) -> int:
        """Offset of the key words (scales of channels) in a rounded block of a hierarchical cache."""
        return 2 * self.part_bytes + 8 * self.page_tokens

    @property
    def key_width(self) -> int:
        """Key words per plane of channels: `width`, rounded up to whole pairs."""
        return self.width + self.width % 2

    @property
    def lower_bytes(self) -> int:
        """Distance from the upper codes of a rounded block to the lower codes of the same elements."""
        return self.key_word_bytes + -(-4 * self.planes * self.key_width // 16) * 16

    @property
    def block_bytes(self) -> int:
        """Bytes of one (page, KV head)."""
        if self.hierarchical:
            return self.lower_bytes + 2 * self.part_bytes
        return 2 * self.part_bytes + (8 * self.page_tokens if self.bits < 16 else 0)


@dataclass(frozen=True)
class SplitLimits:
    """How decode attention over `kv` is divided into programs, by the amount of work, on a GPU of `multiprocessors`.

    The limits change how fast a step is, not its bits.
    """

    kv: GpuKV
    multiprocessors: int

    @property
    def fine_splits(self) -> int:
        """Most splits, over all sequences, for which each program computes one leaf."""
        programs = FINE_PROGRAMS * self.multiprocessors // TUNED_ON.multiprocessors
        programs //= 2 if self.kv.bits > 8 else 1
        return programs // (self.kv.leaves * self.kv.heads) if self.kv.leaves > 1 else 0

    @property
    def few_splits(self) -> int:
        """Most of these splits for which all programs are resident at once even if not `direct` (AttentionSpec)."""
        resident = RESIDENT_PROGRAMS * self.multiprocessors
        return resident // (self.kv.leaves * self.kv.heads) if self.kv.hierarchical and self.kv.leaves > 1 else 0

    @property
    def shares(self) -> int:
        """Most programs per KV head among which a sequence's splits (hierarchical: all sequences') are divided."""
        return max(SHARING_PROGRAMS[self.kv.hierarchical] * self.multiprocessors // self.kv.heads, 1)

    @property
    def facts(self) -> dict[str, int]:
        """What attention_counts (runtime/cuda/counts.py) needs besides the step to choose launches."""
        limits = {"most_queries": MOST_QUERIES, "group_splits": GROUP_SPLITS, "near_splits": NEAR_SPLITS}
        limits |= {"fine_splits": self.fine_splits, "few_splits": self.few_splits, "shares": self.shares}
        return limits | {"leaves": self.kv.leaves, "shared": self.kv.hierarchical}


def page_arguments(kv: GpuKV) -> list[Argument]:
    """Kernel arguments that point to a layer's pages, one for each type the pages are read as."""
    if kv.hierarchical:
        return [Argument("kv", "*i16"), Argument("kv_words", "*fp32"), Argument("kv_full", "*bf16")]
    codes = Argument("kv", "*bf16" if kv.bits == 16 else "*i16")
    return [codes] + [Argument("kv_words", "*i32")] * (kv.bits < 16)


def power_of_two(value: int) -> int:
    """The smallest power of two not below `value`."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class AttentionSpec:
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
    them for two groups of rows, one of which computes softmax weights while the tensor cores work for the other.

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
    window: int = 0
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
        return self.split // self.kv.leaves

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
        """Warps per program: two, dividing a leaf's tokens and features, if one lacks registers for accumulators."""
        if self.query_rows:
            return self.query_rows // 16
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
    def prompt_grid(self) -> Grid:
        """The grid for a step of prompts."""
        queries = GridSize("prompt_queries", self.queries * (2 if self.paired else 1))
        return queries, self.kv.heads, GridSize("prompts")

    @property
    def arguments(self) -> list[Argument]:
        """The kernel's arguments in order."""
        arguments = [Argument("q", "*fp32"), *page_arguments(self.kv)]
        arguments += [Argument(name, "*i32") for name in ("positions", "query_start", "block_table")]
        arguments += [Argument("center", "*fp32")] * self.centered + [Argument("staged", "*bf16")] * self.staged
        arguments += [Argument("key_bias", "*fp32")] * bool(self.bias_positions)
        arguments += [Argument("sinks", "*fp32")] * (self.sinks and self.cut == "whole")
        partial = [Argument(name, "*fp32") for name in ("parts", "stats")]
        arguments += [_result(self.out)] if self.cut == "whole" else partial
        arguments += [Argument("table_stride", "i32")]
        return arguments + [Argument("splits", "i32")] * (self.cut != "whole")

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        name = f"attention_{self.kv.format}_{self.cut}"
        # PDL only for short programs: long ones would all start on the multiprocessors that become free first.
        pdl = self.inline_asm and capability >= 90 and self.cut == "leaf"
        source = render_template(
            self._template,
            spec=self,
            name=name,
            arguments=self.arguments,
            triggers_dependents=self.inline_asm and capability >= 90,
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
            both=self.kv.hierarchical and not self.kv.upper_only,
            # A draft masks value codes in place: as subnormal fp16 they are the code times 2^-24 or 2^-20.
            units=(-24, -20, -24, -20) if self.kv.upper_only else (0, 0, 0, 0),
            group_tokens=HIER_GROUP,
            ring_pages=RING_GROUPS * HIER_GROUP // self.kv.page_tokens,
            sinks=self.sinks and self.cut == "whole",
            log2_e=_LOG2_E,
            q_scale=self.scale if self.softcap else self.scale * _LOG2_E,
            consumers=CONSUMERS,
            # Of a thread of the second consumer and of the producer; the first consumer has as many as the second.
            registers=[240, 24] if self.kv.bits == 16 else [216, 72],
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


def for_queries(spec: AttentionSpec, queries: int) -> AttentionSpec:
    """`spec` for `queries` positions: the fewest programs (each reads all keys), then the fewest rows per program."""
    # Registers hold fewer rows if heads are large, or if one warp sums both rounded positions and those of the ring.
    fewer_rows = spec.kv.dim > 128 or (spec.kv.hierarchical and spec.warps == 1)
    fits = [replace(spec, octets=octets) for octets in range(1, MOST_OCTETS + (not fewer_rows))]
    programs = -(-queries // fits[-1].queries)
    variant = next(each for each in fits if each.queries * programs >= queries)
    variant = replace(variant, direct=variant.direct and variant.octets == 1)
    if variant.octets < MOST_OCTETS or variant.kv.bits == 16:
        return variant
    # With the most rows there are no registers for a loop over splits, but enough for a deeper pipeline.
    if variant.kv.hierarchical or variant.cut == "split":
        return replace(variant, multi_split=False, stages=3)
    return replace(variant, stages=1) if variant.kv.bits == 4 else variant


def prefill_variants(spec: AttentionSpec) -> list[tuple[int, AttentionSpec]]:
    """Pairs of the most query positions (0: any number) and the variant of `spec` for them; its cut is "whole".

    Few positions are divided into small programs. With many, programs take pairs of blocks to balance the load, as
    later positions attend to more keys.
    """
    small, large = replace(spec, octets=1), replace(spec, octets=2)
    unpaired = (
        [(MAX_UNPAIRED_QUERIES // 2, small), (MAX_UNPAIRED_QUERIES, large)]
        if spec.kv.hierarchical
        else [(MAX_UNPAIRED_QUERIES, small)]
    )
    return [*unpaired, (0, replace(large, paired=True))]


def far_variants(spec: AttentionSpec, capability: int) -> list[tuple[int, AttentionSpec]]:
    """Pairs of the most rows of a step (0: any number) and the variant of `spec` for them, for steps with more than
    NEAR_SPLITS splits of positions.

    Heads of a GQA group must fit the rows of a program, and two programs' accumulators a multiprocessor. Only an sm_90
    GPU has shown that both orders of operands give the same bits.
    """
    kv, group = spec.kv, spec.heads // spec.kv.heads
    # Items of 16 bits are loaded by twos.
    fits = 32 <= kv.dim <= 128 and group <= FAR_ROWS and (kv.bits == 16 or kv.width % 2 == 0)
    if capability != 90 or kv.upper_only or not fits:
        return prefill_variants(spec)
    few = (FEW_FAR_ROWS[kv.bits], replace(spec, octets=1))
    # Rounded positions are prefetched to registers.
    rows = replace(spec, query_rows=FAR_ROWS, stages=3 if kv.bits == 16 else 1)
    # Warp groups are not in Triton's interpreter, nor in their kernel what these scores need.
    plain = not (kv.hierarchical or spec.centered or spec.bias_positions)
    if not (plain and kv.dim in (64, 128) and spec.leaf == kv.page_tokens and spec.inline_asm):
        return [few, (0, rows)]
    some = [(SOME_FAR_ROWS, rows)] if kv.bits < 16 else []
    return [few, *some, (0, replace(rows, warp_specialized=True, stages=4))]


@dataclass(frozen=True)
class MergeSpec:
    """Log-sum-exp merge of AttentionSpec's partial results: of the splits of a group (level 1) or of groups (level 2).

    Each split has `leaves` partial results, or one. The `final` level writes [tokens, heads * dim] as `out`, and with
    `amax` also the largest magnitude of each half of a head's features, or of the whole head in both entries,
    [tokens, heads, 2] f32, for quantization. A level that is not final overwrites the first partial result of each
    group. With `sinks` an attention sink f32 [heads] is added to the final sum of softmax weights.
    """

    kv: GpuKV
    heads: int
    level: int = 1
    final: bool = True
    window: int = 0
    split: int = 512
    leaves: int = 1
    amax: bool = False
    sinks: bool = False
    out: Literal["f32", "bf16"] = "f32"

    @property
    def batched(self) -> bool:
        """Whether it merges a few whole splits, as in large batches: enough work for programs of several heads."""
        return (self.level, self.final, self.leaves) == (1, True, 1)

    @property
    def heads_per_program(self) -> int:
        """Heads per program."""
        return math.gcd(self.heads, 4) if self.batched else 1

    @property
    def merges_leaves(self) -> bool:
        """Whether the leaves of each split are merged first, for all splits in parallel."""
        return self.level == 1 and self.leaves > 1

    @property
    def dim_halves(self) -> int:
        """Programs that divide a head's features: 2 if neither overwrites what the other reads."""
        return 2 if self.merges_leaves and self.final else 1

    @property
    def programs(self) -> int:
        """Programs per token and group of splits."""
        return self.heads // self.heads_per_program * self.dim_halves

    @property
    def kind(self) -> str:
        """What it merges, for the title of the generated source."""
        return f"{f'splits of {self.split} positions' if self.level == 1 else 'groups of splits'} in order of position"

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        arguments = [Argument("parts", "*fp32"), Argument("stats", "*fp32")] + [_result(self.out)] * self.final
        arguments += [Argument("amax", "*fp32")] * (self.amax and self.final)
        arguments += [Argument("sinks", "*fp32")] * (self.sinks and self.final)
        arguments += [Argument("positions", "*i32"), Argument("splits", "i32")]
        pdl = capability >= 90
        name = f"merge_{self.split}_{self.leaves}_{self.level}{'' if self.final else '_part'}"
        warps = self.heads_per_program if self.batched else 8 if self.merges_leaves and not self.final else 4
        source = render_template(
            "merge.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            pdl=pdl,
            splits_a_group=GROUP_SPLITS,
            dim_block=power_of_two(self.kv.dim),
            sinks=self.sinks and self.final,
            log2_e=_LOG2_E,
            batch=8 if self.batched else GROUP_SPLITS,
        )
        return Kernel(name, source, tuple(arguments), warps, 1, pdl, fusion=False)


def _result(dtype: str) -> Argument:
    return Argument("out", "*bf16" if dtype == "bf16" else "*fp32")
