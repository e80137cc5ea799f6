"""Trellis-coded weights of 2, 3 and 4 bits (Marcellin and Fischer; QTIP) with a scale per group of 128 inputs.

The values of 64 outputs of one input are chosen together: they are the values of the states of a path through a
trellis, which overlap in their bits (trellis_code.py). So a weight of 2 bits has one of 4,096 values, not one of 4.
Sequences run along outputs, so that GPTQ compensates for the error of each input in all later ones, as with codes that
are rounded one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcompile.formats.activations import BF16
from qcompile.formats.rounding import Parts, Shape, groups_of, spread
from qcompile.formats.trellis_code import (
    CENTER,
    SEQUENCE,
    TrellisLayout,
    from_sequences,
    in_sequences,
    packed_symbols,
    sequences_of,
    spread_of_values,
    state_values,
    unpacked_states,
    values_of,
)
from qcompile.formats.trellis_search import cheapest_paths
from qcompile.formats.weight import CODES, Grid, Part, Per, Rounding, WeightFormat

_INPUTS = 128
"""Inputs of which paths are searched at a time."""


@dataclass(frozen=True, kw_only=True)
class TrellisGrid(Grid):
    """Scales of a weight, and the states int16 [K, sequences, SEQUENCE] of the paths that were chosen last."""

    states: Tensor

    def round(self, w: Tensor) -> Tensor:
        """w [N, K] as the values of the cheapest paths."""
        values = torch.empty_like(w)
        for start in range(0, w.shape[1], _INPUTS):
            part = slice(start, min(start + _INPUTS, w.shape[1]))
            step = self.spread(self.step, w.shape[1])[:, part]
            values[:, part] = self._paths(part, w[:, part], step)
        return values

    def nearest_of_input(self, k: int, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return self._paths(slice(k, k + 1), w[:, None], step[:, None])[:, 0]

    def scaled(self, factor: Tensor) -> Grid:
        return replace(self, step=(self.step * factor).bfloat16().float())

    def _paths(self, inputs: slice, w: Tensor, step: Tensor) -> Tensor:
        """Values [N, count] for w [N, count] of these inputs. Errors count by the square of their output's scale."""
        n, largest = len(w), step.amax(0).clamp_min(torch.finfo(torch.float32).tiny)
        targets = torch.where(step > 0, w / step, torch.zeros_like(w))
        sequences = [in_sequences(t).transpose(1, 2).flatten(0, 1) for t in (targets, (step / largest).square())]
        states = cheapest_paths(state_values(), self.format.bits, *sequences)
        states = states.unflatten(0, (-1, w.shape[1]))  # [sequences, count, SEQUENCE]
        self.states[inputs] = states.transpose(0, 1)
        return from_sequences(state_values()[states.long()].transpose(1, 2), n) * step


@dataclass(frozen=True, kw_only=True, eq=False)
class Trellis(WeightFormat):
    """value = value of the state * scale. `reach`: the standard deviation of values, relative to that of weights."""

    reach: float

    def quantize(self, w: Tensor) -> Parts:
        """w [N, K] as the cheapest paths for the scales of its groups."""
        grid = self.fit(w.float(), 1.0)
        return self.encode(grid, grid.round(w.float()), w)

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        codes, scale = parts
        states = unpacked_states(codes, self.bits)  # [sequences, K, SEQUENCE]
        values = from_sequences(values_of(states).transpose(1, 2), len(scale))
        return values * spread(scale.float(), self.group, k)

    def layout(self, shape: Shape) -> list[tuple[Shape, torch.dtype]]:
        n, k = shape
        codes, scale = self.parts
        return [
            ((sequences_of(n), k, SEQUENCE // 8 * self.bits), codes.dtype),
            (scale.shape(n, k, self.group), scale.dtype),
        ]

    def shape(self, parts: Parts) -> tuple[int, int]:
        codes, scale = parts
        return scale.shape[0], codes.shape[1]

    def rounding(self, wide: Tensor | None = None) -> Rounding:
        return Rounding(self.fit, self.ratios, refit=True)

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        n, k = w.shape
        groups = groups_of(k, self.group)
        squares = torch.nn.functional.pad(w.square(), (0, groups * self.group - k)).unflatten(1, (groups, -1))
        counts = torch.full((groups,), float(self.group))
        counts[-1] -= groups * self.group - k
        step = (squares.sum(-1) / counts).sqrt() * ratio * self.reach / spread_of_values()
        none = torch.zeros_like(step)
        states = torch.zeros(k, sequences_of(n), SEQUENCE, dtype=torch.int16)
        return TrellisGrid(self, self.group, step.bfloat16().float(), none, none, none, states=states)

    def grid_of(self, parts: Parts) -> Grid | None:
        codes, scale = parts
        step, states = scale.float(), unpacked_states(codes, self.bits).transpose(0, 1).to(torch.int16)
        none, most = torch.zeros_like(step), torch.full_like(step, float(CENTER))
        return TrellisGrid(self, self.group, step, none, -most, most, states=states.contiguous())

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        assert isinstance(grid, TrellisGrid)
        return [packed_symbols(grid.states, self.bits).transpose(0, 1).contiguous(), grid.step.bfloat16()]


def _trellis(bits: int, reach: float) -> Trellis:
    return Trellis(
        name=f"w{bits}_trellis_g128",
        bits=bits,
        parts=(CODES, Part("group_scale", Per.GROUP, torch.bfloat16)),
        codes=TrellisLayout(torch.uint8, SEQUENCE, symbol_bits=bits),
        activations=(BF16,),
        group=128,
        sum_group=128,
        ratios=(1.0,),
        source="QTIP",
        rows_together=SEQUENCE,
        expert_fallback="w4_asym_g128",
        cpu_headers=("gemm_trellis.h",),
        reach=reach,
    )


W2_TRELLIS_G128, W3_TRELLIS_G128, W4_TRELLIS_G128 = _trellis(2, 1.0), _trellis(3, 1.0), _trellis(4, 1.04)
