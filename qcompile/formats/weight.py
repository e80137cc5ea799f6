"""What a weight format is: its parts, how it rounds, what it reads back as, its grid, and how kernels get it.

A weight is [N, K] (N output features, K inputs). Rounding is half to even throughout. Asymmetric ranges always include
0, so that zero is exact; zero points are integers. A format is one object of a subclass of WeightFormat, made in the
module of its family and listed in formats/registry.py. Passes, code generation and packing ask that object; nothing
else compares names of formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError
from qcompile.formats.activations import ActivationFormat
from qcompile.formats.blocks import K_BLOCK, CodeLayout, as_blob, blob_bytes, pack_side, side_bytes, unpack_side
from qcompile.formats.gpu import NO_GPU, GpuSupport
from qcompile.formats.rounding import Parts, Shape, by_group, groups_of

INT8_MAX = 127


class Per(Enum):
    """What a part of a weight has one entry for."""

    WEIGHT = "weight"
    ROW = "row"
    GROUP = "group"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Part:
    """One part of a weight: what it is for (`role`), what it has an entry for, and the type of an entry."""

    role: str
    per: Per
    dtype: torch.dtype

    def shape(self, n: int, k: int, group: int) -> Shape:
        """The part's shape in a weight [n, k] with groups of `group` inputs (0: the whole row)."""
        shapes: dict[Per, Shape] = {
            Per.WEIGHT: (n, k),
            Per.ROW: (n,),
            Per.GROUP: (n, groups_of(k, group)),
            Per.TENSOR: (1,),
        }
        return shapes[self.per]


CODES = Part("codes", Per.WEIGHT, torch.uint8)
GROUP_SCALE = Part("scale", Per.GROUP, torch.float32)
GROUP_ZERO = Part("zero", Per.GROUP, torch.uint8)


