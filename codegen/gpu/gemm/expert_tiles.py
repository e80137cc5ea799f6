"""Tile selection for the grouped GEMMs of experts.

The tuned tiles are a data file (tile_table.py). They were measured on an H200 by benchmarks/gpu_tune_experts.py: for
steps of 1, 2 and 4 rows with a GEMV per slot (1 slot per program), of 8, 16 and 64 rows (16 slots), and of 512 rows (64
slots). No tile splits K: the order of summation is always the same, and the grid is large enough to saturate memory
bandwidth.
"""

from __future__ import annotations

from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS, Tile
from qcompile.codegen.gpu.gemm.tile_table import load_table
from qcompile.formats.registry import gpu_kernel
from qcompile.targets import Target

TUNED = load_table("expert_tiles_h200")
"""The tuned tiles; n is the outputs of one expert."""


def candidates(format: str, n: int, k: int, tokens: int, gpu: Target) -> list[Tile]:
    """Tiles for experts' weights of [n, k] each and up to `tokens` slots per program (1: a GEMV), the best first.

    Tuned tiles come in the order of their distance from [n, k], by logarithms, then a default tile.
    """
    source = TUNED.sources(format)[-1] if tokens > 1 else format
    tuned = [tile for _, tile in TUNED.by_distance(source, tokens, n, k)] if gpu.has_wgmma else []
    return [tile for tile in [*tuned, _default_tile(format, n, tokens, gpu)] if n % tile.rows == 0]


def _default_tile(format: str, n: int, tokens: int, gpu: Target) -> Tile:
    """A tile for formats and targets that were not tuned."""
    kernel = gpu_kernel(format)
    if tokens == 1 and not kernel.float_sum:
        return Tile(1, 8, unroll=8, warps=1, stages=2, prefetch_bytes=128)
    if tokens == 1:
        return Tile(1, 8, warps=1, stages=8, prefetch_bytes=128)
    rows = 64 if n % 64 == 0 and gpu.has_wgmma else 32  # M of wgmma is 64
    stages = 4 if tokens <= DECODE_TOKENS else 3
    return Tile(tokens, rows, unroll=kernel.min_unroll, stages=stages, prefetch_bytes=128)
