"""Roofline: the least time a kernel can take, from what it moves and computes and what the machine can do.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peaks:
    """Rates of a machine, with the threads that will be used.

    `bytes_per_second` from memory; `ops_per_second` by type (int8, f32, bf16), a multiply and an add being
    two; `overhead_us` is what a kernel costs before it does anything (launch, barrier).
    """

    bytes_per_second: float
    ops_per_second: Mapping[str, float]
    overhead_us: float = 0.0


def predicted_us(bytes: float, ops: float, peaks: Peaks, dtype: str = "int8") -> float:
    """Microseconds: the longer of moving `bytes` and computing `ops` in `dtype`, and the overhead."""
    moving = bytes / peaks.bytes_per_second
    computing = ops / peaks.ops_per_second[dtype]
    return max(moving, computing) * 1e6 + peaks.overhead_us
