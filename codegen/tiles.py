"""How a cut is chosen for a weight, by target, format, class of M and shape; those searched are in tile_table.py.

Other NVIDIA targets get the cuts of an H200 without an early start where they cannot (before sm_90): none was searched
there. Where a cut with pieces does not divide a weight, or on another target than sm_90, `plain` takes its place.
A choice depends on the class of M, never on M, where sums are floating point.

docs/gpu_kernels.md says what was tried beside.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from qcompile.codegen.gpu_attention import GpuKV
from qcompile.codegen.gpu_pack import MIX_ROWS
from qcompile.codegen.tile_table import H200, LIKE
from qcompile.codegen.triton import DECODE_TOKENS, FEW_TOKENS, FEWEST_TOKENS, MULTIPROCESSORS, PLANES, KernelSpec, Tile
from qcompile.errors import UnsupportedError

INTEGERS = ("qoq_channel", "qoq_g128", "w8_sym_channel")
"""Formats whose sums are integers."""

FEW = (*PLANES, "qoq_g128", "mix_4_8", "w4_asym_g128_int8", "w4_asym_g128_a8", "mxfp4_a8")
"""Formats with tiles of FEW_TOKENS."""

SMALLEST = {"qoq_g128": 2}
"""Fewest blocks of inputs a step, where more than one."""

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024}
"""Shared memory of a program by compute capability; 227 KiB where none is named."""

MOST_PARTS = {False: 4, True: 8}
"""Parts of K that a weight not searched is cut into at most, by whether its sums are integers."""

LEAST_INPUTS = 512
"""Fewest inputs of such a part."""

MANY = 1 << 20
"""A number of rows in the last class."""


def classes(format: str) -> list[int]:
    """Most rows of each class a weight's packing has tiles for; the last is 0, any number."""
    sources = (format, *LIKE.get(format, ()))
    found = sorted({most for name, most, _, _ in H200 if name in sources})
    if not found:
        raise UnsupportedError(f"format {format} has no GPU tiles")
    integers = format in INTEGERS
    alone = [most for (name, most, _, _), tile in H200.items() if name == format and tile.tokens < FEWEST_TOKENS]
    few = [FEW_TOKENS] if format in FEW else []
    return [*sorted(few + [most for most in found[:-1] if most >= DECODE_TOKENS or integers or most in alone]), 0]


def choose(format: str, n: int, k: int, tokens: int, capability: int = 90) -> Tile:
    """The tile for a weight [n, k] in `format` and `tokens` rows: of the nearest searched shape that divides it.

    Nearest is by the logarithms of N and K. Raises UnsupportedError when the shape has no packing.
    """
    tile = _searched(format, n, k, tokens, capability)
    if format in FEW and tokens <= FEW_TOKENS and tile.piece == 128:
        # The same sums, with half as much to copy beside the weights, and for the tensor cores to do.
        return replace(tile, tokens=FEW_TOKENS)
    return tile


def _searched(format: str, n: int, k: int, tokens: int, capability: int) -> Tile:
    """The tile of the class that was searched: of FEW_TOKENS none was."""
    sources = (format, *LIKE.get(format, ()))
    most = next((each for each in classes(format) if tokens <= each), None)
    most = DECODE_TOKENS if most == FEW_TOKENS else most or max(each for name, each, _, _ in H200 if name in sources)
    source = next(source for source in sources if any(row[:2] == (source, most) for row in H200))
    rows = {(rn, rk): tile for (name, c, rn, rk), tile in H200.items() if (name, c) == (source, most)}
    for shape in sorted(rows, key=lambda s: abs(math.log(s[0] / n)) + abs(math.log(s[1] / k))):
        cuts = (rows[shape], plain(format, rows[shape]))
        tile = next(filter(None, (fitted(format, n, k, cut, capability) for cut in cuts)), None)
        if tile is not None:
            tile = _spread(format, n, k, tile, most, capability)
            return tile if shape == (n, k) else _of_more_warps(format, n, k, tile, capability)
    return Tile(16 if most <= DECODE_TOKENS else 64, 32, unroll=SMALLEST.get(format, 1), joined=capability == 90)


