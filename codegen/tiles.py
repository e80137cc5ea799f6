"""Tile choices as data, by target, format, class of M and shape; and how one is chosen for a weight.

The rows of `h200` are what benchmarks/gpu_tune.py found fastest on an H200, with the time it measured. Other
NVIDIA targets get the same cut without an early start where they cannot (before sm_90): not searched there.
A choice depends on the class of M, never on M, where sums are floating point; integer sums are exact under
every cut, so that int8 kernels may have a row of their own for M up to 8.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from qcompile.codegen.gpu_attention import GpuKV
from qcompile.codegen.triton import DECODE_TOKENS, KernelSpec, Tile
from qcompile.errors import UnsupportedError
from qcompile.numerics import HIER_GROUP

# (format, most tokens, N, K): Tile(tokens, rows, slices, splits, unroll, warps, stages, ahead)
H200: dict[tuple[str, int, int, int], Tile] = {
    ("qoq_channel", 8, 4096, 4096): Tile(16, 64, 1, 8, 1, 4, 3, 0),  # 5.7 us
    ("qoq_channel", 16, 4096, 4096): Tile(16, 32, 4, 1, 1, 8, 4, 16384),  # 6.0 us
    ("qoq_channel", 8, 4096, 14336): Tile(16, 64, 1, 8, 1, 4, 4, 0),  # 10.7 us
    ("qoq_channel", 16, 4096, 14336): Tile(16, 64, 1, 4, 4, 4, 4, 16384),  # 11.6 us
    ("qoq_channel", 8, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 6, 4096),  # 10.1 us
    ("qoq_channel", 16, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 6, 4096),  # 10.1 us
    ("qoq_channel", 8, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 4, 0),  # 17.0 us
    ("qoq_channel", 16, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 4, 4096),  # 17.7 us
    ("qoq_channel", 64, 4096, 4096): Tile(32, 64, 1, 1, 2, 4, 4, 16384),  # 8.2 us
    ("qoq_channel", 64, 4096, 14336): Tile(32, 64, 1, 2, 2, 4, 5, 0),  # 19.5 us
    ("qoq_channel", 64, 14336, 4096): Tile(64, 128, 1, 1, 2, 8, 4, 0),  # 14.1 us
    ("qoq_channel", 64, 28672, 4096): Tile(64, 128, 1, 1, 1, 4, 4, 4096),  # 21.8 us
    ("qoq_channel", 256, 4096, 4096): Tile(64, 64, 1, 1, 2, 4, 3, 16384),  # 13.4 us
    ("qoq_channel", 256, 4096, 14336): Tile(64, 128, 1, 1, 4, 8, 3, 0),  # 39.3 us
    ("qoq_channel", 256, 14336, 4096): Tile(128, 128, 1, 1, 1, 4, 4, 16384),  # 27.7 us
    ("qoq_channel", 256, 28672, 4096): Tile(128, 128, 1, 1, 1, 4, 4, 0),  # 54.5 us
    ("qoq_channel", 1024, 4096, 4096): Tile(128, 128, 1, 1, 1, 4, 3, 16384),  # 27.7 us
    ("qoq_channel", 1024, 4096, 14336): Tile(128, 128, 1, 1, 1, 4, 4, 0),  # 86.9 us
    ("qoq_channel", 1024, 14336, 4096): Tile(128, 128, 1, 1, 1, 4, 4, 0),  # 108.3 us
    ("qoq_channel", 1024, 28672, 4096): Tile(128, 128, 1, 1, 1, 4, 3, 0),  # 206.0 us
    ("qoq_g128", 8, 4096, 4096): Tile(16, 64, 1, 4, 2, 4, 3, 4096),  # 6.7 us
    ("qoq_g128", 16, 4096, 4096): Tile(16, 32, 4, 1, 4, 4, 3, 16384),  # 6.2 us
    ("qoq_g128", 8, 4096, 14336): Tile(16, 128, 1, 8, 2, 4, 3, 0),  # 11.7 us
    ("qoq_g128", 16, 4096, 14336): Tile(16, 64, 1, 4, 2, 4, 4, 0),  # 13.1 us
    ("qoq_g128", 8, 14336, 4096): Tile(16, 64, 1, 1, 2, 4, 4, 4096),  # 11.8 us
    ("qoq_g128", 16, 14336, 4096): Tile(16, 64, 1, 1, 2, 4, 4, 4096),  # 11.9 us
    ("qoq_g128", 8, 28672, 4096): Tile(16, 128, 1, 1, 2, 4, 4, 0),  # 18.2 us
    ("qoq_g128", 16, 28672, 4096): Tile(16, 128, 1, 1, 2, 4, 4, 0),  # 18.9 us
    ("qoq_g128", 64, 4096, 4096): Tile(32, 64, 1, 1, 2, 4, 4, 16384),  # 9.7 us
    ("qoq_g128", 64, 4096, 14336): Tile(32, 64, 1, 4, 2, 4, 3, 0),  # 21.7 us
    ("qoq_g128", 64, 14336, 4096): Tile(64, 64, 1, 1, 2, 4, 3, 4096),  # 15.7 us
    ("qoq_g128", 64, 28672, 4096): Tile(64, 128, 1, 1, 2, 4, 3, 4096),  # 23.6 us
    ("qoq_g128", 256, 4096, 4096): Tile(64, 64, 1, 1, 2, 4, 3, 4096),  # 15.2 us
    ("qoq_g128", 256, 4096, 14336): Tile(64, 64, 1, 1, 2, 4, 4, 0),  # 44.0 us
    ("qoq_g128", 256, 14336, 4096): Tile(128, 256, 1, 1, 2, 8, 3, 0),  # 36.8 us
    ("qoq_g128", 256, 28672, 4096): Tile(128, 256, 1, 1, 2, 8, 3, 0),  # 73.1 us
    ("qoq_g128", 1024, 4096, 4096): Tile(128, 128, 1, 1, 2, 4, 2, 16384),  # 36.3 us
    ("qoq_g128", 1024, 4096, 14336): Tile(128, 256, 1, 1, 2, 8, 3, 0),  # 113.2 us
    ("qoq_g128", 1024, 14336, 4096): Tile(128, 128, 1, 1, 2, 4, 2, 16384),  # 134.2 us
    ("qoq_g128", 1024, 28672, 4096): Tile(128, 256, 1, 1, 2, 8, 3, 0),  # 243.9 us
    ("w4_asym_g128", 16, 4096, 4096): Tile(16, 32, 4, 1, 1, 4, 4, 16384),  # 7.4 us
    ("w4_asym_g128", 16, 4096, 14336): Tile(16, 128, 1, 4, 1, 4, 6, 4096),  # 17.0 us
    ("w4_asym_g128", 16, 14336, 4096): Tile(16, 128, 1, 2, 1, 4, 4, 4096),  # 16.8 us
    ("w4_asym_g128", 16, 28672, 4096): Tile(16, 128, 1, 1, 1, 4, 4, 0),  # 25.8 us
    ("w4_asym_g128", 64, 4096, 4096): Tile(32, 64, 1, 2, 1, 4, 4, 16384),  # 13.3 us
    ("w4_asym_g128", 64, 4096, 14336): Tile(64, 64, 1, 2, 1, 4, 4, 4096),  # 33.9 us
    ("w4_asym_g128", 64, 14336, 4096): Tile(64, 64, 1, 1, 1, 4, 3, 4096),  # 23.7 us
    ("w4_asym_g128", 64, 28672, 4096): Tile(64, 128, 1, 1, 1, 4, 2, 4096),  # 41.0 us
    # Not the fastest: with three stages this cut gave wrong results in one search (cause unknown), 23.4 us.
    ("w4_asym_g128", 256, 4096, 4096): Tile(64, 128, 1, 1, 1, 4, 2, 0),
    ("w4_asym_g128", 256, 4096, 14336): Tile(64, 64, 1, 1, 1, 4, 3, 0),  # 75.7 us
    ("w4_asym_g128", 256, 14336, 4096): Tile(64, 128, 1, 1, 1, 4, 2, 0),  # 75.3 us
    ("w4_asym_g128", 256, 28672, 4096): Tile(64, 128, 1, 1, 1, 4, 2, 16384),  # 149.5 us
    ("w8_sym_channel", 8, 4096, 4096): Tile(16, 128, 1, 4, 1, 8, 4, 0),  # 7.5 us
    ("w8_sym_channel", 16, 4096, 4096): Tile(16, 32, 4, 1, 1, 4, 6, 16384),  # 6.1 us
    ("w8_sym_channel", 8, 4096, 14336): Tile(16, 128, 1, 4, 2, 8, 4, 16384),  # 17.3 us
    ("w8_sym_channel", 16, 4096, 14336): Tile(16, 32, 4, 1, 2, 4, 4, 16384),  # 16.0 us
    ("w8_sym_channel", 8, 14336, 4096): Tile(16, 128, 1, 1, 1, 8, 6, 0),  # 15.9 us
    ("w8_sym_channel", 16, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 6, 16384),  # 15.8 us
    ("w8_sym_channel", 8, 28672, 4096): Tile(16, 128, 1, 1, 1, 8, 4, 0),  # 29.6 us
    ("w8_sym_channel", 16, 28672, 4096): Tile(16, 64, 1, 1, 2, 4, 4, 16384),  # 29.6 us
    ("w8_sym_channel", 64, 4096, 4096): Tile(32, 64, 1, 1, 2, 4, 5, 16384),  # 6.9 us
    ("w8_sym_channel", 64, 4096, 14336): Tile(32, 64, 1, 1, 4, 4, 4, 16384),  # 18.7 us
    ("w8_sym_channel", 64, 14336, 4096): Tile(64, 64, 1, 1, 1, 4, 5, 4096),  # 17.0 us
    ("w8_sym_channel", 64, 28672, 4096): Tile(64, 64, 1, 1, 1, 4, 5, 4096),  # 32.2 us
    ("w8_sym_channel", 256, 4096, 4096): Tile(64, 64, 1, 1, 1, 4, 5, 16384),  # 10.7 us
    ("w8_sym_channel", 256, 4096, 14336): Tile(64, 64, 1, 1, 1, 4, 5, 4096),  # 32.6 us
    ("w8_sym_channel", 256, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 3, 0),  # 28.2 us
    ("w8_sym_channel", 256, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 3, 0),  # 54.9 us
    ("w8_sym_channel", 1024, 4096, 4096): Tile(128, 128, 1, 1, 1, 4, 3, 0),  # 25.0 us
    ("w8_sym_channel", 1024, 14336, 4096): Tile(128, 128, 1, 1, 1, 4, 3, 0),  # 100.8 us
    ("w8_sym_channel", 1024, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 3, 0),  # 79.3 us
    ("w8_sym_channel", 1024, 28672, 4096): Tile(128, 128, 1, 1, 1, 4, 3, 0),  # 186.5 us
}
LIKE = {
    "w4_asym_g128_int8": "qoq_g128",
    "w4_asym_g128_a8": "w4_asym_g128",
    "nested_8_4": "qoq_g128",
    "bf16": "w8_sym_channel",
}
"""Packings not searched yet, and those whose cuts they take: as many bytes of weights and activations a step."""

SMALLEST = {"qoq_g128": 2}
"""Fewest blocks of inputs a step, where more than one."""

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024}
"""Shared memory of a program by compute capability; 227 KiB where none is named."""

MANY = 1 << 20
"""A number of rows in the last class."""


def classes(format: str) -> list[int]:
    """Most rows of each class a weight's packing has tiles for; the last is 0, any number."""
    source = LIKE.get(format, format)
    found = sorted({most for name, most, _, _ in H200 if name == source})
    if not found:
        raise UnsupportedError(f"format {format} has no GPU tiles")
    floats = format in ("w4_asym_g128", "w4_asym_g128_a8", "w4_asym_g128_int8", "nested_8_4", "bf16")
    return [most for most in found[:-1] if most >= DECODE_TOKENS or not floats] + [0]


