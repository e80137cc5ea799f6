"""Tile choices for weights of experts, as data: those of tiles.py for them, and how one is chosen.

Rows are what benchmarks/gpu_tune_experts.py found fastest on an H200, with the times it measured: for steps of 1, 2
and 4 rows where single slots are multiplied (1 token), of 8, 16 and 64 rows (16 tokens), or of 512 (64). All take whole
rows of inputs by one program: the order of sums is the same, and there are as many programs as memory wants.
"""

from __future__ import annotations

import math

from qcompile.codegen.tiles import INTEGERS, SMALLEST, fitted
from qcompile.codegen.triton import DECODE_TOKENS, Tile
from qcompile.errors import UnsupportedError

# (format, slots of a program, outputs of an expert, K)
H200: dict[tuple[str, int, int, int], Tile] = {
    ("mxfp4_a8", 1, 5760, 2880): Tile(1, 8, unroll=1, warps=1, stages=8, ahead=128),  # 13.8, 21.8, 40.3 us
    ("mxfp4_a8", 1, 2880, 2880): Tile(1, 8, unroll=1, warps=1, stages=5, ahead=128),  # 8.7, 13.5, 21.9 us
    ("mxfp4_a8", 1, 1536, 2048): Tile(1, 8, unroll=1, warps=1, stages=4, ahead=128),  # 6.7, 10.8, 17.8 us
    ("mxfp4_a8", 1, 2048, 768): Tile(1, 16, unroll=1, warps=1, stages=3, ahead=128),  # 4.3, 5.6, 9.3 us
    ("mxfp4_a8", 16, 5760, 2880): Tile(16, 64, unroll=1, warps=2, stages=4, ahead=128),  # 99.4, 91.4, 100.0 us
    ("mxfp4_a8", 16, 2880, 2880): Tile(16, 64, unroll=1, warps=4, stages=4, ahead=128),  # 57.5, 54.2, 58.5 us
    ("mxfp4_a8", 16, 1536, 2048): Tile(16, 64, unroll=2, warps=2, stages=3, ahead=128),  # 43.2, 72.6, 72.8 us
    ("mxfp4_a8", 16, 2048, 768): Tile(16, 64, unroll=1, warps=2, stages=4, ahead=128),  # 24.9, 41.7, 42.2 us
    ("mxfp4_a8", 64, 5760, 2880): Tile(64, 64, unroll=1, warps=4, stages=4, ahead=128),  # 323.3 us
    ("mxfp4_a8", 64, 2880, 2880): Tile(64, 64, unroll=1, warps=4, stages=4, ahead=128),  # 172.6 us
    ("mxfp4_a8", 64, 1536, 2048): Tile(64, 64, unroll=1, warps=4, stages=3, ahead=128),  # 285.1 us
    ("mxfp4_a8", 64, 2048, 768): Tile(64, 64, unroll=2, warps=8, stages=3, ahead=128),  # 318.7 us
    ("qoq_g128", 1, 5760, 2880): Tile(1, 8, unroll=4, warps=1, stages=3, ahead=128),  # 9.5, 17.6, 33.3 us
    ("qoq_g128", 1, 2880, 2880): Tile(1, 8, unroll=8, warps=1, stages=2, ahead=128),  # 6.8, 9.5, 17.4 us
    ("qoq_g128", 1, 1536, 2048): Tile(1, 8, unroll=8, warps=1, stages=2, ahead=128),  # 4.9, 7.8, 13.3 us
    ("qoq_g128", 1, 2048, 768): Tile(1, 16, unroll=2, warps=1, stages=2, ahead=128),  # 3.3, 4.8, 7.6 us
    ("qoq_g128", 16, 5760, 2880): Tile(16, 64, unroll=2, warps=4, stages=4, ahead=128),  # 72.3, 65.2, 75.6 us
    ("qoq_g128", 16, 2880, 2880): Tile(16, 64, unroll=2, warps=4, stages=3, ahead=128),  # 40.2, 38.1, 40.6 us
    ("qoq_g128", 16, 1536, 2048): Tile(16, 64, unroll=2, warps=4, stages=3, ahead=128),  # 30.2, 54.2, 54.7 us
    ("qoq_g128", 16, 2048, 768): Tile(16, 128, unroll=2, warps=4, stages=3, ahead=128),  # 17.6, 30.9, 31.2 us
    ("qoq_g128", 64, 5760, 2880): Tile(64, 128, unroll=2, warps=4, stages=3, ahead=128),  # 188.8 us
    ("qoq_g128", 64, 2880, 2880): Tile(64, 64, unroll=2, warps=4, stages=4, ahead=128),  # 140.8 us
    ("qoq_g128", 64, 1536, 2048): Tile(64, 128, unroll=2, warps=8, stages=3, ahead=128),  # 131.6 us
    ("qoq_g128", 64, 2048, 768): Tile(64, 128, unroll=2, warps=8, stages=3, ahead=128),  # 105.8 us
    ("w4_asym_g128", 16, 5760, 2880): Tile(16, 128, unroll=1, warps=4, stages=3, ahead=128),  # 95.7, 86.6, 97.6 us
    ("w4_asym_g128", 16, 2880, 2880): Tile(16, 64, unroll=1, warps=4, stages=3, ahead=128),  # 48.7, 43.7, 49.8 us
    ("w4_asym_g128", 16, 1536, 2048): Tile(16, 128, unroll=1, warps=4, stages=3, ahead=128),  # 37.7, 70.3, 70.1 us
    ("w4_asym_g128", 16, 2048, 768): Tile(16, 128, unroll=1, warps=4, stages=3, ahead=128),  # 24.5, 44.2, 44.6 us
    ("w4_asym_g128", 64, 5760, 2880): Tile(64, 128, unroll=1, warps=8, stages=4, ahead=128),  # 302.4 us
    ("w4_asym_g128", 64, 2880, 2880): Tile(64, 64, unroll=1, warps=4, stages=3, ahead=128),  # 210.0 us
    ("w4_asym_g128", 64, 1536, 2048): Tile(64, 128, unroll=1, warps=4, stages=4, ahead=128),  # 168.3 us
    ("w4_asym_g128", 64, 2048, 768): Tile(64, 128, unroll=1, warps=8, stages=4, ahead=128),  # 137.4 us
}
LIKE = {"qoq_channel": "qoq_g128", "w8_sym_channel": "qoq_g128", "mxfp4": "w4_asym_g128", "bf16": "w4_asym_g128"}
"""Formats not searched, and those whose cuts for the tensor cores they take."""


