"""Uniform quantization: a value becomes an integer code times the scale of its group.

Rounding is half to even throughout. Asymmetric ranges include 0, so that zero is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

Parts = list[Tensor]
"""The parts of a quantized weight or activation, codes first."""
Shape = tuple[int, ...]

EXACT = 2.0**-22
"""Relative tolerance for a float32 value to count as a multiple of a scale; ordinary weights miss it by far."""
FEW = (2, 16)
"""How many entries of a group are tested first, and then; the first two already rule out most ordinary groups."""
PROBED = 256
"""Rows, spread over a weight, of which one must lie on an 8-bit grid before all rows are tested."""
BAND = 4096
"""Rows tested at a time: few enough to stay in the CPU's cache."""


def asymmetric(w: Tensor, bits: int, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """w [..., G] in one range per row -> codes uint8 [..., G], scale f32 [..., 1], zero uint8 [..., 1].

    value = (code - zero) * scale. The range includes 0; a row of zeros gets scale 1. With `keep`, a row of values that
    already lie on such a grid keeps them exactly, even if it does not use the lowest and highest code.
    """
    top = 2**bits - 1
    w = w.float()
    low, high = (f(w, -1, keepdim=True).clamp_(**{side: 0.0}) for f, side in ((torch.amin, "max"), (torch.amax, "min")))
    scale = (high - low) / top
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if keep:
        given = even_steps(w.flatten(0, -2), low.flatten(), high.flatten(), top, top).view_as(scale)
        scale = torch.where(given > 0, given, scale)
    zero = torch.round(-low / scale)
    codes = (torch.round(w / scale) + zero).clamp_(0, top)
    return codes.to(torch.uint8), scale, zero.to(torch.uint8)


def symmetric(w: Tensor, top: int, keep: bool = False) -> tuple[Tensor, Tensor]:
    """w [..., G] -> codes int8 within ±top and scale f32 [..., 1]; a row of zeros gets scale 1.

    With `keep`, a row of values that already lie on such a grid keeps them exactly, even if it uses the code -top - 1,
    or neither of ±top.
    """
    w = w.float()
    scale = w.abs().amax(-1, keepdim=True) / top
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    bottom = -top
    if keep:
        given = _symmetric_steps(w.flatten(0, -2), top).view_as(scale)
        scale, bottom = torch.where(given > 0, given, scale), -top - 1
    return torch.round(w / scale).clamp_(bottom, top).to(torch.int8), scale


def _symmetric_steps(w: Tensor, top: int) -> Tensor:
    """w f32 [M, G] -> f32 [M]: for each row, a scale of which all entries are multiples by -top - 1 to top, or 0."""
    probed = w[torch.linspace(0, len(w) - 1, min(len(w), PROBED)).long()]
    if not bool(_steps_of(probed, top).any()):  # most weights never were on such a grid, and trying 128 scales is slow
        return torch.zeros_like(w[:, 0])
    return _steps_of(w, top)


def _steps_of(w: Tensor, top: int) -> Tensor:
    low, high = w.amin(1).clamp_(max=0), w.amax(1).clamp_(min=0)
    steps = even_steps(w, low, high, top + 1, 2 * top + 1)
    return torch.where(high < (top + 0.5) * steps, steps, torch.zeros_like(steps))


def groups_of(k: int, group: int) -> int:
    """Number of groups of `group` inputs that cover k; the last may be short. 0 means one group."""
    return -(-k // group) if group else 1


def spread(part: Tensor, group: int, k: int) -> Tensor:
    """[N, groups] -> [N, K], each entry repeated over its group."""
    return part.repeat_interleave(group, 1)[:, :k]


def by_group(w: Tensor, group: int) -> Tensor:
    """[N, K] -> [N, groups, group], the last group zero-padded (which changes no range)."""
    short = -w.shape[1] % group
    return torch.nn.functional.pad(w, (0, short)).unflatten(1, (-1, group))


def even_steps(w: Tensor, low: Tensor, high: Tensor, largest: int, most: int) -> Tensor:
    """w f32 [M, G] -> f32 [M]: for each row, a scale that divides all its entries, or 0.

    `low` and `high` [M] are the ends of a row's range, which includes 0. The result is 0 where no such scale covers the
    range in `most` steps and the largest entry in `largest`, and in rows of zeros. Weights that were published in few
    bits have such a scale. It differs from (high - low) / most wherever a group does not use both extreme codes, as in
    nine of ten groups of 128 that were rounded symmetrically to 4 bits; rounding those to the other scale would lose
    nearly as much again.
    """
    steps = torch.zeros_like(low)
    few, ends = w[:, : FEW[0]].T.contiguous(), torch.maximum(-low, high)
    likely = torch.zeros_like(low, dtype=torch.bool)
    for count in range(1, largest + 1):
        likely |= _even(few, ends / count)
    for rows in likely.nonzero().flatten().split(BAND):
        steps[rows] = _steps(w[rows].T.contiguous(), low[rows], high[rows], largest, most)
    return steps


def _steps(w: Tensor, low: Tensor, high: Tensor, largest: int, most: int) -> Tensor:
    """even_steps of the columns of w [G, M]."""
    steps = torch.zeros_like(low)
    for count in range(1, largest + 1):  # steps from 0 to the largest entry
        step = torch.maximum(-low, high) / count
        likely = _even(w[: FEW[1]], step) & (high - low < (most + 0.5) * step) & (steps == 0)
        columns = likely.nonzero().flatten()
        if len(columns):
            steps[columns] = step[columns] * _even(w[:, columns], step[columns])
    return steps


def _even(w: Tensor, step: Tensor) -> Tensor:
    """bool [M]: whether all entries of a column of w [G, M] are whole multiples of its step [M]."""
    return ((torch.round(w / step) * step - w).abs() <= EXACT * w.abs()).all(0) & (step > 0)
