"""The scales of a weight of which the codes are chosen, by the least squares of the layer's output error."""

from __future__ import annotations

import torch
from torch import Tensor

from qcompile.formats.rounding import groups_of
from qcompile.formats.weight import Grid

_RIDGE = 1e-4
"""Share of the mean diagonal that is added to a row's equations, so that groups without energy keep their scales."""


def refitted(w: Tensor, values: Tensor, hessian: Tensor, grid: Grid) -> tuple[Grid, Tensor]:
    """A grid with the best scales for the codes of grid values [N, K], as the format stores them, and its values.

    A row's error is (w - f q) H (w - f q)ᵀ with a factor f for each of its groups, which solve the normal equations
    sum over h of (q_g H q_hᵀ) f_h = q_g H wᵀ of its groups g.
    """
    n, k = values.shape
    count = groups_of(k, grid.group)
    normal, pull = torch.empty(n, count, count), torch.empty(n, count)
    rest = w - values  # factors are 1 plus what the rest asks for
    for g in range(count):
        part = slice(g * grid.group, min((g + 1) * grid.group, k))
        moved = values[:, part] @ hessian[part]  # [N, K]
        pull[:, g] = (moved * rest).sum(1)
        products = torch.nn.functional.pad(moved * values, (0, count * grid.group - k))
        normal[:, g] = products.unflatten(1, (count, -1)).sum(-1)
    mean = normal.diagonal(dim1=1, dim2=2).mean(1)
    normal.diagonal(dim1=1, dim2=2).add_((_RIDGE * mean + (mean <= 0))[:, None])
    factor = 1 + torch.linalg.solve(normal.double(), pull.double()).float()
    better = grid.scaled(factor)
    ratio = torch.where(grid.step > 0, better.step / grid.step, torch.ones_like(grid.step))
    return better, values * grid.spread(ratio, k)
