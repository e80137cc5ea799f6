"""How weights, keys and values are put on even grids: one step, and a whole number of it for each.

Rounding is half to even throughout. Ranges that are not symmetric include 0, so that zero is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = 2.0**-22
"""How far products of a step may be off in float32, as a share of them: less than other numbers come by chance."""
FEW = (2, 16)
"""Entries of a group that are looked at first, and then; nearly all groups of ordinary weights the first rule out."""
BAND = 4096
"""Rows that are looked at in one go: few enough to stay in a processor's cache."""


def asymmetric(w: Tensor, bits: int, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """w [..., G] in one range per row -> codes uint8 [..., G], scale f32 [..., 1], zero uint8 [..., 1].

    value = (code - zero) * scale. The range includes 0; a row of zeros gets scale 1. With `keep` rows that are on such
    a grid already stay as they are, whichever of its codes they use.
    """
    top = 2**bits - 1
    w = w.float()
    low, high = (f(w, -1, keepdim=True).clamp_(**{side: 0.0}) for f, side in ((torch.amin, "max"), (torch.amax, "min")))
    scale = (high - low) / top
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if keep:
        given = even_steps(w.flatten(0, -2), low.flatten(), high.flatten(), top).view_as(scale)
        scale = torch.where(given > 0, given, scale)
    zero = torch.round(-low / scale)
    codes = (torch.round(w / scale) + zero).clamp_(0, top)
    return codes.to(torch.uint8), scale, zero.to(torch.uint8)


def symmetric(w: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """w [..., G] -> codes int8 within ±top and scale f32 [..., 1]; a row of zeros gets scale 1."""
    w = w.float()
    scale = w.abs().amax(-1, keepdim=True) / top
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(w / scale).clamp_(-top, top).to(torch.int8), scale


def by_group(w: Tensor, group: int) -> Tensor:
    """[N, K] -> [N, groups, group], the last group filled up with zeros (which no range notices)."""
    short = -w.shape[1] % group
    return torch.nn.functional.pad(w, (0, short)).unflatten(1, (-1, group))


def even_steps(w: Tensor, low: Tensor, high: Tensor, most: int) -> Tensor:
    """w f32 [M, G] -> f32 [M], for each row a step of which all its entries are whole multiples, or 0.

    It is 0 where no such step leads from `low` to `high` [M], a row's ends or 0, in `most` steps; in rows of zeros too.
    Weights published in few bits have one. From least to greatest in `most` steps is another wherever the codes at both
    ends are not in use, as in nine of ten groups of 128 that were rounded symmetrically to 4 bits: rounding to that
    would lose nearly as much once more.
    """
    found = torch.zeros_like(low)
    few, largest = w[:, : FEW[0]].T.contiguous(), torch.maximum(-low, high)
    likely = torch.stack([_even(few, largest / count) for count in range(1, most + 1)]).any(0)
    for rows in likely.nonzero().flatten().split(BAND):
        found[rows] = _steps(w[rows].T.contiguous(), low[rows], high[rows], most)
    return found


def _steps(w: Tensor, low: Tensor, high: Tensor, most: int) -> Tensor:
    """even_steps of the columns of w [G, M]."""
    found = torch.zeros_like(low)
    for count in range(1, most + 1):  # steps from 0 to the largest entry
        step = torch.maximum(-low, high) / count
        likely = _even(w[: FEW[1]], step) & (high - low < (most + 0.5) * step) & (found == 0)
        columns = likely.nonzero().flatten()
        if len(columns):
            found[columns] = step[columns] * _even(w[:, columns], step[columns])
    return found


def _even(w: Tensor, step: Tensor) -> Tensor:
    """bool [M]: whether all entries of a column of w [G, M] are whole multiples of its step [M]."""
    return ((torch.round(w / step) * step - w).abs() <= EXACT * w.abs()).all(0) & (step > 0)
