"""Tuned tiles for the grouped GEMMs of experts, as data, and their selection.

The table has the tiles that benchmarks/gpu_tune_experts.py found fastest on an H200, with the measured times: for steps
of 1, 2 and 4 rows with a GEMV per slot (1 token), of 8, 16 and 64 rows (16 tokens), or of 512 rows (64 tokens). No tile
splits K: the order of summation is always the same, and the grid is large enough to saturate memory bandwidth.
"""

from __future__ import annotations

import math

from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS, Tile
from qcompile.codegen.gpu.gemm.tiles import INT_SUM_FORMATS, MIN_UNROLL, fit_tile
from qcompile.errors import UnsupportedError
from qcompile.targets import Target

# (format, slots per program, outputs per expert, K): Tile(tokens, rows, sliced_k, split_k, unroll, warps, stages,
# prefetch_bytes)
H200: dict[tuple[str, int, int, int], Tile] = {
    ("mxfp4_a8", 1, 5760, 2880): Tile(1, 8, 1, 1, 1, 1, 8, 128),  # 13.8, 21.8, 40.3 us
    ("mxfp4_a8", 1, 2880, 2880): Tile(1, 8, 1, 1, 1, 1, 5, 128),  # 8.7, 13.5, 21.9 us
    ("mxfp4_a8", 1, 1536, 2048): Tile(1, 8, 1, 1, 1, 1, 4, 128),  # 6.7, 10.8, 17.8 us
    ("mxfp4_a8", 1, 2048, 768): Tile(1, 16, 1, 1, 1, 1, 3, 128),  # 4.3, 5.6, 9.3 us
    ("mxfp4_a8", 16, 5760, 2880): Tile(16, 64, 1, 1, 1, 2, 4, 128),  # 99.4, 91.4, 100.0 us
    ("mxfp4_a8", 16, 2880, 2880): Tile(16, 64, 1, 1, 1, 4, 4, 128),  # 57.5, 54.2, 58.5 us
    ("mxfp4_a8", 16, 1536, 2048): Tile(16, 64, 1, 1, 2, 2, 3, 128),  # 43.2, 72.6, 72.8 us
    ("mxfp4_a8", 16, 2048, 768): Tile(16, 64, 1, 1, 1, 2, 4, 128),  # 24.9, 41.7, 42.2 us
    ("mxfp4_a8", 64, 5760, 2880): Tile(64, 64, 1, 1, 1, 4, 4, 128),  # 323.3 us
    ("mxfp4_a8", 64, 2880, 2880): Tile(64, 64, 1, 1, 1, 4, 4, 128),  # 172.6 us
    ("mxfp4_a8", 64, 1536, 2048): Tile(64, 64, 1, 1, 1, 4, 3, 128),  # 285.1 us
    ("mxfp4_a8", 64, 2048, 768): Tile(64, 64, 1, 1, 2, 8, 3, 128),  # 318.7 us
    ("qoq_g128", 1, 5760, 2880): Tile(1, 8, 1, 1, 4, 1, 3, 128),  # 9.5, 17.6, 33.3 us
    ("qoq_g128", 1, 2880, 2880): Tile(1, 8, 1, 1, 8, 1, 2, 128),  # 6.8, 9.5, 17.4 us
    ("qoq_g128", 1, 1536, 2048): Tile(1, 8, 1, 1, 8, 1, 2, 128),  # 4.9, 7.8, 13.3 us
    ("qoq_g128", 1, 2048, 768): Tile(1, 16, 1, 1, 2, 1, 2, 128),  # 3.3, 4.8, 7.6 us
    ("qoq_g128", 16, 5760, 2880): Tile(16, 64, 1, 1, 2, 4, 4, 128),  # 72.3, 65.2, 75.6 us
    ("qoq_g128", 16, 2880, 2880): Tile(16, 64, 1, 1, 2, 4, 3, 128),  # 40.2, 38.1, 40.6 us
    ("qoq_g128", 16, 1536, 2048): Tile(16, 64, 1, 1, 2, 4, 3, 128),  # 30.2, 54.2, 54.7 us
    ("qoq_g128", 16, 2048, 768): Tile(16, 128, 1, 1, 2, 4, 3, 128),  # 17.6, 30.9, 31.2 us
    ("qoq_g128", 64, 5760, 2880): Tile(64, 128, 1, 1, 2, 4, 3, 128),  # 188.8 us
    ("qoq_g128", 64, 2880, 2880): Tile(64, 64, 1, 1, 2, 4, 4, 128),  # 140.8 us
    ("qoq_g128", 64, 1536, 2048): Tile(64, 128, 1, 1, 2, 8, 3, 128),  # 131.6 us
    ("qoq_g128", 64, 2048, 768): Tile(64, 128, 1, 1, 2, 8, 3, 128),  # 105.8 us
    ("w4_asym_g128", 16, 5760, 2880): Tile(16, 128, 1, 1, 1, 4, 3, 128),  # 95.7, 86.6, 97.6 us
    ("w4_asym_g128", 16, 2880, 2880): Tile(16, 64, 1, 1, 1, 4, 3, 128),  # 48.7, 43.7, 49.8 us
    ("w4_asym_g128", 16, 1536, 2048): Tile(16, 128, 1, 1, 1, 4, 3, 128),  # 37.7, 70.3, 70.1 us
    ("w4_asym_g128", 16, 2048, 768): Tile(16, 128, 1, 1, 1, 4, 3, 128),  # 24.5, 44.2, 44.6 us
    ("w4_asym_g128", 64, 5760, 2880): Tile(64, 128, 1, 1, 1, 8, 4, 128),  # 302.4 us
    ("w4_asym_g128", 64, 2880, 2880): Tile(64, 64, 1, 1, 1, 4, 3, 128),  # 210.0 us
    ("w4_asym_g128", 64, 1536, 2048): Tile(64, 128, 1, 1, 1, 4, 4, 128),  # 168.3 us
    ("w4_asym_g128", 64, 2048, 768): Tile(64, 128, 1, 1, 1, 8, 4, 128),  # 137.4 us
}
SIMILAR_FORMATS = {
    "qoq_channel": "qoq_g128",
    "w8_sym_channel": "qoq_g128",
    "mxfp4": "w4_asym_g128",
    "bf16": "w4_asym_g128",
}
"""Formats that were not tuned, and the formats whose tensor core tiles they use."""