@dataclass(frozen=True)
class Grid:
    """Grid of a weight [N, K] in `format`. `step`, `zero`, `low`, `high` (bounds of codes) are f32 [N, groups].

    In integer formats value = (code - zero) * step with a range of codes; in others value = element * step. A group has
    `group` inputs; the last may be short. `outer` is what else the format needs to encode grid values: the outer scale
    of two-level formats, [N] or [1], or the mask [N] of 8-bit rows.
    """

    format: WeightFormat
    group: int
    step: Tensor
    zero: Tensor
    low: Tensor
    high: Tensor
    outer: Tensor | None = None

    def limits(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of codes for entries of w with these steps, zeros and code bounds (broadcast)."""
        return self.format.limits(w, step, zero, low, high)

    def nearest(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Grid values nearest to the entries of w, for these steps, zeros and code bounds (broadcast)."""
        return self.format.nearest(w, step, zero, low, high)

    def nearest_of_input(self, k: int, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Grid values nearest to w [N], entries of input `k`, for these steps, zeros and code bounds [N]."""
        return self.nearest(w, step, zero, low, high)

    def round(self, w: Tensor) -> Tensor:
        """w [N, K] rounded to the nearest grid values."""
        grouped = by_group(w, self.group)  # [N, groups, group]
        sides = (part.unsqueeze(-1) for part in (self.step, self.zero, self.low, self.high))
        return self.nearest(grouped, *sides).flatten(1)[:, : w.shape[1]]

    def parts(self, values: Tensor, w: Tensor) -> Parts:
        """Grid values [N, K] for w, encoded as the parts of the format."""
        return self.format.encode(self, values, w)

    def spread(self, part: Tensor, k: int) -> Tensor:
        """A part [N, groups] -> [N, k], each entry repeated over its group."""
        return part.repeat_interleave(self.group, 1)[:, :k]

    def scaled(self, factor: Tensor) -> Grid:
        """This grid with steps times `factor` [N, groups]."""
        return replace(self, step=self.step * factor)

    def codes(self, values: Tensor) -> Tensor:
        """The codes f32 [N, K] of grid values (code - zero) * step."""
        k = values.shape[1]
        return torch.round(values / self.spread(self.step, k)) + self.spread(self.zero, k)


@dataclass(frozen=True)
class Rounding:
    """How to fit a format: `fit(w, ratio)`, and the range ratios that clipping tries.

    `ratio` is a number, or a tensor [N, groups] with one per group. refit: scales are fitted again to the codes chosen.
    """

    fit: Callable[[Tensor, Tensor | float], Grid]
    ratios: tuple[float, ...]
    refit: bool = False


FINE_RATIOS = tuple(1 - 0.025 * i for i in range(20))
"""Range ratios that clipping tries in formats with few codes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightFormat(ABC):
    """A weight format, with `bits` per weight and `group` inputs that share a scale (0: the whole row).

    - `parts`: what `quantize` returns, codes first. `codes`: the order of codes in CPU kernels.
    - `activations`: the activation formats there are kernels for.
    - `sum_group`: activation codes in one sum, as needed to subtract zero points (0: the whole row).
    - `ratios`: range ratios that clipping tries; empty if codes leave no choice.
    - `stored`, `read`: for a format that is part of another one's tensors, the format they are stored in, and the
      format in which kernels read its part.
    - `upper`: the format of the first parts, if those alone are a coarser weight. Calibration compensates for that one.
    - `marks_rows`: whether some rows have more bits, marked before rounding.
    - `rows_together`: outputs of which the codes of an input depend on each other (1: none), so that no code can move
      alone, and a share of the outputs is whole sequences.
    - `expert_fallback`: the name of the format that experts get instead, if packed rows cannot be sliced by expert.
    - `cpu_headers`: headers of its CPU kernels that gemm.h does not include. `gpu`: its GPU kernels.
    """

    name: str
    bits: int
    parts: tuple[Part, ...]
    codes: CodeLayout
    activations: tuple[ActivationFormat, ...]
    group: int = 0
    sum_group: int = 0
    ratios: tuple[float, ...] = ()
    source: str = ""
    stored: WeightFormat | None = None
    read: WeightFormat | None = None
    upper: WeightFormat | None = None
    marks_rows: bool = False
    rows_together: int = 1
    expert_fallback: str = ""
    cpu_headers: tuple[str, ...] = ()
    gpu: GpuSupport = NO_GPU

    # ---- values ------------------------------------------------------------------------------------

    @abstractmethod
    def quantize(self, w: Tensor) -> Parts:
        """w [N, K] rounded to nearest; codes are [N, K], independent of their packing."""

    @abstractmethod
    def dequantize(self, parts: Parts, k: int) -> Tensor:
        """The f32 [N, K] that the parts represent."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the parts, in order."""
        return tuple(part.role for part in self.parts)

    @property
    def is_float(self) -> bool:
        """Whether codes are floating-point numbers that need no scale."""
        return self.codes.dtype.is_floating_point

    def named(self, parts: Parts) -> dict[str, Tensor]:
        """The parts by role."""
        return dict(zip(self.roles, parts, strict=True))

    def layout(self, shape: Shape) -> list[tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of the parts of a weight of `shape` [N, K]."""
        n, k = shape
        return [(part.shape(n, k, self.group), part.dtype) for part in self.parts]

    def shape(self, parts: Parts) -> tuple[int, int]:
        """[N, K] of a weight with these parts."""
        n, k = parts[0].shape
        return n, k

    # ---- other formats -----------------------------------------------------------------------------

    @property
    def stored_as(self) -> WeightFormat:
        """The format its tensors are stored in."""
        return self.stored or self

    @property
    def read_as(self) -> WeightFormat:
        """The format in which kernels read it."""
        return self.read or self

    @property
    def is_part(self) -> bool:
        """Whether it is part of the tensors of another format."""
        return self.stored is not None

    @property
    def serves_experts(self) -> bool:
        """Whether there are kernels for experts: packed rows can be sliced by expert."""
        return not self.is_part and not self.expert_fallback

    # ---- calibration -------------------------------------------------------------------------------

    @property
    def calibrated(self) -> bool:
        """Whether calibration can choose codes."""
        return bool(self.ratios)

    def rounding(self, wide: Tensor | None = None) -> Rounding:
        """How calibration fits the format; `wide` bool [N] marks rows with more bits, where the format has such."""
        if not self.calibrated:
            raise UnsupportedError(f"weights in {self.name} leave calibration no choice of codes")
        return Rounding(self.fit, self.ratios)

    def fit(self, w: Tensor, ratio: Tensor | float) -> Grid:
        """The grid of w [N, K] for ranges `ratio` times as large as those of its groups."""
        raise UnsupportedError(f"weights in {self.name} leave calibration no choice of codes")

    def encode(self, grid: Grid, values: Tensor, w: Tensor) -> Parts:
        """Values [N, K] of `grid` for w, as parts."""
        raise UnsupportedError(f"weights in {self.name} leave calibration no choice of codes")

    def grid_of(self, parts: Parts) -> Grid | None:
        """The grid that the parts of a weight are on, if its values are integers times steps that may be any floats."""
        return None

    def limits(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of codes for entries of w; see Grid."""
        return low, high

    def nearest(self, w: Tensor, step: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Grid values nearest to w; see Grid."""
        return (torch.round(w / step) + zero).clamp(low, high).sub_(zero).mul_(step)

    # ---- CPU kernels -------------------------------------------------------------------------------

    def cpu_kernel(self, activation: ActivationFormat) -> str:
        """Name of the CPU kernel for these activations."""
        if activation.group:
            return f"gemm_{self.name}_x128"
        floats = not self.is_float and not activation.is_integer
        return f"gemm_{self.name}{f'_{activation.name}' if floats else ''}"

    def packed_bytes(self, n: int, k: int) -> dict[str, int]:
        """Size in bytes of each blob of `pack` for a weight [n, k]."""
        sizes = {}
        for part, (shape, dtype) in zip(self.parts, self.layout((n, k)), strict=True):
            side = (n,) if part.per is Per.TENSOR else shape
            size = self.codes.bytes(n, k) if part.per is Per.WEIGHT else side_bytes(side, dtype)
            sizes[part.role] = blob_bytes(size)
        return sizes

    def pack(self, parts: Parts) -> dict[str, Tensor]:
        """The parts of a weight as flat uint8 blobs by role, each padded to a multiple of 64 bytes.

        A part with one entry for the tensor is repeated for each row.
        """
        blobs = {}
        for part, value in zip(self.parts, parts, strict=True):
            side = value.expand(len(parts[0])) if part.per is Per.TENSOR else value
            blobs[part.role] = as_blob(self.codes.pack(value) if part.per is Per.WEIGHT else pack_side(side))
        return blobs

    def unpack(self, blobs: dict[str, Tensor], n: int, k: int) -> Parts:
        """The parts of a weight [n, k] unpacked from the blobs of `pack`."""
        return [
            self.codes.unpack(blobs[part.role], n, k)
            if part.per is Per.WEIGHT
            else unpack_side(blobs[part.role], shape, dtype)
            for part, (shape, dtype) in zip(self.parts, self.layout((n, k)), strict=True)
        ]


def ranges(w: Tensor, group: int, ratio: Tensor | float) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of every group, including 0, times ratio: [N, groups] each."""
    grouped = by_group(w, group)
    return grouped.amin(-1).clamp_(max=0) * ratio, grouped.amax(-1).clamp_(min=0) * ratio


def positive(step: Tensor) -> Tensor:
    """Steps, with 1 for those that are 0."""
    return torch.where(step > 0, step, torch.ones_like(step))


def small_groups(group: int) -> dict[str, Any]:
    """The fields of formats with kernels of gemm_groups.h: a sum of activations for every 32 inputs, any `group`."""
    return {"group": group, "sum_group": K_BLOCK, "cpu_headers": ("gemm_groups.h",)}