def _spread(format: str, n: int, k: int, tile: Tile, most: int, capability: int) -> Tile:
    """`tile` in more parts of K where programs for up to `most` rows would leave multiprocessors idle.

    Of many rows a quarter of them may be. Sums of floats are of as many parts for any number of rows, of which many
    make them costly. Sums of integers of more than a few rows are worth parts only where warps copy and multiply apart.
    """
    apart = format in INTEGERS and tile.piece == 128
    busy = MULTIPROCESSORS * (4 if most <= DECODE_TOKENS else 3) // 4
    if tile.single or tile.slices > 1 or (most > DECODE_TOKENS and not apart):
        return tile
    while n // tile.rows * tile.splits * max(1, most // tile.tokens) < busy:
        more = replace(tile, rows=64, warps=4) if tile.rows > 64 else replace(tile, splits=2 * tile.splits)
        found = fitted(format, n, k, more, capability)
        if found is None or more.splits > MOST_PARTS[format in INTEGERS] or k < more.splits * LEAST_INPUTS:
            break
        tile = found
    return tile


def _of_more_warps(format: str, n: int, k: int, tile: Tile, capability: int) -> Tile:
    """`tile` for a single row, or another of four warps where few warps would take the weight."""
    if tile.tokens > 1 or format not in INTEGERS or n // tile.rows * tile.warps >= 8 * MULTIPROCESSORS:
        return tile
    unroll = 8 if format == "w8_sym_channel" else 16  # as many bytes
    return fitted(format, n, k, replace(tile, rows=8, unroll=unroll, warps=4, stages=4), capability) or tile