def choose(format: str, n: int, k: int, tokens: int, gpu: Target) -> Tile:
    """The tile for experts' weights of [n, k] each and up to `tokens` slots per program (1: a GEMV).

    It is that of the nearest tuned shape, by the logarithms of N and K, whose tile fits the weight; otherwise a default
    tile. Raises UnsupportedError if none fits.
    """
    source = SIMILAR_FORMATS.get(format, format) if tokens > 1 else format
    near = {row[2:]: tile for row, tile in H200.items() if row[:2] == (source, tokens)} if gpu.capability == 90 else {}
    shapes = sorted(near, key=lambda s: abs(math.log(s[0] / n)) + abs(math.log(s[1] / k)))
    for tile in [*(near[shape] for shape in shapes), _default_tile(format, n, tokens, gpu)]:
        found = fit_tile(format, n, k, tile, gpu) if n % tile.rows == 0 else None
        if found is not None:
            return found
    raise UnsupportedError(f"experts' weights [{n}, {k}] in {format} have no tile of {tokens} tokens")


def _default_tile(format: str, n: int, tokens: int, gpu: Target) -> Tile:
    """A tile for formats and targets that were not tuned."""
    if tokens == 1 and format in INT_SUM_FORMATS:
        return Tile(1, 8, unroll=8, warps=1, stages=2, prefetch_bytes=128)
    if tokens == 1:
        return Tile(1, 8, warps=1, stages=8, prefetch_bytes=128)
    rows = 64 if n % 64 == 0 and gpu.capability == 90 else 32  # M of wgmma is 64
    stages = 4 if tokens <= DECODE_TOKENS else 3
    return Tile(tokens, rows, unroll=MIN_UNROLL.get(format, 1), stages=stages, prefetch_bytes=128)