def choose(format: str, n: int, k: int, tokens: int, capability: int = 90) -> Tile:
    """The tile for a weight [n, k] in `format` and `tokens` rows: of the nearest searched shape that divides it.

    Nearest is by the logarithms of N and K. Raises UnsupportedError when the shape has no packing.
    """
    source = LIKE.get(format, format)
    most = next((each for each in classes(format) if tokens <= each), None)
    most = most or max(each for name, each, _, _ in H200 if name == source)
    rows = {(rn, rk): tile for (name, c, rn, rk), tile in H200.items() if (name, c) == (source, most)}
    for shape in sorted(rows, key=lambda s: abs(math.log(s[0] / n)) + abs(math.log(s[1] / k))):
        tile = fitted(format, n, k, rows[shape], capability)
        if tile is not None:
            return tile
    return Tile(16 if most <= DECODE_TOKENS else 64, 32, unroll=SMALLEST.get(format, 1))


def in_one_order(format: str, n: int, k: int, tokens: int, capability: int = 90) -> Tile:
    """As choose, but cuts for all numbers of rows sum floats in the order of the decode class.

    So a row's bits do not depend on how many rows a step has: inputs come in as many parts, summed apart and then in
    order, and where it can be the same instruction of the tensor cores takes them.
    """
    tile = choose(format, n, k, tokens, capability)
    if not KernelSpec(format, n, k, tile).float_sum:
        return tile
    decode = choose(format, n, k, DECODE_TOKENS, capability)
    parts, least = decode.slices * decode.splits, SMALLEST.get(format, 1)
    rows = tile.rows if tile.rows % 64 == 0 and decode.rows % 64 == 0 else 64 if n % 64 == 0 else 32
    for unroll in sorted({tile.unroll, least}, reverse=True):
        same = fitted(format, n, k, replace(tile, rows=rows, slices=1, splits=parts, unroll=unroll), capability)
        if same is not None:
            return same
    raise UnsupportedError(f"weight [{n}, {k}] in {format} has no cut for {tokens} rows into {parts} parts")