def in_one_order(format: str, n: int, k: int, tokens: int, capability: int = 90) -> Tile:
    """As choose, but cuts for all numbers of rows sum floats in the order of the decode class.

    So a row's bits do not depend on how many rows a step has: inputs come in as many parts, summed apart and then in
    order, and where it can be the same instruction of the tensor cores takes them.
    """
    tile = choose(format, n, k, tokens, capability)
    if not KernelSpec(format, n, k, tile, width=n).float_sum:
        return tile
    decode = choose(format, n, k, DECODE_TOKENS, capability)
    parts, least = decode.slices * decode.splits, SMALLEST.get(format, 1)
    starts = KernelSpec(format, n, k, decode, width=n).starts
    if tile.single:
        warps = max(1, tile.warps * parts // tile.slices)
        alone = fitted(format, n, k, replace(tile, slices=parts, warps=warps), capability)
        if alone and KernelSpec(format, n, k, alone, width=n).starts != starts:
            alone = None
        return alone or in_one_order(format, n, k, FEW_TOKENS, capability)
    turning = _in_turns(format, n, k, tokens, parts) if parts > 1 and capability == 90 else None
    if turning is not None and KernelSpec(format, n, k, turning, width=n).starts == starts:
        return turning
    rows = tile.rows if tile.rows % 64 == 0 and decode.rows % 64 == 0 else 64 if n % 64 == 0 else 32
    for cut, unroll in itertools.product((tile, plain(format, tile)), sorted({tile.unroll, least}, reverse=True)):
        same = fitted(format, n, k, replace(cut, rows=rows, slices=1, splits=parts, unroll=unroll), capability)
        if same is not None and KernelSpec(format, n, k, same, width=n).starts == starts:
            return same
    raise UnsupportedError(f"weight [{n}, {k}] in {format} has no cut for {tokens} rows into {parts} parts")


def _in_turns(format: str, n: int, k: int, tokens: int, parts: int) -> Tile | None:
    """A tile whose programs sum `parts` one after the other, for a class of up to `tokens` rows (a step has up to 512).

    None where programs that sum them apart are faster: few rows, or too few of its programs for the multiprocessors.
    Found on an H200 with weights of 4096 by 4096 and 3584 by 18944 (docs/gpu_kernels.md).
    """
    if format == "bf16":
        tile = Tile(64, 64, stages=4) if tokens <= 128 else Tile(64, 128, warps=8, stages=4)
    elif format in PLANES:
        few = Tile(64, 64, stages=3, ahead=128) if tokens <= 128 else Tile(64, 128, warps=8, stages=3, ahead=128)
        tile = few if tokens <= 256 else Tile(128, 128, warps=8, stages=2, ahead=128)
    else:
        tile = Tile(64, 128, warps=8, stages=6) if tokens <= 256 else Tile(128, 128, warps=8, stages=6, halves=True)
    programs = n // tile.rows * (min(tokens, 512) // tile.tokens)
    few_rows = tokens <= 128 and format not in ("bf16", "w4_asym_g128")
    if few_rows or tokens <= DECODE_TOKENS or programs < 100:
        return None
    # Of many inputs what programs lose by tiles of 64 tokens is more than what sums of parts cost.
    if k > 2 * n and tile.tokens == 64 and not (format == "mix_4_8" and tokens == 256):
        return None
    return fitted(format, n, k, replace(tile, turns=parts, piece=0 if format == "bf16" else 128), 90)


def plain(format: str, tile: Tile) -> Tile:
    """`tile`, or a cut of about its size where it unpacks in pieces: what those give up on takes it."""
    if not tile.piece:
        return tile
    stages, unroll = 4 if tile.tokens <= DECODE_TOKENS else 3, SMALLEST.get(format, 1)
    tokens = max(FEWEST_TOKENS, min(tile.tokens, 128))
    cut = replace(tile, tokens=tokens, rows=64, unroll=unroll, warps=4, stages=stages)
    return replace(cut, piece=0, halves=False, lasting=False)


def fitted(format: str, n: int, k: int, tile: Tile, capability: int) -> Tile | None:
    """`tile` with no more stages in flight than the GPU has room for; None if it does not divide the weight."""
    tile = tile if capability == 90 else plain(format, tile)
    tile = replace(tile, ahead=tile.ahead if capability >= 90 else 0, joined=capability == 90)
    tile = replace(tile, lasting=tile.lasting and tile.splits == 1)
    if format == "mix_4_8":
        tile = _of_two_widths(n, tile)
    elif tile.piece == 128 and n % tile.rows:
        tile = replace(tile, rows=64, warps=4, lasting=False)
    if tile.single:
        tile = _of_few_steps(k, tile)
    part = n * k  # more than any program fetches ahead: cut down where a program has less
    while tile.ahead and not _divides(format, n, k, tile) and part > 1:
        tile, part = replace(tile, ahead=tile.ahead // 2 if tile.ahead > 128 else 0), part // 2
    if not _divides(format, n, k, tile):
        return None
    step = KernelSpec(format, n, k, tile, width=n).step_bytes
    room = SHARED_BYTES.get(capability, 227 * 1024)
    if not step:
        return tile
    stages = max(1, min(tile.stages, room // step))
    return replace(tile, stages=stages) if stages * step <= room else None


def _of_few_steps(k: int, tile: Tile) -> Tile:
    """`tile` for single rows in steps of which no more than half of the blocks are beside the weight."""
    while tile.unroll > 1 and 2 * (-(k // 128) % tile.unroll) > k // 128:
        tile = replace(tile, unroll=tile.unroll // 2)
    return tile


def _of_two_widths(n: int, tile: Tile) -> Tile:
    """`tile` for n packed rows of 8 and of 4 bits: two kinds in a program only where its warps go on apart.

    Where programs share sums all of their warps must have rows.
    """
    if not tile.piece:
        return replace(tile, rows=min(tile.rows, MIX_ROWS), ahead=0)
    if tile.splits > 1 and n % tile.rows:
        return replace(tile, rows=MIX_ROWS, warps=4)
    return tile


def _divides(format: str, n: int, k: int, tile: Tile) -> bool:
    try:
        KernelSpec(format, n, k, tile, width=n)
    except UnsupportedError:
        return False
    return True


def split(kv: GpuKV) -> int:
    """Positions of one split of decode attention: the order of sums depends on it alone. Registers hold a leaf's."""
    return kv.leaves * (64 if kv.dim <= 128 else 32)


def attention(kv: GpuKV, cut: str) -> dict[str, Any]:
    """How attention over these pages is cut: stages, and whether programs take several splits in turn.

    Found by benchmarks/gpu_attention.py on an H200 for heads of 128; cuts differ in what is in flight, which no sum
    depends on. Programs that take several splits have more registers, so that as many of them fit on all
    multiprocessors; more than 4 bits leave none for that.
    docs/gpu_kernels.md says what was tried for several queries.
    """
    several = cut == "split" and (kv.hierarchical or (kv.bits == 4 and kv.dim <= 128))
    stages = 3 if cut == "split" and kv.hierarchical else 2
    return {"cut": cut, "stages": stages, "several": several}
