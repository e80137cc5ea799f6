"""Choose a weight's codes by the error of its layer's output: clipping and GPTQ.

Rounding w [N, K] to q, with Hessian H = E[x xᵀ] [K, K] of the inputs, has the output error sum over rows of
(w - q) H (w - q)ᵀ. Clipping (QServe B.2.4, AWQ) chooses each group's range to minimize it. GPTQ (Frantar et al. 2022)
rounds input by input and lets the remaining inputs compensate for the error. Coordinate descent then revisits the
inputs, each given the codes of all others (the greedy updates of QuIP, Chee et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats.rounding import Parts, by_group
from qcompile.formats.weight import Grid, Rounding
from qcompile.passes.calibration.refit import refitted

_COLUMNS = 128
"""Inputs that GPTQ processes before it updates the rest of the weight; affects only speed."""

_CLIP_BLOCK = 512
"""When clipping rows of more inputs than this, the error is measured within blocks of this size."""

_MOST_DAMPING = 1e4

_SETTLED = 1e-3
"""Coordinate descent stops when a sweep changes at most this share of the codes."""

_SINGULAR = 1e-12
"""A pivot of H below this share of the mean diagonal counts as zero in float64."""


@dataclass(frozen=True)
class Choice:
    """Codes chosen for a weight: its `parts`, and the share of output energy lost by rounding to nearest and by them.

    `notes` report anything unusual about the inputs.
    """

    parts: Parts
    error_nearest: float
    error: float
    notes: tuple[str, ...] = ()


def choose(
    w: Tensor,
    hessian: Tensor,
    rounding: Rounding,
    *,
    clip: bool,
    gptq: bool,
    damping: float,
    descent: int = 0,
    tokens: int | None = None,
) -> Choice:
    """Round w [N, K] by `rounding` (from WeightFormat.rounding) for inputs with second moments `hessian` [K, K].

    The moments were measured on `tokens` tokens, or are exact (None). `damping`, relative to the mean of H's diagonal,
    is added to the diagonal before H is inverted. `descent` is the maximum number of coordinate-descent sweeps after
    GPTQ. Formats with `refit` try no ranges when they clip: scales are fitted to the codes before every sweep, and at
    the end.
    """
    w, hessian = w.float(), hessian.float()
    notes = _singularity_notes(hessian, damping, tokens) if gptq else ()
    hessian = hessian if tokens is None else trusted(hessian, tokens)
    plain = rounding.fit(w, 1.0)
    energy = _energy(w, hessian)
    nearest = plain.round(w)
    grid = clipped(w, hessian, rounding) if clip and len(rounding.ratios) > 1 else rounding.fit(w, 1.0)
    values, more = gptq_round(w, hessian, grid, damping) if gptq else (grid.round(w), ())
    notes += more
    sweeps = descent if gptq else 0
    if clip and rounding.refit:
        for _ in range(sweeps):
            grid, values = refitted(w, values, hessian, grid)
            values = descended(w, values, hessian, grid, damping, 1)
        grid, values = refitted(w, values, hessian, grid)
    elif sweeps:
        values = descended(w, values, hessian, grid, damping, sweeps)
    before, after = (_energy(w - q, hessian) / max(energy, 1e-30) for q in (nearest, values))
    if after > before:  # possible if the Hessian carries almost no information
        return Choice(plain.parts(nearest, w), before, before, (*notes, "rounding to nearest was no worse and is kept"))
    return Choice(grid.parts(values, w), before, after, notes)


def belief(inputs: int, tokens: int) -> float:
    """The weight in 0..1 of second moments of `inputs` inputs that were measured on `tokens` tokens; see `trusted`."""
    return tokens / (tokens + inputs * min(1.0, inputs / max(tokens, 1)))


def trusted(moments: Tensor, tokens: int) -> Tensor:
    """Second moments [K, K] measured on `tokens` tokens, shrunk toward a multiple of the identity.

    With few tokens per input the moments reflect directions that this text happens to lack, and codes chosen by them do
    worse on other text than rounding to nearest. The identity, scaled to the mean diagonal, counts like K tokens while
    `tokens` is less than K, and like K² / tokens tokens above that.
    """
    share = belief(len(moments), tokens)
    moved = share * moments
    moved.diagonal().add_((1 - share) * moments.diagonal().mean())
    return moved


def _energy(error: Tensor, hessian: Tensor) -> float:
    """Sum over rows of e H eᵀ."""
    return float((error @ hessian).mul_(error).sum(dtype=torch.float64))


def clipped(w: Tensor, hessian: Tensor, rounding: Rounding) -> Grid:
    """The grid of w [N, K] with each group's range shrunk to minimize the group's output error."""
    blocks = _diagonal_blocks(hessian, rounding.fit(w, 1.0).group)
    best = chosen = None
    for ratio in rounding.ratios:
        grid = rounding.fit(w, ratio)
        error = by_group(grid.round(w) - w, blocks.shape[1]).transpose(0, 1)  # [blocks, N, size]
        lost = torch.bmm(error, blocks).mul_(error).sum(-1).T  # [N, blocks]
        lost = lost.unflatten(1, (grid.step.shape[1], -1)).sum(-1)  # [N, groups]
        if best is None or chosen is None:
            best, chosen = lost, torch.full_like(lost, ratio)
        else:
            chosen = torch.where(lost < best, torch.full_like(lost, ratio), chosen)
            best = torch.minimum(lost, best)
    assert chosen is not None
    return rounding.fit(w, chosen)


def _diagonal_blocks(hessian: Tensor, group: int) -> Tensor:
    """Zero-padded blocks [count, size, size] along H's diagonal: one per group, or several per long group."""
    k = hessian.shape[0]
    size = min(group, k)
    if size > _CLIP_BLOCK:
        size = _CLIP_BLOCK
    count = -(-k // size)
    padded = torch.nn.functional.pad(hessian, (0, count * size - k, 0, count * size - k))
    return torch.stack([padded[i : i + size, i : i + size] for i in range(0, count * size, size)])


def gptq_round(w: Tensor, hessian: Tensor, grid: Grid, damping: float) -> tuple[Tensor, tuple[str, ...]]:
    """w [N, K] rounded onto `grid` by GPTQ: grid values [N, K], and notes.

    Inputs are processed by descending energy, while groups keep their positions (Frantar's `act_order` with
    `static_groups`), so the result needs no gather. The triangular factor of H⁻¹ is computed once, in float64.
    """
    k = w.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor, notes = _inverse_factor(hessian[order][:, order], damping)
    whole = w.T[order].contiguous()  # [K, N]
    rest = whole.clone()  # still to be rounded, with the errors so far compensated
    values = torch.empty_like(rest)
    groups, places = order.div(grid.group, rounding_mode="floor").tolist(), order.tolist()
    sides = [part.T.contiguous() for part in (grid.step, grid.zero, grid.low, grid.high)]  # [groups, N]
    for start in range(0, k, _COLUMNS):
        stop = min(start + _COLUMNS, k)
        errors = torch.empty(stop - start, w.shape[0])
        for i in range(start, stop):
            step, zero, low, high = (part[groups[i]] for part in sides)
            limits = grid.limits(whole[i], step, zero, low, high)
            values[i] = grid.nearest_of_input(places[i], rest[i], step, zero, *limits)
            error = (rest[i] - values[i]) / factor[i, i]
            rest[i + 1 : stop].addr_(factor[i, i + 1 : stop], error, alpha=-1)
            errors[i - start] = error
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    result = torch.empty_like(values)
    result[order] = values
    return result.T.contiguous(), notes


def descended(w: Tensor, values: Tensor, hessian: Tensor, grid: Grid, damping: float, sweeps: int) -> Tensor:
    """Grid values [N, K] for w no worse than `values`: each input in turn is rounded optimally given all others.

    GPTQ rounds an input without knowing how later ones are rounded. Runs at most `sweeps` sweeps, until almost no code
    changes. H is damped as in GPTQ, so that codes do not follow directions that hardly occur in the text.
    """
    k = w.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    matrix = hessian[order][:, order]
    matrix.diagonal().add_(damping * (float(matrix.diagonal().mean()) or 1.0))
    whole, rounded = w.T[order].contiguous(), values.T[order].contiguous()  # [K, N]
    pull = matrix @ (whole - rounded)  # minus half the gradient of the error
    groups, places = order.div(grid.group, rounding_mode="floor").tolist(), order.tolist()
    sides = [part.T.contiguous() for part in (grid.step, grid.zero, grid.low, grid.high)]  # [groups, N]
    for _ in range(sweeps):
        changed = 0
        for start in range(0, k, _COLUMNS):
            stop = min(start + _COLUMNS, k)
            moves = torch.empty(stop - start, w.shape[0])
            for i in range(start, stop):
                step, zero, low, high = (part[groups[i]] for part in sides)
                limits = grid.limits(whole[i], step, zero, low, high)
                target = rounded[i] + pull[i] / matrix[i, i]
                better = grid.nearest_of_input(places[i], target, step, zero, *limits)
                torch.sub(better, rounded[i], out=moves[i - start])
                rounded[i] = better
                pull[start:stop].addr_(matrix[start:stop, i], moves[i - start], alpha=-1)
            for others in (slice(0, start), slice(stop, k)):
                pull[others].addmm_(matrix[others, start:stop], moves, alpha=-1)
            changed += int(moves.count_nonzero())
        if changed <= _SETTLED * w.numel():
            break
    result = torch.empty_like(rounded)
    result[order] = rounded
    return result.T.contiguous()


def _inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, tuple[str, ...]]:
    """Upper triangular U with Uᵀ U = (H + damping)⁻¹, f32 [K, K]. While H is singular, damping grows, with a note."""
    matrix = hessian.double()
    diagonal = matrix.diagonal()
    mean = float(diagonal.mean()) or 1.0
    added = 0.0
    more = damping
    while more <= _MOST_DAMPING:
        matrix.diagonal().add_((more - added) * mean)
        lower, problem = torch.linalg.cholesky_ex(matrix)
        if not problem:
            upper, problem = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not problem and bool(torch.isfinite(upper).all()):
            return upper.float(), (f"damped by {more:g} of the mean to be invertible",) if added else ()
        added, more = more, 10 * more
    raise ValueError("second moments of the inputs are not finite")


def _singularity_notes(hessian: Tensor, damping: float, tokens: int | None) -> tuple[str, ...]:
    """Notes if H is not invertible without damping: some combination of inputs never occurs in the text."""
    matrix = hessian.double()
    if dead := int((matrix.diagonal() <= 0).sum()):
        return (f"{dead} of {len(matrix)} inputs are always zero: their moments are singular, damped by {damping:g}",)
    if tokens is not None and tokens < len(matrix):
        return (f"{tokens} tokens are few for {len(matrix)} inputs, so their moments are evened out: give more text",)
    lower, problem = torch.linalg.cholesky_ex(matrix)
    if problem or float(lower.diagonal().min()) ** 2 < _SINGULAR * float(matrix.diagonal().mean()):
        return (f"moments of the {len(matrix)} inputs are singular, damped by {damping:g} of their mean",)
    return ()