def fitted(format: str, n: int, k: int, tile: Tile, capability: int) -> Tile | None:
    """`tile` with no more stages in flight than the GPU has room for; None if it does not divide the weight."""
    if capability < 90:
        tile = replace(tile, ahead=0)
    part = n * k  # more than any program fetches ahead: cut down where a program has less
    while tile.ahead and not _divides(format, n, k, tile) and part > 1:
        tile, part = replace(tile, ahead=tile.ahead // 2 if tile.ahead > 128 else 0), part // 2
    if not _divides(format, n, k, tile):
        return None
    step = KernelSpec(format, n, k, tile).step_bytes
    room = SHARED_BYTES.get(capability, 227 * 1024)
    stages = max(1, min(tile.stages, room // step))
    return replace(tile, stages=stages) if stages * step <= room else None


def _divides(format: str, n: int, k: int, tile: Tile) -> bool:
    try:
        KernelSpec(format, n, k, tile)
    except UnsupportedError:
        return False
    return True


SPLIT = 256
"""Positions of one split of decode attention: the order of sums depends on it alone. Of 512 long contexts would be up
to 15 % faster, and one sequence of 1,024 tokens half as fast."""


def attention(kv: GpuKV, whole: bool) -> dict[str, Any]:
    """How attention over these pages is cut: tokens a tile, warps, stages. Registers hold a tile and its sums.

    Found by benchmarks/gpu_attention.py --search on an H200 for heads of 128; `whole` differs in what it has in flight,
    which no sum depends on.
    """
    if kv.hierarchical:
        # A tile is a group: what its channels' scales do to queries is done once.
        return {"tile": HIER_GROUP, "warps": 4, "stages": 1 if whole else 2}
    tile = 16 if kv.dim > 128 else 64 if kv.dim <= 64 or kv.bits != 8 else 32
    return {"tile": tile, "warps": 2 if kv.bits == 16 else 1, "stages": 1 if whole else 3}
