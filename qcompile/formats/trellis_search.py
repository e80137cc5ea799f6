"""The cheapest path of a cyclic sequence through a bitshift trellis (Viterbi), in C++, or in torch without a compiler.

A state is a number of `state_bits` bits. In a sequence, the state at a position is the symbol there, its lowest `bits`
bits, and the symbols after it: state[t] = symbol[t] | state[t + 1] << bits, less what exceeds `state_bits`. After the
last position comes the first one. A path costs the sum of weight * (target - value of the state)².

Paths are built from the last position to the first. A state's overlap is what it shares with the state of the position
before: its upper state_bits - bits bits are the lowest ones of the state after it. The overlap at which the path closes
is that of a path that begins and ends half a sequence away, where it may be open; it is right but for rare cases.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from qcompile.errors import ResourceError
from qcompile.formats import native

_FAR = 1e30
"""Cost of an overlap that a path must not begin with; no path costs as much."""
_FEW = 256
"""Sequences of which costs are in memory at a time in torch."""


@cache
def _native() -> ctypes.CDLL | None:
    """The functions of trellis_search.cpp; None, with a warning, without a compiler. ResourceError if it fails."""
    try:
        native.find()
    except ResourceError as error:
        warnings.warn(f"torch searches for trellis codes, many times slower than C++: {error}", stacklevel=3)
        return None
    return native.library(Path(__file__).with_suffix(".cpp"))


def cheapest_paths(values: Tensor, bits: int, targets: Tensor, weights: Tensor) -> Tensor:
    """The states int16 [sequences, length] of the cheapest paths, for `values` f32 [2^state_bits] of the states.

    `targets` and `weights` are f32 [sequences, length]; weights are at least 0 and at most 1, `length` is even.
    """
    library = _native()
    if library is None:
        parts = zip(targets.split(_FEW), weights.split(_FEW), strict=True)
        return torch.cat([paths_in_torch(values, bits, *part) for part in parts])
    planes = _planes(values, bits)
    targets, weights = targets.float().contiguous(), weights.float().contiguous()
    states = torch.empty(targets.shape, dtype=torch.int16)
    count, length = targets.shape
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (planes, targets, weights)]
    sizes = ctypes.c_int64(count), length, min(torch.get_num_threads(), max(count, 1))
    library.trellis_search(bits, len(values).bit_length() - 1, *pointers, *sizes, ctypes.c_void_p(states.data_ptr()))
    return states


def _planes(values: Tensor, bits: int) -> Tensor:
    """[branch, overlap] values of the states overlap << bits | branch."""
    return values.float().unflatten(0, (-1, 2**bits)).T.contiguous()


def paths_in_torch(values: Tensor, bits: int, targets: Tensor, weights: Tensor) -> Tensor:
    """cheapest_paths in torch."""
    count, length = targets.shape
    planes, half = _planes(values, bits), length // 2
    order = torch.arange(half - 1, half - 1 - length, -1) % length
    costs = _costs(planes, bits, targets[:, order], weights[:, order], None)
    middle, _ = _back(costs, bits, costs[-1].argmin(1), length - half)
    costs = _costs(planes, bits, targets.flip(1), weights.flip(1), middle)
    _, states = _back(costs, bits, middle, length)
    return torch.stack(states, 1).to(torch.int16).view(count, length)


def _costs(planes: Tensor, bits: int, targets: Tensor, weights: Tensor, begin: Tensor | None) -> list[Tensor]:
    """Costs [sequences, overlap] before the first and after each position; the lowest bits name the branch taken."""
    count, (branches, overlaps) = len(targets), planes.shape
    first = torch.zeros(count, overlaps) if begin is None else torch.full((count, overlaps), _FAR)
    if begin is not None:
        first.scatter_(1, begin[:, None], 0.0)
    costs = [first]
    for t in range(targets.shape[1]):
        d = targets[:, t, None, None] - planes
        cost = costs[-1][:, None] + d * d * weights[:, t, None, None]  # [sequences, branch, overlap]
        cost = cost.view(count, branches, branches, -1)  # the upper part of an overlap is the branch of the step after
        names = torch.arange(branches, dtype=torch.int32)[:, None]
        marked = (cost.view(torch.int32) & -branches | names).view(torch.float32)
        costs.append(marked.amin(2).transpose(1, 2).flatten(1).contiguous())
    return costs


def _back(costs: list[Tensor], bits: int, end: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
    """Back over `steps` positions from the overlaps at the `end` [sequences]: those before them, and the states."""
    overlaps, states = costs[0].shape[1], []
    for cost in costs[: -steps - 1 : -1]:
        branch = cost.gather(1, end[:, None])[:, 0].view(torch.int32).long() & 2**bits - 1
        states.append(branch * overlaps + end)
        end = states[-1] >> bits
    return end, states
