"""Which output features get 8 bits: those that matter most for the time they cost on the target.

A kernel computes 16 output features of one width together (mix.py), so features are bought sixteen at a time: the
most salient of a linear first, and linears against each other by salience over predicted time. A feature of a linear
with more inputs costs more bytes; where a step is bound by computing and not by memory, 8 bits cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcompile import numerics
from qcompile.roofline import Peaks, predicted_us

NARROW_BITS, WIDE_BITS = 4, 8
_LEAST_COST = 0.01
"""Eight bits cost at least this share of the block's time, so that what is free is still ranked by salience."""


@dataclass(frozen=True)
class Block:
    """Output features `rows` int64 [<= 16] of the linear numbered `linear`, to be given 8 bits together.

    `salience` is their sum, `us` what they add to a step's predicted microseconds, `bits` what their codes grow by.
    """

    linear: int
    rows: Tensor
    salience: float
    us: float
    bits: int


def ranked(scores: Sequence[Tensor], inputs: Sequence[int], peaks: Peaks, tokens: int = 1) -> list[Block]:
    """All blocks, the best buy first: scores [N] by linear, and each linear's number of inputs.

    Times are those of a step of `tokens` rows on a machine of `peaks`.
    """
    found = []
    for number, (score, k) in enumerate(zip(scores, inputs, strict=True)):
        order = torch.argsort(score, descending=True, stable=True)
        us = _extra_us(k, peaks, tokens)
        for rows in order.split(numerics.ROW_BLOCK):
            bits = (WIDE_BITS - NARROW_BITS) * k * len(rows)
            found.append(Block(number, rows, float(score[rows].double().sum()), us, bits))
    return sorted(found, key=lambda block: -block.salience / block.us)


def _extra_us(k: int, peaks: Peaks, tokens: int) -> float:
    """What 8 bits instead of 4 add to the time of a block of 16 output features with k inputs."""
    peaks = replace(peaks, overhead_us=0.0)  # the kernel runs anyhow
    ops = 2.0 * tokens * k * numerics.ROW_BLOCK
    narrow, wide = (predicted_us(numerics.ROW_BLOCK * k * bits / 8, ops, peaks) for bits in (NARROW_BITS, WIDE_BITS))
    return max(wide - narrow, _LEAST_COST * narrow)


def share_of(bits: float) -> float:
    """The share of weights that have 8 bits where codes have `bits` on average."""
    return (bits - NARROW_BITS) / (WIDE_BITS - NARROW_BITS)


def within_bits(blocks: Sequence[Block], weights: int, target_bits: float) -> int:
    """How many of the first `blocks` can have 8 bits with codes of `target_bits` on average over `weights`."""
    left = (target_bits - NARROW_BITS) * weights
    for count, block in enumerate(blocks):
        left -= block.bits
        if left < -1e-6 * weights:
            return count
    return len(blocks)


def marks(blocks: Sequence[Block], sizes: Sequence[int]) -> list[Tensor]:
    """bool [N] for each linear of N = `sizes` output features: whether it is in one of `blocks`."""
    wide = [torch.zeros(size, dtype=torch.bool) for size in sizes]
    for block in blocks:
        wide[block.linear][block.rows] = True
    return wide
