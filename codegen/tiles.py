"""Tile choices as data, by target, format, class of M and shape; and how one is chosen for a weight.

The rows of `h200` are what benchmarks/gpu_tune.py found fastest on an H200, with the time it measured. Other
NVIDIA targets get the same cut without an early start where they cannot (before sm_90): not searched there.
Where a cut with pieces does not divide a weight, or on another target than sm_90, `plain` takes its place.
A choice depends on the class of M, never on M, where sums are floating point; integer sums are exact under
every cut, so that int8 kernels may have rows of their own for M up to 8, and for 1 to 4: those were chosen by the time
of a whole step, in which kernels overlap. Floats that are sums of whole groups are summed alike by the kernel for
single rows, so that there are such cuts for them too.

docs/gpu_kernels.md says what was tried beside.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from qcompile.codegen.gpu_attention import GpuKV
from qcompile.codegen.gpu_pack import MIX_ROWS
from qcompile.codegen.triton import DECODE_TOKENS, FEWEST_TOKENS, MULTIPROCESSORS, KernelSpec, Tile
from qcompile.errors import UnsupportedError

# (format, most tokens, N, K): Tile(tokens, rows, slices, splits, unroll, warps, stages, ahead, piece=piece)
H200: dict[tuple[str, int, int, int], Tile] = {
    ("mix_4_8", 16, 4096, 4096): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 7.6 us
    ("mix_4_8", 16, 4096, 14336): Tile(16, 64, 1, 4, 1, 4, 6, 128, piece=128),  # 11.7 us
    ("mix_4_8", 16, 6144, 4096): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 8.7 us
    ("mix_4_8", 16, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 6, 128, piece=128),  # 11.4 us
    ("mix_4_8", 16, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 4, 128, piece=128),  # 20.2 us
    ("mix_4_8", 64, 4096, 4096): Tile(32, 64, 1, 1, 1, 4, 8, piece=128),  # 11.1 us
    ("mix_4_8", 64, 4096, 14336): Tile(64, 64, 1, 4, 1, 4, 6, piece=128),  # 21.6 us
    ("mix_4_8", 64, 14336, 4096): Tile(64, 128, 1, 1, 1, 8, 8, piece=128),  # 20.7 us
    ("mix_4_8", 64, 28672, 4096): Tile(64, 128, 1, 1, 1, 8, 8, piece=128),  # 36.9 us
    ("mix_4_8", 128, 4096, 4096): Tile(64, 64, 1, 1, 1, 4, 6, piece=128),  # 14.7 us
    ("mix_4_8", 128, 4096, 14336): Tile(64, 64, 1, 2, 1, 4, 6, piece=128),  # 34.7 us
    ("mix_4_8", 128, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 32.8 us
    ("mix_4_8", 128, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 56.0 us
    ("mix_4_8", 256, 4096, 4096): Tile(64, 128, 1, 1, 1, 8, 8, piece=128),  # 19.0 us
    ("mix_4_8", 256, 4096, 14336): Tile(64, 128, 1, 1, 1, 8, 8, piece=128),  # 54.7 us
    ("mix_4_8", 256, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128),  # 54.9 us
    ("mix_4_8", 256, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 106.5 us
    ("mix_4_8", 512, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 29.8 us
    ("mix_4_8", 512, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 85.6 us
    ("mix_4_8", 512, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 106.7 us
    ("mix_4_8", 512, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 185.3 us
    ("mix_4_8", 1024, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 55.2 us
    ("mix_4_8", 1024, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 167.4 us
    ("mix_4_8", 1024, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 189.5 us
    ("mix_4_8", 1024, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 370.7 us
    ("mxfp4", 16, 4096, 4096): Tile(16, 64, 1, 4, 1, 4, 3, 128, piece=128),  # 6.5 us
    ("mxfp4", 16, 4096, 14336): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 16.5 us
    ("mxfp4", 16, 6144, 4096): Tile(16, 64, 1, 4, 1, 4, 3, 128, piece=128),  # 9.6 us
    ("mxfp4", 16, 14336, 4096): Tile(16, 64, 1, 1, 4, 4, 1, 128, piece=32),  # 17.6 us
    ("mxfp4", 16, 28672, 4096): Tile(16, 64, 1, 1, 4, 4, 1, 128, piece=32),  # 30.5 us
    ("mxfp4", 64, 4096, 4096): Tile(64, 64, 1, 4, 1, 4, 3, 128, piece=128),  # 9.2 us
    ("mxfp4", 64, 4096, 14336): Tile(64, 64, 1, 4, 1, 4, 3, 128, piece=128),  # 22.1 us
    ("mxfp4", 64, 14336, 4096): Tile(64, 64, 1, 1, 1, 4, 3, 128, piece=128),  # 21.7 us
    ("mxfp4", 64, 28672, 4096): Tile(64, 128, 1, 1, 2, 8, 1, piece=32),  # 40.7 us
    ("mxfp4", 128, 4096, 4096): Tile(64, 64, 1, 2, 1, 4, 4, 128, piece=128),  # 13.0 us
    ("mxfp4", 128, 4096, 14336): Tile(128, 64, 1, 4, 2, 4, 1, piece=32),  # 31.9 us
    ("mxfp4", 128, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 3, 0),  # 28.9 us
    ("mxfp4", 128, 28672, 4096): Tile(128, 256, 1, 1, 2, 8, 1, piece=32),  # 54.9 us
    ("mxfp4", 256, 4096, 4096): Tile(128, 64, 1, 1, 4, 4, 1, 128, piece=32),  # 17.4 us
    ("mxfp4", 256, 4096, 14336): Tile(256, 128, 1, 4, 2, 8, 1, 128, piece=16),  # 49.5 us
    ("mxfp4", 256, 14336, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 44.8 us
    ("mxfp4", 256, 28672, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 90.0 us
    ("mxfp4", 512, 4096, 4096): Tile(256, 64, 1, 1, 2, 4, 1, 128, piece=16),  # 27.8 us
    ("mxfp4", 512, 4096, 14336): Tile(256, 128, 1, 2, 2, 8, 1, 128, piece=16),  # 89.6 us
    ("mxfp4", 512, 14336, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 89.8 us
    ("mxfp4", 512, 28672, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16, lasting=True),  # 188.5 us
    ("mxfp4", 1024, 4096, 4096): Tile(256, 128, 1, 1, 2, 8, 1, 128, piece=16),  # 43.9 us
    ("mxfp4", 1024, 4096, 14336): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 150.7 us
    ("mxfp4", 1024, 14336, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16, lasting=True),  # 175.8 us
    ("mxfp4", 1024, 28672, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 317.0 us
    ("mxfp4", 2048, 4096, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 96.0 us
    ("mxfp4", 2048, 4096, 14336): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 358.0 us
    ("mxfp4", 2048, 14336, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 357.6 us
    ("mxfp4", 2048, 28672, 4096): Tile(256, 128, 1, 1, 2, 8, 1, piece=16),  # 693.5 us
    ("mxfp4_a8", 1, 4096, 4096): Tile(1, 8, 4, 1, 1, 4, 7, 128),  # 4.1 us
    ("mxfp4_a8", 1, 4096, 14336): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),
    ("mxfp4_a8", 1, 14336, 4096): Tile(1, 8, 1, 1, 1, 1, 5, 128),  # 10.7 us
    ("mxfp4_a8", 1, 28672, 4096): Tile(1, 16, 1, 1, 1, 1, 2, 128),  # 18.7 us
    ("mxfp4_a8", 16, 4096, 4096): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 6.6 us
    ("mxfp4_a8", 16, 4096, 14336): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 15.9 us
    ("mxfp4_a8", 16, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 4, 128, piece=128),  # 16.4 us
    ("mxfp4_a8", 16, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 6, 128, piece=128),  # 31.1 us
    ("mxfp4_a8", 64, 4096, 4096): Tile(64, 64, 1, 4, 1, 4, 8, piece=128),  # 11.4 us
    ("mxfp4_a8", 64, 4096, 14336): Tile(64, 128, 1, 4, 1, 8, 8, piece=128),  # 23.9 us
    ("mxfp4_a8", 64, 14336, 4096): Tile(64, 64, 1, 1, 1, 4, 8, piece=128),  # 24.6 us
    ("mxfp4_a8", 64, 28672, 4096): Tile(64, 64, 1, 1, 1, 4, 8, piece=128),  # 47.3 us
    ("mxfp4_a8", 128, 4096, 4096): Tile(128, 64, 1, 2, 1, 4, 4, piece=128, halves=True),  # 15.1 us
    ("mxfp4_a8", 128, 4096, 14336): Tile(128, 64, 1, 2, 1, 4, 4, piece=128, halves=True),  # 37.4 us
    ("mxfp4_a8", 128, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 30.1 us
    ("mxfp4_a8", 128, 28672, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 58.0 us
    ("mxfp4_a8", 256, 4096, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 19.9 us
    ("mxfp4_a8", 256, 4096, 14336): Tile(128, 64, 1, 2, 1, 4, 4, piece=128, halves=True),  # 59.5 us
    ("mxfp4_a8", 256, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 57.9 us
    ("mxfp4_a8", 256, 28672, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 101.7 us
    ("mxfp4_a8", 512, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 28.5 us
    ("mxfp4_a8", 512, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 86.5 us
    ("mxfp4_a8", 512, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 101.7 us
    ("mxfp4_a8", 512, 28672, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 195.6 us
    ("mxfp4_a8", 1024, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 55.1 us
    ("mxfp4_a8", 1024, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 169.2 us
    ("mxfp4_a8", 1024, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 195.8 us
    ("mxfp4_a8", 1024, 28672, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 387.3 us
    ("nested_8_4", 1, 4096, 4096): Tile(1, 8, 4, 1, 1, 2, 7, 128),  # 4.7 us
    ("nested_8_4", 1, 4096, 14336): Tile(16, 64, 1, 4, 1, 4, 8, 128, piece=128),
    ("nested_8_4", 1, 6144, 4096): Tile(1, 8, 4, 1, 1, 2, 5, 128),  # 6.4 us
    ("nested_8_4", 1, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 8, 128, piece=128),  # 16.1 us
    ("nested_8_4", 1, 28672, 4096): Tile(1, 16, 1, 1, 1, 2, 3, 128),  # 29.5 us
    ("nested_8_4", 16, 4096, 4096): Tile(16, 128, 1, 4, 1, 8, 4, 128, piece=128),  # 7.4 us
    ("nested_8_4", 16, 4096, 14336): Tile(16, 64, 1, 4, 1, 4, 8, 128, piece=128),  # 16.8 us
    ("nested_8_4", 16, 6144, 4096): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 8.9 us
    ("nested_8_4", 16, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 8, 128, piece=128),  # 16.1 us
    ("nested_8_4", 16, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 8, 128, piece=128),  # 31.8 us
    ("nested_8_4", 64, 4096, 4096): Tile(64, 64, 1, 2, 1, 4, 6, 128, piece=128),  # 10.6 us
    ("nested_8_4", 64, 4096, 14336): Tile(64, 128, 1, 4, 1, 8, 6, 128, piece=128),  # 22.3 us
    ("nested_8_4", 64, 14336, 4096): Tile(64, 128, 1, 1, 1, 8, 6, 128, piece=128),  # 20.2 us
    ("nested_8_4", 64, 28672, 4096): Tile(64, 128, 1, 1, 1, 8, 4, 128, piece=128),  # 39.4 us
    ("nested_8_4", 128, 4096, 4096): Tile(64, 64, 1, 2, 1, 4, 6, 128, piece=128),  # 13.4 us
    ("nested_8_4", 128, 4096, 14336): Tile(128, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 32.5 us
    ("nested_8_4", 128, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 4, 128, piece=128),  # 28.0 us
    ("nested_8_4", 128, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 4, 128, piece=128),  # 55.3 us
    ("nested_8_4", 256, 4096, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 17.9 us
    ("nested_8_4", 256, 4096, 14336): Tile(128, 128, 1, 2, 1, 8, 4, piece=128),  # 43.1 us
    ("nested_8_4", 256, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 47.6 us
    ("nested_8_4", 256, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 89.0 us
    ("nested_8_4", 512, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 4, piece=128),  # 24.7 us
    ("nested_8_4", 512, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, halves=True),  # 74.0 us
    ("nested_8_4", 512, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 85.1 us
    ("nested_8_4", 512, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 4, piece=128, lasting=True),  # 156.4 us
    ("nested_8_4", 1024, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 4, piece=128, lasting=True),  # 47.7 us
    ("nested_8_4", 1024, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 4, piece=128),  # 146.0 us
    ("nested_8_4", 1024, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 4, piece=128, lasting=True),  # 155.8 us
    ("nested_8_4", 1024, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 311.4 us
    ("qoq_channel", 1, 4096, 4096): Tile(1, 8, 1, 1, 32, 4, 1, 128),
    ("qoq_channel", 1, 4096, 14336): Tile(1, 8, 1, 1, 16, 2, 2, 128),
    ("qoq_channel", 1, 6144, 4096): Tile(1, 8, 1, 1, 8, 2, 3, 128),
    ("qoq_channel", 1, 28672, 4096): Tile(1, 8, 1, 1, 8, 2, 3, 128),
    ("qoq_channel", 2, 4096, 4096): Tile(2, 8, 1, 1, 16, 2, 2, 128),
    ("qoq_channel", 3, 4096, 4096): Tile(3, 8, 1, 1, 16, 2, 2, 128),
    ("qoq_channel", 3, 14336, 4096): Tile(16, 128, 1, 1, 1, 8, 8, 128, piece=128),  # 9.2 us
    ("qoq_channel", 3, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 4, 128, piece=128),  # 15.9 us
    ("qoq_channel", 16, 4096, 4096): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 5.3 us
    ("qoq_channel", 16, 4096, 14336): Tile(16, 64, 1, 8, 1, 4, 3, 128, piece=128),  # 10.0 us
    ("qoq_channel", 16, 6144, 4096): Tile(16, 64, 1, 4, 1, 4, 4, 128, piece=128),  # 6.4 us
    ("qoq_channel", 16, 14336, 4096): Tile(16, 128, 1, 1, 1, 8, 8, 128, piece=128),  # 9.3 us
    ("qoq_channel", 16, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 4, 128, piece=128),  # 16.4 us
    ("qoq_channel", 64, 4096, 4096): Tile(32, 64, 1, 1, 2, 4, 4, 4096),  # 7.1 us
    ("qoq_channel", 64, 4096, 14336): Tile(64, 64, 1, 4, 1, 4, 6, 128, piece=128),  # 13.5 us
    ("qoq_channel", 64, 14336, 4096): Tile(64, 64, 1, 1, 1, 4, 6, 128, piece=128),  # 10.7 us
    ("qoq_channel", 64, 28672, 4096): Tile(64, 64, 1, 1, 1, 4, 4, 0),  # 20.1 us
    ("qoq_channel", 128, 4096, 4096): Tile(64, 64, 1, 1, 1, 4, 5, 4096),  # 9.1 us
    ("qoq_channel", 128, 4096, 14336): Tile(64, 64, 1, 2, 1, 4, 6, 128, piece=128),  # 20.3 us
    ("qoq_channel", 128, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 4, 128, piece=128),  # 14.5 us
    ("qoq_channel", 128, 28672, 4096): Tile(128, 128, 1, 1, 1, 4, 4, 4096),  # 27.0 us
    ("qoq_channel", 256, 4096, 4096): Tile(64, 128, 1, 1, 1, 8, 6, 128, piece=128),  # 10.4 us
    ("qoq_channel", 256, 4096, 14336): Tile(64, 128, 1, 1, 1, 8, 6, 128, piece=128),  # 29.0 us
    ("qoq_channel", 256, 6144, 4096): Tile(128, 64, 1, 1, 1, 4, 4, piece=128),  # 15.2 us
    ("qoq_channel", 256, 14336, 4096): Tile(256, 64, 1, 1, 1, 4, 3, 4096),  # 26.1 us
    ("qoq_channel", 256, 28672, 4096): Tile(256, 64, 1, 1, 1, 4, 3, 4096),  # 51.7 us
    ("qoq_channel", 512, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 4, 128, piece=128),  # 14.2 us
    ("qoq_channel", 512, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 6, 128, piece=128),  # 40.6 us
    ("qoq_channel", 512, 6144, 4096): Tile(128, 64, 1, 1, 1, 4, 3),  # 22.0 us
    ("qoq_channel", 512, 14336, 4096): Tile(256, 64, 1, 1, 1, 4, 3, 16384),  # 51.0 us
    ("qoq_channel", 512, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 4, 128, piece=128),  # 98.7 us
    ("qoq_channel", 1024, 4096, 4096): Tile(256, 64, 1, 1, 1, 4, 3, 16384),  # 26.0 us
    ("qoq_channel", 1024, 4096, 14336): Tile(128, 128, 1, 1, 1, 4, 4, 0),  # 81.1 us
    ("qoq_channel", 1024, 14336, 4096): Tile(128, 128, 1, 1, 1, 4, 5, 16384),  # 97.4 us
    ("qoq_channel", 1024, 28672, 4096): Tile(128, 128, 1, 1, 1, 4, 5, 0),  # 177.1 us
    ("qoq_g128", 1, 4096, 4096): Tile(1, 8, 1, 1, 32, 4, 1, 128),
    ("qoq_g128", 1, 4096, 14336): Tile(1, 8, 1, 1, 16, 2, 3, 128),
    ("qoq_g128", 1, 6144, 4096): Tile(1, 8, 1, 1, 8, 2, 3, 128),
    ("qoq_g128", 1, 28672, 4096): Tile(1, 8, 1, 1, 8, 2, 3, 128),
    ("qoq_g128", 2, 4096, 4096): Tile(2, 8, 1, 1, 16, 2, 2, 128),
    ("qoq_g128", 2, 4096, 14336): Tile(2, 8, 1, 1, 16, 4, 3, 128),
    ("qoq_g128", 3, 4096, 4096): Tile(3, 8, 1, 1, 16, 2, 2, 128),
    ("qoq_g128", 3, 4096, 14336): Tile(3, 8, 1, 1, 8, 2, 3, 128),
    ("qoq_g128", 3, 28672, 4096): Tile(3, 8, 1, 1, 16, 2, 2, 128),
    ("qoq_g128", 16, 4096, 4096): Tile(16, 64, 1, 8, 2, 4, 3, 128, piece=128),  # 5.7 us
    ("qoq_g128", 16, 4096, 14336): Tile(16, 64, 1, 8, 2, 4, 4, 128, piece=128),  # 10.6 us
    ("qoq_g128", 16, 6144, 4096): Tile(16, 64, 1, 4, 2, 4, 4, 128, piece=128),  # 6.9 us
    ("qoq_g128", 16, 14336, 4096): Tile(16, 64, 1, 1, 2, 4, 4, 4096),  # 11.1 us
    ("qoq_g128", 16, 28672, 4096): Tile(16, 64, 1, 1, 2, 4, 8, 128, piece=128),  # 17.5 us
    ("qoq_g128", 64, 2048, 4096): Tile(32, 64, 1, 4, 2, 4, 4, 128, piece=128),  # 6.5 us
    ("qoq_g128", 64, 4096, 4096): Tile(32, 64, 1, 2, 2, 4, 4, 128, piece=128),  # 8.4 us
    ("qoq_g128", 64, 4096, 14336): Tile(64, 64, 1, 4, 2, 4, 4, 128, piece=128),  # 14.5 us
    ("qoq_g128", 64, 5120, 2048): Tile(32, 64, 1, 1, 2, 4, 4, 128, piece=128),  # 6.0 us
    ("qoq_g128", 64, 6144, 4096): Tile(64, 64, 1, 2, 2, 4, 6, 128, piece=128),  # 11.1 us
    ("qoq_g128", 64, 14336, 4096): Tile(64, 64, 1, 1, 2, 4, 4, 128, piece=128),  # 12.4 us
    ("qoq_g128", 64, 28672, 4096): Tile(64, 128, 1, 1, 2, 4, 3, 4096),  # 22.6 us
    ("qoq_g128", 128, 4096, 4096): Tile(64, 64, 1, 1, 2, 4, 4, 4096),  # 10.5 us
    ("qoq_g128", 128, 4096, 14336): Tile(128, 64, 1, 4, 2, 4, 4, 128, piece=128),  # 21.7 us
    ("qoq_g128", 128, 14336, 4096): Tile(128, 128, 1, 1, 2, 8, 4, 128, piece=128),  # 15.7 us
    ("qoq_g128", 128, 28672, 4096): Tile(128, 64, 1, 1, 2, 4, 4, 128, piece=128),  # 31.8 us
    ("qoq_g128", 256, 4096, 4096): Tile(64, 128, 1, 1, 2, 8, 6, 128, piece=128),  # 12.3 us
    ("qoq_g128", 256, 4096, 14336): Tile(128, 128, 1, 2, 2, 8, 6, 128, piece=128),  # 33.6 us
    ("qoq_g128", 256, 6144, 4096): Tile(128, 128, 1, 1, 2, 8, 4, 128, piece=128),  # 15.2 us
    ("qoq_g128", 256, 14336, 4096): Tile(128, 128, 1, 1, 2, 8, 4, 128, piece=128),  # 30.6 us
    ("qoq_g128", 256, 28672, 4096): Tile(128, 128, 1, 1, 2, 8, 4, 128, piece=128),  # 61.0 us
    ("qoq_g128", 512, 4096, 4096): Tile(128, 128, 1, 1, 2, 8, 4, 128, piece=128),  # 15.3 us
    ("qoq_g128", 512, 4096, 14336): Tile(128, 128, 1, 1, 2, 8, 6, 128, piece=128),  # 45.8 us
    ("qoq_g128", 512, 14336, 4096): Tile(128, 128, 1, 1, 2, 8, 4, 128, piece=128),  # 60.5 us
    ("qoq_g128", 512, 28672, 4096): Tile(128, 128, 1, 1, 2, 8, 4, 128, piece=128),  # 106.7 us
    ("qoq_g128", 1024, 4096, 4096): Tile(128, 128, 1, 1, 2, 8, 4, 128, piece=128),  # 30.3 us
    ("qoq_g128", 1024, 4096, 14336): Tile(128, 128, 1, 1, 2, 8, 6, 128, piece=128),  # 91.3 us
    ("qoq_g128", 1024, 14336, 4096): Tile(128, 128, 1, 1, 2, 8, 6, piece=128),  # 108.1 us
    ("qoq_g128", 1024, 28672, 4096): Tile(128, 128, 1, 1, 2, 8, 4, piece=128),  # 213.5 us
    ("w4_asym_g128", 16, 4096, 4096): Tile(16, 64, 1, 4, 1, 4, 3, 128, piece=128),  # 6.3 us
    ("w4_asym_g128", 16, 4096, 14336): Tile(16, 64, 1, 4, 1, 4, 3, 128, piece=128),  # 13.1 us
    ("w4_asym_g128", 16, 6144, 4096): Tile(16, 64, 1, 4, 1, 4, 3, 128, piece=128),  # 8.1 us
    ("w4_asym_g128", 16, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 3, 128, piece=128),  # 12.9 us
    ("w4_asym_g128", 16, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 3, 128, piece=128),  # 22.5 us
    ("w4_asym_g128", 64, 4096, 4096): Tile(64, 64, 1, 4, 1, 4, 2, 128, piece=128),  # 8.7 us
    ("w4_asym_g128", 64, 4096, 14336): Tile(64, 128, 1, 4, 1, 8, 3, 128, piece=128),  # 18.6 us
    ("w4_asym_g128", 64, 14336, 4096): Tile(64, 64, 1, 1, 1, 4, 2, 128, piece=128),  # 17.6 us
    ("w4_asym_g128", 64, 28672, 4096): Tile(64, 128, 1, 1, 1, 8, 1, piece=32),  # 33.8 us
    ("w4_asym_g128", 128, 4096, 4096): Tile(64, 64, 1, 1, 2, 4, 1, piece=32),  # 12.7 us
    ("w4_asym_g128", 128, 4096, 14336): Tile(128, 128, 1, 4, 1, 8, 2, 128, piece=128),  # 29.6 us
    ("w4_asym_g128", 128, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 1, piece=32),  # 28.0 us
    ("w4_asym_g128", 128, 28672, 4096): Tile(128, 256, 1, 1, 1, 8, 1, piece=32),  # 51.8 us
    ("w4_asym_g128", 256, 4096, 4096): Tile(128, 64, 1, 1, 2, 4, 1, 128, piece=32),  # 15.7 us
    ("w4_asym_g128", 256, 4096, 14336): Tile(256, 128, 1, 4, 1, 8, 1, 128, piece=16),  # 50.1 us
    ("w4_asym_g128", 256, 14336, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 44.2 us
    ("w4_asym_g128", 256, 28672, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 88.8 us
    ("w4_asym_g128", 512, 4096, 4096): Tile(128, 128, 1, 1, 2, 8, 1, 128, piece=16),  # 25.8 us
    ("w4_asym_g128", 512, 4096, 14336): Tile(256, 128, 1, 2, 1, 8, 1, 128, piece=16),  # 89.7 us
    ("w4_asym_g128", 512, 14336, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 88.9 us
    ("w4_asym_g128", 512, 28672, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16, lasting=True),  # 190.7 us
    ("w4_asym_g128", 1024, 4096, 4096): Tile(256, 128, 1, 1, 1, 8, 1, 128, piece=16),  # 45.8 us
    ("w4_asym_g128", 1024, 4096, 14336): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 150.8 us
    ("w4_asym_g128", 1024, 14336, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16, lasting=True),  # 177.7 us
    ("w4_asym_g128", 1024, 28672, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 314.1 us
    ("w4_asym_g128", 2048, 4096, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 98.8 us
    ("w4_asym_g128", 2048, 4096, 14336): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 365.3 us
    ("w4_asym_g128", 2048, 14336, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 359.3 us
    ("w4_asym_g128", 2048, 28672, 4096): Tile(256, 128, 1, 1, 1, 8, 1, piece=16),  # 731.3 us
    ("w4_asym_g128_a8", 64, 4096, 4096): Tile(64, 64, 1, 4, 1, 4, 2, 128, piece=128),  # 7.7 us
    ("w4_asym_g128_a8", 64, 4096, 14336): Tile(64, 64, 1, 4, 1, 4, 2, 128, piece=128),  # 16.8 us
    ("w4_asym_g128_a8", 64, 14336, 4096): Tile(64, 64, 1, 1, 1, 4, 3, 128, piece=128),  # 15.1 us
    ("w4_asym_g128_a8", 64, 28672, 4096): Tile(64, 64, 1, 1, 1, 4, 3, 128, piece=128),  # 29.8 us
    ("w4_asym_g128_int8", 1, 4096, 4096): Tile(1, 8, 4, 1, 1, 2, 8, 128),  # 2.5 us
    ("w4_asym_g128_int8", 1, 4096, 14336): Tile(16, 128, 1, 4, 1, 8, 6, 128, piece=128),
    ("w4_asym_g128_int8", 1, 6144, 4096): Tile(1, 8, 4, 1, 1, 2, 8, 128),  # 3.8 us
    ("w4_asym_g128_int8", 1, 28672, 4096): Tile(1, 16, 1, 1, 1, 1, 6, 128),  # 15.4 us
    ("w4_asym_g128_int8", 16, 4096, 4096): Tile(16, 128, 1, 4, 1, 8, 4, 128, piece=128),  # 5.4 us
    ("w4_asym_g128_int8", 16, 4096, 14336): Tile(16, 128, 1, 4, 1, 8, 6, 128, piece=128),  # 11.0 us
    ("w4_asym_g128_int8", 16, 6144, 4096): Tile(16, 64, 1, 4, 1, 4, 3, 128, piece=128),  # 6.6 us
    ("w4_asym_g128_int8", 16, 14336, 4096): Tile(16, 128, 1, 1, 1, 8, 6, 128, piece=128),  # 10.8 us
    ("w4_asym_g128_int8", 16, 28672, 4096): Tile(16, 64, 1, 1, 1, 4, 4, 128, piece=128),  # 18.2 us
    ("w4_asym_g128_int8", 64, 4096, 4096): Tile(32, 64, 1, 2, 1, 4, 8, 128, piece=128),  # 9.8 us
    ("w4_asym_g128_int8", 64, 4096, 14336): Tile(64, 128, 1, 4, 1, 8, 6, 128, piece=128),  # 18.8 us
    ("w4_asym_g128_int8", 64, 14336, 4096): Tile(64, 128, 1, 1, 1, 8, 6, 128, piece=128),  # 17.0 us
    ("w4_asym_g128_int8", 64, 28672, 4096): Tile(64, 128, 1, 1, 2, 4, 3, 0),  # 32.0 us
    ("w4_asym_g128_int8", 128, 4096, 4096): Tile(64, 64, 1, 2, 1, 4, 6, 128, piece=128),  # 12.9 us
    ("w4_asym_g128_int8", 128, 4096, 14336): Tile(128, 128, 1, 4, 1, 8, 4, 128, piece=128),  # 27.1 us
    ("w4_asym_g128_int8", 128, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 4, 128, piece=128),  # 25.9 us
    ("w4_asym_g128_int8", 128, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 4, 128, piece=128),  # 52.4 us
    ("w4_asym_g128_int8", 256, 4096, 4096): Tile(64, 128, 1, 1, 1, 8, 6, piece=128),  # 18.3 us
    ("w4_asym_g128_int8", 256, 4096, 14336): Tile(128, 128, 1, 2, 1, 8, 6, piece=128),  # 45.5 us
    ("w4_asym_g128_int8", 256, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 49.4 us
    ("w4_asym_g128_int8", 256, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 94.9 us
    ("w4_asym_g128_int8", 512, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128),  # 26.1 us
    ("w4_asym_g128_int8", 512, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 6, piece=128),  # 78.9 us
    ("w4_asym_g128_int8", 512, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 93.8 us
    ("w4_asym_g128_int8", 512, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 163.3 us
    ("w4_asym_g128_int8", 1024, 4096, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 48.4 us
    ("w4_asym_g128_int8", 1024, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 153.5 us
    ("w4_asym_g128_int8", 1024, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 161.9 us
    ("w4_asym_g128_int8", 1024, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True),  # 319.2 us
    ("w8_sym_channel", 1, 4096, 14336): Tile(1, 32, 1, 1, 16, 16, 1, 128),  # 13.8 us
    ("w8_sym_channel", 1, 128256, 4096): Tile(1, 8, 1, 1, 8, 2, 2, 128),
    ("w8_sym_channel", 2, 128256, 4096): Tile(2, 8, 1, 1, 8, 2, 2, 128),
    ("w8_sym_channel", 3, 4096, 4096): Tile(3, 8, 1, 1, 8, 2, 2, 128),
    ("w8_sym_channel", 3, 14336, 4096): Tile(16, 128, 1, 1, 1, 8, 6, 0),  # 15.9 us
    ("w8_sym_channel", 3, 28672, 4096): Tile(16, 128, 1, 1, 1, 8, 4, 0),  # 29.7 us
    ("w8_sym_channel", 3, 128256, 4096): Tile(3, 8, 1, 1, 8, 2, 2, 128),
    ("w8_sym_channel", 16, 4096, 4096): Tile(16, 32, 4, 1, 1, 4, 6, 16384),  # 6.1 us
    ("w8_sym_channel", 16, 4096, 14336): Tile(16, 32, 4, 1, 2, 4, 4, 16384),  # 16.0 us
    ("w8_sym_channel", 16, 6144, 4096): Tile(16, 64, 1, 1, 1, 4, 8, 128, piece=128),  # 8.6 us
    ("w8_sym_channel", 16, 14336, 4096): Tile(16, 64, 1, 1, 1, 4, 8, 128, piece=128),  # 15.4 us
    ("w8_sym_channel", 16, 28672, 4096): Tile(16, 64, 1, 1, 2, 4, 4, 16384),  # 29.6 us
    ("w8_sym_channel", 16, 128256, 4096): Tile(16, 64, 1, 1, 1, 4, 4, 128, piece=128),  # 120.1 us
    ("w8_sym_channel", 64, 4096, 4096): Tile(32, 64, 1, 1, 2, 4, 5, 16384),  # 6.9 us
    ("w8_sym_channel", 64, 4096, 14336): Tile(32, 64, 1, 1, 4, 4, 4, 16384),  # 18.7 us
    ("w8_sym_channel", 64, 6144, 4096): Tile(64, 64, 1, 1, 1, 4, 6, 128, piece=128),  # 9.7 us
    ("w8_sym_channel", 64, 14336, 4096): Tile(64, 64, 1, 1, 1, 4, 5, 4096),  # 17.0 us
    ("w8_sym_channel", 64, 28672, 4096): Tile(64, 64, 1, 1, 1, 4, 5, 4096),  # 32.2 us
    ("w8_sym_channel", 128, 4096, 4096): Tile(64, 64, 1, 1, 1, 4, 5, 16384),  # 8.9 us
    ("w8_sym_channel", 128, 4096, 14336): Tile(64, 128, 1, 2, 1, 8, 5, 128, piece=128),  # 24.6 us
    ("w8_sym_channel", 128, 14336, 4096): Tile(128, 64, 1, 1, 1, 4, 4, 128, piece=128),  # 19.2 us
    ("w8_sym_channel", 128, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 3, 0),  # 36.7 us
    ("w8_sym_channel", 256, 4096, 4096): Tile(64, 64, 1, 1, 1, 4, 5, 16384),  # 10.7 us
    ("w8_sym_channel", 256, 4096, 14336): Tile(64, 64, 1, 1, 1, 4, 5, 4096),  # 32.6 us
    ("w8_sym_channel", 256, 14336, 4096): Tile(128, 128, 1, 1, 1, 8, 3, 0),  # 28.2 us
    ("w8_sym_channel", 256, 28672, 4096): Tile(128, 128, 1, 1, 1, 8, 3, 0),  # 54.9 us
    ("w8_sym_channel", 1024, 4096, 4096): Tile(128, 128, 1, 1, 1, 4, 3, 0),  # 25.0 us
    ("w8_sym_channel", 1024, 4096, 14336): Tile(128, 128, 1, 1, 1, 8, 3, 0),  # 79.3 us
    ("w8_sym_channel", 1024, 14336, 4096): Tile(128, 128, 1, 1, 1, 4, 3, 0),  # 100.8 us
    ("w8_sym_channel", 1024, 28672, 4096): Tile(128, 128, 1, 1, 1, 4, 3, 0),  # 186.5 us
}
LIKE: dict[str, tuple[str, ...]] = {
    "w4_asym_g128_int8": ("nested_8_4", "qoq_g128"),
    "w4_asym_g128_a8": ("w4_asym_g128",),
    "nested_8_4": ("qoq_g128",),
    "mix_4_8": ("nested_8_4", "qoq_g128"),
    "mxfp4": ("mxfp4_a8", "qoq_g128"),
    "mxfp4_a8": ("qoq_g128",),
    "bf16": ("w8_sym_channel",),
}
"""Packings not searched (for some classes), and those whose cuts they take: about as many bytes a step."""

INTEGERS = ("qoq_channel", "qoq_g128", "w8_sym_channel")
"""Formats whose sums are integers."""

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
    return [most for most in found[:-1] if most >= DECODE_TOKENS or integers or most in alone] + [0]


def choose(format: str, n: int, k: int, tokens: int, capability: int = 90) -> Tile:
    """The tile for a weight [n, k] in `format` and `tokens` rows: of the nearest searched shape that divides it.

    Nearest is by the logarithms of N and K. Raises UnsupportedError when the shape has no packing.
    """
    sources = (format, *LIKE.get(format, ()))
    most = next((each for each in classes(format) if tokens <= each), None)
    most = most or max(each for name, each, _, _ in H200 if name in sources)
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
    if tile.tokens < FEWEST_TOKENS or tile.slices > 1 or (most > DECODE_TOKENS and not apart):
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
    if tile.tokens < FEWEST_TOKENS:
        warps = max(1, tile.warps * parts // tile.slices)
        alone = fitted(format, n, k, replace(tile, slices=parts, warps=warps), capability)
        if alone and KernelSpec(format, n, k, alone, width=n).starts != starts:
            alone = None
        return alone or in_one_order(format, n, k, DECODE_TOKENS, capability)
    rows = tile.rows if tile.rows % 64 == 0 and decode.rows % 64 == 0 else 64 if n % 64 == 0 else 32
    for cut, unroll in itertools.product((tile, plain(format, tile)), sorted({tile.unroll, least}, reverse=True)):
        same = fitted(format, n, k, replace(cut, rows=rows, slices=1, splits=parts, unroll=unroll), capability)
        if same is not None and KernelSpec(format, n, k, same, width=n).starts == starts:
            return same
    raise UnsupportedError(f"weight [{n}, {k}] in {format} has no cut for {tokens} rows into {parts} parts")


def plain(format: str, tile: Tile) -> Tile:
    """`tile`, or a cut of about its size where it unpacks in pieces: what those give up on takes it."""
    if not tile.piece:
        return tile
    stages, unroll = 4 if tile.tokens <= DECODE_TOKENS else 3, SMALLEST.get(format, 1)
    cut = replace(tile, tokens=min(tile.tokens, 128), rows=64, unroll=unroll, warps=4, stages=stages)
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
    if tile.tokens < FEWEST_TOKENS:
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
