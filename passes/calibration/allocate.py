"""Allocate 8 bits to output features by salience per predicted time on the target.

A kernel computes 16 output features of one width together (formats/mixed_layout.py), so features are allocated in
blocks of 16: the most salient of a linear first, and blocks of different linears by salience per predicted time. A
feature of a linear with more inputs costs more bytes; in a compute-bound step, 8 bits cost almost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcompile.formats.blocks import ROW_BLOCK
from qcompile.roofline import Peaks, predicted_us

NARROW_BITS, WIDE_BITS = 4, 8
_LEAST_COST = 0.01
"""Minimum cost of 8 bits as a share of the block's time, so that free blocks are still ranked by salience."""


@dataclass(frozen=True)
class Block:
    """Output features `rows` int64 [<= 16] of linear number `linear`, which get 8 bits together.

    `salience` is the sum over them, `us` the predicted extra microseconds per step, `bits` the extra bits of their
    codes.
    """

    linear: int
    rows: Tensor
    salience: float
    us: float
    bits: int


def ranked(scores: Sequence[Tensor], inputs: Sequence[int], peaks: Peaks, tokens: int = 1) -> list[Block]:
    """All blocks, best first, given scores [N] and the number of inputs per linear.

    Times are predicted for a step of `tokens` rows on a machine with `peaks`.
    """
    blocks = []
    for number, (score, k) in enumerate(zip(scores, inputs, strict=True)):
        order = torch.argsort(score, descending=True, stable=True)
        us = _extra_us(k, peaks, tokens)
        for rows in order.split(ROW_BLOCK):
            bits = (WIDE_BITS - NARROW_BITS) * k * len(rows)
            blocks.append(Block(number, rows, float(score[rows].double().sum()), us, bits))
    return sorted(blocks, key=lambda block: -block.salience / block.us)


def _extra_us(k: int, peaks: Peaks, tokens: int) -> float:
    """Extra time of 8 instead of 4 bits for a block of 16 output features with k inputs."""
    peaks = replace(peaks, overhead_us=0.0)  # the kernel runs in either case
    ops = 2.0 * tokens * k * ROW_BLOCK
    narrow, wide = (predicted_us(ROW_BLOCK * k * bits / 8, ops, peaks) for bits in (NARROW_BITS, WIDE_BITS))
    return max(wide - narrow, _LEAST_COST * narrow)


def share_of(bits: float) -> float:
    """The share of weights with 8 bits if codes have `bits` on average."""
    return (bits - NARROW_BITS) / (WIDE_BITS - NARROW_BITS)


def within_bits(blocks: Sequence[Block], weights: int, target_bits: float) -> int:
    """How many of the first `blocks` can have 8 bits if the codes of `weights` may have `target_bits` on average."""
    left = (target_bits - NARROW_BITS) * weights
    for count, block in enumerate(blocks):
        left -= block.bits
        if left < -1e-6 * weights:
            return count
    return len(blocks)


def marks(blocks: Sequence[Block], sizes: Sequence[int]) -> list[Tensor]:
    """bool [N] for each linear with N = `sizes` output features: whether a feature is in one of `blocks`."""
    wide = [torch.zeros(size, dtype=torch.bool) for size in sizes]
    for block in blocks:
        wide[block.linear][block.rows] = True
    return wide
