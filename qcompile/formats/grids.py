"""Quantization grids: the values a weight can take once its scales are chosen, for clipping and GPTQ.

All formats here but MXFP4 are `value = (code - zero) * step` with a range of codes, all per group of inputs. MXFP4 is
`E2M1 element * step` with step a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.formats import mix, numerics

INT8_MAX = 127
_E2M1 = torch.tensor(numerics.E2M1 + tuple(-v for v in numerics.E2M1))


@dataclass(frozen=True)
class Grid:
    """Grid of a weight [N, K] in `format`. `step`, `zero`, `low`, `high` (bounds of codes) are f32 [N, groups].

    A group has `group` inputs; the last may be short. `rows` [N] is the outer scale of two-level formats, or the mask
    of 8-bit rows in mix_4_8.
    """

    format: str
    group: int
    step: Tensor
    zero: Tensor
    low: Tensor
    high: Tensor
    rows: Tensor | None = None

    def limits(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of codes for entries of w. In nested_8_4, only codes from which a lower nibble can still reach w."""
        if self.format != "nested_8_4":
            return low, high
        code = w / step + zero
        reach = 1 - 1 / numerics.NESTED_STEPS
        return torch.ceil(code - reach).clamp(low, high), torch.floor(code + 1).clamp(low, high)

    def nearest(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Grid values nearest to w, whose entries have these steps, zeros and code bounds (broadcast)."""
        if self.format == "mxfp4":
            return _E2M1[numerics.e2m1_codes(w / step).long()] * step
        return (torch.round(w / step) + zero).clamp(low, high).sub_(zero).mul_(step)

    def round(self, w: Tensor) -> Tensor:
        """w [N, K] rounded to the nearest grid values."""
        grouped = numerics.by_group(w, self.group)  # [N, groups, group]
        sides = (part.unsqueeze(-1) for part in (self.step, self.zero, self.low, self.high))
        return self.nearest(grouped, *sides).flatten(1)[:, : w.shape[1]]

    def parts(self, values: Tensor, w: Tensor) -> numerics.Parts:
        """Grid values [N, K] for w, encoded as the parts of the format (numerics.FORMATS[format].roles).

        In nested_8_4 the grid is that of the upper nibble; the lower nibble corrects the value toward w.
        """
        k = values.shape[1]
        step, zero = (part.repeat_interleave(self.group, 1)[:, :k] for part in (self.step, self.zero))
        if self.format == "mxfp4":
            exponent = torch.frexp(self.step).exponent - 1 + 127
            return [numerics.e2m1_codes(values / step), exponent.to(torch.uint8)]
        codes = torch.round(values / step) + zero
        small, zeros = codes.to(torch.uint8), self.zero.to(torch.uint8)
        if self.format == "w4_asym_g128":
            return [small, self.step, zeros]
        if self.format == "nested_8_4":
            return [small, self.step, zeros, numerics.nested_low(w, small, self.step, zeros)]
        if self.format == "qoq_channel":
            return [small, zeros[:, 0], self.step[:, 0]]
        if self.format == "qoq_g128":
            assert self.rows is not None
            inner = torch.round(self.step / self.rows[:, None]).to(torch.uint8)
            return [small, inner, zeros, self.rows]
        if self.format == "mix_4_8":
            assert self.rows is not None
            return [small, self.step, zeros, self.rows]
        return [codes.to(torch.int8), self.step[:, 0]]


@dataclass(frozen=True)
class Rounding:
    """How to fit a format: `fit(w, ratio)`, and the range ratios that clipping tries.

    `ratio` is a number, or a tensor [N, groups] with one per group.
    """

    fit: Callable[[Tensor, Tensor | float], Grid]
    ratios: tuple[float, ...]


def _ranges(w: Tensor, group: int, ratio: Tensor | float) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of every group, including 0, times ratio: [N, groups] each."""
    grouped = numerics.by_group(w, group)
    return grouped.amin(-1).clamp_(max=0) * ratio, grouped.amax(-1).clamp_(min=0) * ratio


def _positive(step: Tensor) -> Tensor:
    return torch.where(step > 0, step, torch.ones_like(step))


def _fit_asymmetric(format: str, group: int) -> Callable[[Tensor, Tensor | float], Grid]:
    def fit(w: Tensor, ratio: Tensor | float) -> Grid:
        size = group or w.shape[1]
        low, high = _ranges(w, size, ratio)
        step = _positive((high - low) / 15)
        bottom = torch.zeros_like(step)
        return Grid(format, size, step, torch.round(-low / step), bottom, bottom + 15)

    return fit


def _fit_qoq(w: Tensor, ratio: Tensor | float) -> Grid:
    """Two levels (QServe 3.1): integer steps, and codes limited so that (code - zero) * step stays within int8."""
    scale = _positive(w.abs().amax(1) / numerics.QOQ_RANGE)
    low, high = _ranges(torch.round(w / scale[:, None]), 128, ratio)
    inner = torch.round((high - low) / 15).clamp_(1, 255)
    zero = torch.round(-low / inner).clamp_(0, 15)
    reach = torch.floor(INT8_MAX / inner)
    bottom, top = (zero - reach).clamp_(min=0), (zero + reach).clamp_(max=15)
    return Grid("qoq_g128", 128, inner * scale[:, None], zero, bottom, top, scale)


def _fit_w8(w: Tensor, ratio: Tensor | float) -> Grid:
    low, high = _ranges(w, w.shape[1], ratio)
    step = _positive(torch.maximum(high, -low) / INT8_MAX)
    none = torch.zeros_like(step)
    return Grid("w8_sym_channel", w.shape[1], step, none, none - INT8_MAX, none + INT8_MAX)


def _fit_mxfp4(w: Tensor, ratio: Tensor | float) -> Grid:
    largest = numerics.by_group(w, 32).abs().amax(-1) * ratio
    step = torch.ldexp(torch.ones_like(largest), numerics.mx_exponent(largest))
    none = torch.zeros_like(step)
    return Grid("mxfp4", 32, step, none, none, none)


def _fit_mixed(wide: Tensor) -> Callable[[Tensor, Tensor | float], Grid]:
    def fit(w: Tensor, ratio: Tensor | float) -> Grid:
        """Rows marked `wide` are symmetric 8-bit, stored with zero point 128; the others asymmetric 4-bit."""
        narrow = _fit_asymmetric("mix_4_8", 128)(w, ratio)
        low, high = _ranges(w, 128, ratio)
        step = _positive(torch.maximum(high, -low) / INT8_MAX)
        rows = wide[:, None]
        return Grid(
            "mix_4_8",
            128,
            torch.where(rows, step, narrow.step),
            narrow.zero.masked_fill(rows, mix.EIGHT_BIT_ZERO),
            narrow.low.masked_fill(rows, mix.EIGHT_BIT_ZERO - INT8_MAX),
            narrow.high.masked_fill(rows, mix.EIGHT_BIT_ZERO + INT8_MAX),
            wide,
        )

    return fit


_FINE = tuple(1 - 0.025 * i for i in range(20))
_ROUNDINGS: dict[str, Rounding] = {
    "w4_asym_g128": Rounding(_fit_asymmetric("w4_asym_g128", 128), _FINE),
    "nested_8_4": Rounding(_fit_asymmetric("nested_8_4", 128), (1.0, 0.98, 0.96, 0.94, 0.92, 0.9)),
    "qoq_g128": Rounding(_fit_qoq, _FINE),
    "qoq_channel": Rounding(_fit_asymmetric("qoq_channel", 0), _FINE),
    "w8_sym_channel": Rounding(_fit_w8, (1.0, 0.95, 0.9, 0.85, 0.8)),
    "mxfp4": Rounding(_fit_mxfp4, (1.0, 2.0, 0.5)),
}
FORMATS = (*_ROUNDINGS, "mix_4_8")
"""Formats whose codes calibration can choose. f32 and bf16 leave no choice."""


def rounding(format: str, wide: Tensor | None = None) -> Rounding:
    """How to fit `format`, one of FORMATS. mix_4_8 needs `wide` bool [N], the mask of 8-bit rows.

    A nested weight's range is shrunk only a little, because clipping also affects its 8-bit value.
    """
    if format == "mix_4_8":
        assert wide is not None, "mix_4_8 without the rows that have 8 bits"
        return Rounding(_fit_mixed(wide), _FINE)
    return _ROUNDINGS[format]
