"""Buffers of activations: dtype, width and place.

Units: widths are elements, offsets and sizes are bytes. A buffer's `offset` is bytes *per row*: the runtime fixes the
number of rows when it opens the library (`max_tokens`, `max_outputs`, both rounded up to a multiple of 64), and the
buffer starts at `offset * rows` of its arena. Two buffers may overlap in `[offset, offset + row_bytes)` if they are
never live at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qcompile.codegen.sizes import round_up
from qcompile.formats.activations import ActivationFormat, activation_format
from qcompile.formats.rounding import groups_of

PAD = 32
"""Rows of activations are padded with zeros to a multiple of this many elements."""

DType = Literal["f32", "bf16", "q8"]
_ITEM_BYTES: Mapping[str, int] = {"f32": 4, "bf16": 2, "q8": 1}


@dataclass(frozen=True)
class Buffer:
    """Activations [rows, width], row-major, each row padded with zeros to `stride` elements, a multiple of `pad`.

    `q8` is three consecutive arrays: int8 codes [rows, stride], float32 scales [rows, scales], and int32 code sums
    [rows, groups] over `group` inputs each (the last group may be short).
    """

    name: str
    dtype: DType
    width: int
    group: int = 0
    """Inputs per sum of a q8 buffer (a multiple of 32); 0 for other dtypes."""
    rows: Literal["tokens", "outputs"] = "tokens"
    offset: int = 0
    activation: str = "int8"
    """Type of the codes of a q8 buffer: an integer format of formats/activations.py."""
    pad: int = PAD

    @property
    def stride(self) -> int:
        """Row stride in elements."""
        return round_up(self.width, self.pad)

    @property
    def groups(self) -> int:
        """Code sums per row (0 unless q8)."""
        return -(-self.stride // self.group) if self.dtype == "q8" else 0

    @property
    def kind(self) -> ActivationFormat:
        """The activation format of the elements."""
        return activation_format(self.activation if self.dtype == "q8" else self.dtype)

    @property
    def scales(self) -> int:
        """Scales per row (0 unless q8)."""
        return groups_of(self.stride, self.kind.group) if self.dtype == "q8" else 0

    @property
    def whole_sum(self) -> bool:
        """Whether a row has one sum of codes, over all its inputs, which have one scale."""
        return self.groups == 1 and not self.kind.group

    @property
    def row_bytes(self) -> int:
        """Arena bytes per row."""
        extra = 4 * self.scales + 4 * self.groups if self.dtype == "q8" else 0
        return self.stride * _ITEM_BYTES[self.dtype] + extra
