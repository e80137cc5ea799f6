"""GPU kernels around the paged KV cache: attention over pages, and the merge of its splits (gpu_append.py fills pages).

Pages hold numerics.PAGE_TOKENS positions. The arena is [layer][page][kv head] blocks; a block is

    keys        bf16 [page tokens][dim]; or 16-bit items [page tokens][width]: item j holds the codes of elements j,
                j + width, ... from its low bits on: two of 8 bits, or four of 4
    values      bf16 [page tokens][dim]; or items as those of keys, [width][page tokens]
    key words   int32 [page tokens], value words alike (8 and 4 bits only): bits 0-7 the zero point, the rest the
                upper 24 bits of the float32 scale; value = (code - zero) * scale

A hierarchical cache (kv_hier, and kv_hier4 for a draft that reads its upper bits) keeps the newest three groups of 128
positions in a ring and older ones rounded. Entries of a sequence's block table, from 0: the ring, keys and values of
position p in pages 2 (p / 64 mod 6) and the next, bf16 [page tokens][dim]; from 12 on the pages of 64 positions that
are rounded, x = scale * (u + l / 16) + least (QuantSpec 4.2):

    keys u      items of four codes as above; values u alike
    values      float32 scale [page tokens], then -least / scale
    keys        of two channels that follow each other two words of two fp16 each, in both pages of a group: 16 scale,
                then least - 16.5 scale, as 1 + (16 u + l + 8) / 256 is made of codes with few instructions
    l + 8       of keys, and of values, as u

An item belongs to one token, so tokens are appended in parallel; as A operands of an MMA both products
then take items as they lie.

Batch invariance: the order of summation depends on a query's position alone: positions in leaves, GpuKV.leaves leaves
in a split, GROUP_SPLITS splits in a group. Softmax weights are relative to the maximum score rounded to an integer (in
base 2), so merging partial results multiplies them by powers of two, which is exact, and the order alone decides the
bits. (Where weights differ by 2^126 and more, which position biases may cause, sums that one order leaves out are
rounded away in others, unless what they meet adds up to 0.) With little work a program computes a leaf, else a split,
or several in a loop, or all of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from qcompile.codegen.gpu_compile import Argument, Kernel, render_template
from qcompile.codegen.program import RING_GROUPS
from qcompile.errors import UnsupportedError
from qcompile.numerics import HIER_GROUP, HIERARCHICAL, KV_BITS, PAGE_TOKENS

MOST_QUERIES = 16
"""Most query positions of a sequence in the decode class."""
GROUP_SPLITS = 16
"""Splits that are merged into a group, before groups are merged."""
MIN_LEAF_POSITIONS = 16
"""Least positions of a leaf: the K of an MMA with values."""
COLUMNS, MOST_OCTETS = 8, 3
"""The N of an MMA, and how many of them a program has registers for."""
FINE_PROGRAMS = 3072
"""Up to so many programs take a leaf each; half as many with 16 bits, where whole splits are faster sooner."""
ONE_WARP_SUMS = 1024
"""Up to so many sums, rows times features, one warp has registers for, where codes of 4 bits are read."""
RESIDENT_PROGRAMS = 792
"""Up to so many are resident at once with their loads from a ring in flight: 6 per multiprocessor of an H200."""
MAX_UNPAIRED_QUERIES = 256
"""Up to so many query positions a program has one block of them; with more, pairs of blocks make enough programs. Over
a hierarchical cache blocks are small up to half as many."""
SHARING_PROGRAMS = {False: 1056, True: 660}
"""Most programs that loop over splits, by whether the cache is hierarchical: 8 and 5 per multiprocessor of an H200."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class GpuKV:
    """Pages of `heads` KV heads of `dim` elements in `format` kv16, kv8, kv4, kv_hier or kv_hier4.

    A split has so many `leaves`: parts that are summed separately.
    """

    format: str
    heads: int
    dim: int
    page_tokens: int = PAGE_TOKENS
    leaves: int = 8

    def __post_init__(self) -> None:
        if self.format not in ("kv16", "kv8", "kv4", *HIERARCHICAL):
            raise UnsupportedError(f"GPU kernels have no {self.format} cache; there are kv16, kv8, kv4, kv_hier")
        if self.dim % 4 or self.dim > 256:
            raise UnsupportedError(f"head size {self.dim}: GPU attention takes multiples of 4 up to 256")

    @property
    def hierarchical(self) -> bool:
        """Whether the newest positions are kept unrounded, in a ring."""
        return self.format in HIERARCHICAL

    @property
    def bits(self) -> int:
        """Bits that are read of an element (of a rounded one, in a hierarchical cache)."""
        return HIERARCHICAL.get(self.format) or KV_BITS[self.format]

    @property
    def planes(self) -> int:
        """Codes of an item."""
        return 4 if self.hierarchical else 16 // self.bits

    @property
    def width(self) -> int:
        """Items of a token's keys (or values)."""
        return self.dim // self.planes

    @property
    def fine_splits(self) -> int:
        """Up to so many splits of all sequences together are taken in leaves."""
        programs = FINE_PROGRAMS // (2 if self.bits > 8 else 1)
        return programs // (self.leaves * self.heads) if self.leaves > 1 else 0

    @property
    def few_splits(self) -> int:
        """Up to so many of them, all programs that are not `direct` (AttentionSpec) are resident at once."""
        return RESIDENT_PROGRAMS // (self.leaves * self.heads) if self.hierarchical and self.leaves > 1 else 0

    @property
    def shares(self) -> int:
        """How many programs of a KV head share a sequence's splits (hierarchical: those of all sequences), at most."""
        return max(SHARING_PROGRAMS[self.hierarchical] // self.heads, 1)

    @property
    def choices(self) -> dict[str, int]:
        """What attention_counts (runtime/cuda.py) chooses launches by, beside the step."""
        names = ("leaves", "fine_splits", "few_splits", "shares")
        chosen = {name: getattr(self, name) for name in names} | {"shared": self.hierarchical}
        return {"most_queries": MOST_QUERIES, "group_splits": GROUP_SPLITS, **chosen}

    @property
    def row_bytes(self) -> int:
        """Bytes of codes of one position's keys (or values) of a head."""
        return 2 * self.width

    @property
    def part_bytes(self) -> int:
        """Bytes of codes of a block's keys (or values)."""
        return -(-self.page_tokens * self.row_bytes // 16) * 16

    @property
    def key_word_bytes(self) -> int:
        """Where in a rounded block of a hierarchical cache what concerns channels of keys begins."""
        return 2 * self.part_bytes + 8 * self.page_tokens

    @property
    def key_width(self) -> int:
        """Words of a plane of channels there: whole pairs."""
        return self.width + self.width % 2

    @property
    def lower_bytes(self) -> int:
        """How far behind the upper bits of a rounded block their lower ones are."""
        return self.key_word_bytes + -(-4 * self.planes * self.key_width // 16) * 16

    @property
    def block_bytes(self) -> int:
        """Bytes of one (page, KV head)."""
        if self.hierarchical:
            return self.lower_bytes + 2 * self.part_bytes
        return 2 * self.part_bytes + (8 * self.page_tokens if self.bits < 16 else 0)


def page_arguments(kv: GpuKV) -> list[Argument]:
    """The arguments that point to a layer's pages, by the types they are read as."""
    if kv.hierarchical:
        return [Argument("kv", "*i16"), Argument("kv_words", "*fp32"), Argument("kv_full", "*bf16")]
    codes = Argument("kv", "*bf16" if kv.bits == 16 else "*i16")
    return [codes] + [Argument("kv_words", "*i32")] * (kv.bits < 16)


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class AttentionSpec:
    """softmax(q k^T * scale) v over pages, in programs of `rows` rows: query positions times the heads of a KV head.

    Rows come in `octets` of 8, the N of an MMA, or more where one position has more heads.

    q f32 [tokens, q_stride]. In the decode class (flash decoding) a program computes one `cut`, a leaf or a split of
    `split` positions, and MergeSpec merges them; with `multi_split` a program loops over several splits of a sequence.
    Where the cut is whole, one program computes all positions in the same order and writes out [tokens, heads * dim];
    with `paired` it does two blocks of rows, one as far from the sequence's start as the other is from its end, which
    balances the load. A row's bits depend neither on the cut nor on the rows or warps of a program (batch invariance):
    no multiply-add is fused unless written so, and sums over a leaf have a fixed order.

    `direct` loads a ring's keys and values to registers instead of pipelining them through shared memory, so that more
    programs fit. With `centered`, a weight [KV heads, dim] has been subtracted from the keys in pages, and scores are
    corrected for it before they are capped. If `bias_positions` is not 0, the weight key_bias f32 [heads,
    bias_positions] has what a key's position adds to capped scores, less the query's. With `sinks`, a weight f32
    [heads] has attention sinks: scores that only take part in the softmax denominator, once, in the final sum.
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

    @property
    def title(self) -> str:
        """What the source says it is."""
        sizes = {"leaf": str(self.leaf), "split": str(self.split), "whole": "all"}
        heads = f"{self.heads} heads over {self.kv.format} pages"
        return f"Attention of {heads}, {self.rows} rows, {sizes[self.cut]} positions"

    @property
    def leaf(self) -> int:
        """Positions of a leaf."""
        return self.split // self.kv.leaves

    @property
    def rows(self) -> int:
        """Rows of a program, for all heads of a KV head at least."""
        group = self.heads // self.kv.heads
        return COLUMNS * max(self.octets, -(-group // COLUMNS))

    @property
    def block(self) -> int:
        """Features of a plane, as the tensor cores take them."""
        return max(power_of_two(self.kv.width), 16)

    @property
    def warps(self) -> int:
        """Warps of a program: two share a leaf's tokens and features where one lacks registers for the accumulators."""
        few = self.rows * self.kv.dim <= ONE_WARP_SUMS and self.cut != "whole"
        return 1 if self.block < 32 or (few and self.kv.format in ("kv4", "kv_hier4")) else 2

    @property
    def staged(self) -> bool:
        """Whether keys and values of a step's own positions are in rows bf16 [tokens, 2, KV heads, dim]."""
        return self.kv.hierarchical and self.cut == "whole"

    @property
    def queries(self) -> int:
        """Query positions of a program."""
        return self.rows // (self.heads // self.kv.heads)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        arguments = [Argument("q", "*fp32"), *page_arguments(self.kv)]
        arguments += [Argument(name, "*i32") for name in ("positions", "query_start", "block_table")]
        arguments += [Argument("center", "*fp32")] * self.centered + [Argument("staged", "*bf16")] * self.staged
        arguments += [Argument("key_bias", "*fp32")] * bool(self.bias_positions)
        arguments += [Argument("sinks", "*fp32")] * (self.sinks and self.cut == "whole")
        results = ("out",) if self.cut == "whole" else ("parts", "stats")
        arguments += [Argument(name, "*fp32") for name in results] + [Argument("table_stride", "i32")]
        arguments += [Argument("splits", "i32")] * (self.cut != "whole")
        name = f"attention_{self.kv.format}_{self.cut}"
        triggers_dependents = self.inline_asm and capability >= 90
        # PDL only for short programs: long ones would crowd the multiprocessors that become free first.
        pdl = triggers_dependents and self.cut == "leaf"
        source = render_template(
            "attention_hier.py.jinja" if self.kv.hierarchical else "attention.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            triggers_dependents=triggers_dependents,
            pdl=pdl,
            asm=self.inline_asm,
            block=self.block,
            columns=COLUMNS,
            octets=range(self.rows // COLUMNS),
            planes=range(self.kv.planes),
            inside_head=self.block != self.kv.width,
            inside_mask=" & (d < WIDTH)[:, None]" if self.block != self.kv.width else "",
            float="" if self.inline_asm else ".to(tl.float32)",
            warp_rows=min(16, self.leaf // 2),
            # Two stages: elements of 16 bits take memory that more programs would have.
            ring_stages=1 if self.direct or (self.rows > 16 and capability >= 100) else 2,
            splits_a_group=GROUP_SPLITS,
            both=self.kv.format == "kv_hier",
            # A draft reads codes of values where they lie in 16 bits: as subnormal fp16 they are times 2^-24 or 2^-20.
            units=(0, 0, 0, 0) if self.kv.format == "kv_hier" else (-24, -20, -24, -20),
            group_tokens=HIER_GROUP,
            ring_pages=RING_GROUPS * HIER_GROUP // self.kv.page_tokens,
            sinks=self.sinks and self.cut == "whole",
            log2_e=_LOG2_E,
            q_scale=self.scale if self.softcap else self.scale * _LOG2_E,
        )
        # Enough registers, and few enough for the occupancy of the largest steps.
        most = {("kv8", 2): 128, ("kv_hier", 2): 168, ("kv_hier4", 2): 168}
        eight = self.rows == 8 and self.kv.dim <= 128 and self.cut == "split" and capability > 80
        registers = most.get((self.kv.format, self.warps), 0) if eight else 0
        if self.bias_positions and self.rows == 8 and self.kv.dim <= 128 and capability > 80:
            # Position biases are prefetched, which costs occupancy or spills accumulators.
            registers = {("kv_hier", "leaf"): 168, ("kv4", "whole"): 168}.get((self.kv.format, self.cut), registers)
        plain = self.kv.format, self.cut, self.stages, self.warps, capability, self.bias_positions
        if plain == ("kv4", "leaf", 1, 2, 90, 0):
            registers = 128  # what most rows need without loads in flight
        elif plain == ("kv4", "leaf", 2, 1, 90, 0):
            registers = 255  # as many as it takes: left alone, the assembler stops at 128, which takes 7 % longer
        return Kernel(name, source, tuple(arguments), self.warps, self.stages, pdl, False, registers)


def for_queries(spec: AttentionSpec, queries: int) -> AttentionSpec:
    """`spec` for steps of so many query positions: as few programs as possible (each reads all), then small ones."""
    # With more features, or where one warp sums both kinds of positions, registers hold fewer rows.
    few = spec.kv.dim > 128 or (spec.kv.hierarchical and spec.warps == 1)
    fits = [replace(spec, octets=octets) for octets in range(1, MOST_OCTETS + (not few))]
    programs = -(-queries // fits[-1].queries)
    found = next(each for each in fits if each.queries * programs >= queries)
    found = replace(found, direct=found.direct and found.octets == 1)
    if found.octets < MOST_OCTETS or found.kv.bits == 16:
        return found
    # The most rows leave no registers for a loop over splits, but some for a deeper pipeline.
    if found.kv.hierarchical or found.cut == "split":
        return replace(found, multi_split=False, stages=3)
    return replace(found, stages=1) if found.kv.bits == 4 else found


def prefill_variants(spec: AttentionSpec) -> list[tuple[int, AttentionSpec]]:
    """`spec`, whose cut is whole, for steps of up to so many query positions each (0: any number).

    Few positions are cut into small programs. With many, the last positions attend to most: programs take pairs of
    blocks, which balances the load.
    """
    small, large = replace(spec, octets=1), replace(spec, octets=2)
    unpaired = (
        [(MAX_UNPAIRED_QUERIES // 2, small), (MAX_UNPAIRED_QUERIES, large)]
        if spec.kv.hierarchical
        else [(MAX_UNPAIRED_QUERIES, small)]
    )
    return [*unpaired, (0, replace(large, paired=True))]


@dataclass(frozen=True)
class MergeSpec:
    """Merges AttentionSpec's splits (flash decoding): those of a group (level 1), or the groups (level 2).

    A split was computed as so many `leaves`, each stored separately, or as one. The `final` level writes
    out [tokens, heads * dim] f32, and with `amax` also the largest magnitude of each half of a head's features, or of
    all of them, [tokens, heads, 2] f32, for quantization. The other level overwrites each group's first split. With
    `sinks` an attention sink f32 [heads] is added to the final sum of weights.
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

    @property
    def batched(self) -> bool:
        """Whether it merges few whole splits, as for batches: there are programs enough for several heads each."""
        return (self.level, self.final, self.leaves) == (1, True, 1)

    @property
    def heads_per_program(self) -> int:
        """Heads of a program."""
        return math.gcd(self.heads, 4) if self.batched else 1

    @property
    def merges_leaves(self) -> bool:
        """Whether leaves are merged first, for all splits in parallel."""
        return self.level == 1 and self.leaves > 1

    @property
    def dim_halves(self) -> int:
        """Programs that share a head's features: 2 where none overwrites what the other reads."""
        return 2 if self.merges_leaves and self.final else 1

    @property
    def programs(self) -> int:
        """Programs of a token and group."""
        return self.heads // self.heads_per_program * self.dim_halves

    @property
    def kind(self) -> str:
        """What the source says it merges."""
        return f"{f'splits of {self.split} positions' if self.level == 1 else 'groups of splits'} in order of position"

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        arguments = [Argument("parts", "*fp32"), Argument("stats", "*fp32")] + [Argument("out", "*fp32")] * self.final
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