def choose(format: str, n: int, k: int, tokens: int, capability: int) -> Tile:
    """The tile for experts' weights of [n, k] each and up to `tokens` slots a program (1: one slot alone).

    That of the nearest searched shape, by the logarithms of N and K, if it divides the weight; a plain one where none
    was searched. Raises UnsupportedError when the weight has no tile.
    """
    source = LIKE.get(format, format) if tokens > 1 else format
    near = {row[2:]: tile for row, tile in H200.items() if row[:2] == (source, tokens)} if capability == 90 else {}
    shapes = sorted(near, key=lambda s: abs(math.log(s[0] / n)) + abs(math.log(s[1] / k)))
    for tile in [*(near[shape] for shape in shapes), _plain(format, n, tokens, capability)]:
        found = fitted(format, n, k, tile, capability) if n % tile.rows == 0 else None
        if found is not None:
            return found
    raise UnsupportedError(f"experts' weights [{n}, {k}] in {format} have no tile of {tokens} tokens")


def _plain(format: str, n: int, tokens: int, capability: int) -> Tile:
    """A cut that was not searched."""
    if tokens == 1 and format in INTEGERS:
        return Tile(1, 8, unroll=8, warps=1, stages=2, ahead=128)
    if tokens == 1:
        return Tile(1, 8, warps=1, stages=8, ahead=128)
    rows = 64 if n % 64 == 0 and capability == 90 else 32  # wgmma takes 64
    stages = 4 if tokens <= DECODE_TOKENS else 3
    return Tile(tokens, rows, unroll=SMALLEST.get(format, 1), stages=stages, ahead=128)
