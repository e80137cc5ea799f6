"""Weights with codes and scales that gradients can move.

A code gets an offset, and its group's scale a factor. The weight is made of the rounded sums of codes and offsets; the
gradient passes through that rounding as if it were not there, except where a code is beyond the ends of its range
(straight-through estimation).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcompile.formats.rounding import Parts, by_group
from qcompile.formats.weight import Grid, positive

_EDGE = 0.49
"""Largest first offset: with it, the first rounding still gives the codes that calibration chose."""


class _Straight(torch.autograd.Function):
    """(codes + offsets, rounded and bounded) * step * factor, all [N, groups, group] or [N, groups, 1]."""

    @staticmethod
    def forward(
        ctx: Any, offsets: Tensor, factor: Tensor, codes: Tensor, low: Tensor, high: Tensor, step: Tensor
    ) -> Tensor:
        wanted = torch.add(codes, offsets).round_()
        rounded = torch.minimum(torch.maximum(wanted, low), high)
        ctx.save_for_backward(rounded, wanted == rounded, step, factor)
        return rounded * (step * factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rounded, inside, step, factor = ctx.saved_tensors
        of_factor = (gradient * rounded).sum(-1, keepdim=True) * step
        return gradient * inside * (step * factor), of_factor, None, None, None, None


class LearnedWeight:
    """A weight on `grid` with `values` [N, K] near the float weight w [N, K].

    `parameters` are the offsets of codes f32 [N, groups, group] and the factors of scales f32 [N, groups, 1]. First
    offsets are where w is within its code's interval; codes that GPTQ chose outside of it, to compensate for errors of
    others, begin in the middle of theirs. Where codes depend on each other, all offsets are 0 and must stay so.
    """

    def __init__(self, w: Tensor, values: Tensor, grid: Grid) -> None:
        self.grid, self.width = grid, w.shape[1]
        self._step = positive(grid.step).unsqueeze(-1)
        self._codes = (by_group(values, grid.group) / self._step).round_()  # less their zero points
        self._low, self._high = ((end - grid.zero).unsqueeze(-1) for end in (grid.low, grid.high))
        offsets = by_group(w.float(), grid.group) / self._step - self._codes
        offsets = torch.where(offsets.abs() <= 0.5, offsets, 0.0).clamp_(-_EDGE, _EDGE)
        if self.holds_codes:
            offsets = torch.zeros_like(offsets)
        self.parameters = [offsets.requires_grad_(), torch.ones_like(self._step).requires_grad_()]

    @property
    def holds_codes(self) -> bool:
        """Whether no code can move alone: only scales learn."""
        return self.grid.format.rows_together > 1

    def value(self) -> Tensor:
        """The weight f32 [N, K] that the parameters give."""
        offsets, factor = self.parameters
        whole: Tensor = _Straight.apply(offsets, factor, self._codes, self._low, self._high, self._step)
        return whole.flatten(1)[:, : self.width]

    @torch.no_grad()
    def parts(self, w: Tensor) -> Parts:
        """The weight that the parameters give, as parts of its format."""
        grid = self.grid.scaled(self.parameters[1].detach().squeeze(-1))
        return grid.parts(self.value().detach(), w)
