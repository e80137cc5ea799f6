"""The variants of an attention kernel for the sizes of a step, and the most rows or queries that each is for."""

from __future__ import annotations

from dataclasses import replace

from qcompile.codegen.gpu.attention import LARGE_HEAD, AttentionSpec
from qcompile.codegen.gpu.kv_pages import MOST_FEATURES
from qcompile.targets import has_wgmma

MOST_OCTETS = 3
"""Most blocks of eight rows that a program has registers for."""
MAX_UNPAIRED_QUERIES = 256
"""Most query positions of a prefill for which a program computes one block of rows. With more, a program computes two
blocks, which leaves enough programs. Over a hierarchical cache, blocks have one octet of rows up to half as many
positions."""
FAR_ROWS = 64
"""Rows of programs with the queries as the A operand: those of one wgmma of four warps."""
FEW_FAR_ROWS = {16: 64, 8: 128, 4: 128}
"""Most rows of a step that programs of few rows take with many splits too, by bits: larger ones would be too few."""
FEW_LARGE_ROWS = {16: 128, 8: 256, 4: 256}
"""FEW_FAR_ROWS for heads of more than 128 features: a multiprocessor holds one program of FAR_ROWS rows of these."""
SOME_LARGE_ROWS = 512
"""SOME_FAR_ROWS for heads of more than 128 features, over any pages."""
FEWEST_TOKENS = 32
"""Fewest positions of a leaf that warp groups can sum in its order."""
WARP_GROUP_STAGES = 4
"""Leaves in the shared memory of warp-specialized programs."""
SOME_FAR_ROWS = 256
"""Most rows of a step over rounded pages that programs of FAR_ROWS rows take: of twice as many there are too few."""


def for_queries(spec: AttentionSpec, queries: int) -> AttentionSpec:
    """`spec` for `queries` positions: the fewest programs (each reads all keys), then the fewest rows per program."""
    fits = [replace(spec, octets=octets) for octets in range(1, _most_octets(spec) + 1)]
    programs = -(-queries // fits[-1].queries)
    variant = next(each for each in fits if each.queries * programs >= queries)
    variant = replace(variant, direct=variant.direct and variant.octets == 1)
    if variant.octets < MOST_OCTETS or variant.kv.bits == 16:
        return variant
    # With the most rows there are no registers for a loop over splits, but enough for a deeper pipeline.
    if variant.kv.hierarchical or variant.cut == "split":
        return replace(variant, multi_split=False, stages=3)
    return replace(variant, stages=1) if variant.kv.bits == 4 else variant


def _most_octets(spec: AttentionSpec) -> int:
    """Most blocks of eight rows of a program for few rows: fewer if heads are large, or if one warp sums both rounded
    positions and those of the ring."""
    if spec.kv.dim > LARGE_HEAD and spec.kv.bits == 8:
        return 1  # two spill 280 to 592 bytes a thread: each warp holds all queries, and half of a leaf's key codes
    return MOST_OCTETS - (spec.kv.dim > 128 or (spec.kv.hierarchical and spec.warps == 1))


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


def unpacked_variant(spec: AttentionSpec, capability: int) -> AttentionSpec | None:
    """The variant of `spec` for the same steps, of many rows, over pages that a kernel has unpacked; None if there is
    none."""
    largest = far_variants(spec, capability)[-1][1]
    if spec.kv.bits == 16 or not (largest.query_rows and _has_warp_groups(spec)):
        return None
    return replace(largest, warp_specialized=True, unpacked=True, stages=WARP_GROUP_STAGES)


def _has_warp_groups(spec: AttentionSpec) -> bool:
    """Whether warp-specialized programs compute the scores of `spec`.

    Warp groups are not in Triton's interpreter, nor in their kernel what some scores need.
    """
    plain = not (spec.kv.hierarchical or spec.centered or spec.bias_positions)
    leaves = spec.leaf >= FEWEST_TOKENS and spec.kv.page_tokens % spec.leaf == 0
    return plain and leaves and spec.kv.dim in (64, 128, LARGE_HEAD) and spec.inline_asm


def far_variants(spec: AttentionSpec, capability: int) -> list[tuple[int, AttentionSpec]]:
    """Pairs of the most rows of a step (0: any number) and the variant of `spec` for them, for steps with more than
    NEAR_SPLITS splits of positions.

    Heads of a GQA group must fit the rows of a program, and accumulators the registers of a multiprocessor: of two
    programs, or of one of eight warps if heads have more than 128 features. Of more than 256, a program sums half of
    the features of values (AttentionSpec.value_parts). Only an sm_90 GPU has shown that both orders of operands give
    the same bits.
    """
    kv, group = spec.kv, spec.heads // spec.kv.heads
    # Items of 16 bits are loaded by twos.
    most = 128 if kv.hierarchical else MOST_FEATURES
    fits = 32 <= kv.dim <= most and group <= FAR_ROWS and (kv.bits == 16 or kv.width % 2 == 0)
    if not has_wgmma(capability) or kv.upper_only or not fits:
        return prefill_variants(spec)
    few_rows = FEW_FAR_ROWS if kv.dim <= 128 else FEW_LARGE_ROWS
    few = (few_rows[kv.bits], replace(spec, octets=1))
    # Rounded positions are prefetched to registers.
    rows = replace(spec, query_rows=FAR_ROWS, stages=3 if kv.bits == 16 else 1)
    # Producer warps unpack whole pages.
    if not _has_warp_groups(spec) or (kv.bits < 16 and spec.leaf < kv.page_tokens):
        return [few, (0, rows)]
    most_rows = SOME_LARGE_ROWS if kv.dim > 128 else SOME_FAR_ROWS if kv.bits < 16 else 0
    some = [(most_rows, rows)] if most_rows else []
    return [few, *some, (0, replace(rows, warp_specialized=True, stages=WARP_GROUP_STAGES))]
