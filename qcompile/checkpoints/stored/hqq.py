"""Weights as HQQ stores them in safetensors (mobiusml/hqq, core/quantize.py and core/bitpack.py).

NAME.W_q are codes of 1, 2, 3, 4 or 8 bits. The weight [outputs, inputs] in the order of its rows is cut into groups of
`group_size` elements: rows of a matrix (`axis` 1), or its columns, of which each takes every (elements / group_size)-th
element (`axis` 0). Several rows of the matrix are packed in one row of bytes: the first part of the rows has the
uppermost bits. 3 bits are packed ten to an int32, and rows that do not fill it are left out. A group has NAME.scale and
NAME.zero in floats: (code - zero) * scale. NAME.shape, .nbits, .group_size, .axis and others are tensors of their own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.groups import Find, require, require_none_left
from qcompile.errors import UnsupportedError, UsageError

METHOD = "hqq"
CODES = ".W_q"
"""The end of the names of tensors of codes."""
PACKED = {8: (torch.uint8, 1), 4: (torch.uint8, 2), 3: (torch.int32, 10), 2: (torch.uint8, 4), 1: (torch.uint8, 8)}
"""By bits of a code: the type that codes are packed in, and how many there are in an element."""
SAID = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero"),
)
"""Ends of the names of tensors that say how a weight is stored."""
MOST_NUMBERS = 8
"""Numbers in a tensor that says something; those that are read have at most 2."""


@dataclass(frozen=True)
class StoredGroups:
    """How a weight [outputs, inputs] is stored: bits of a code, elements of a group, and the axis of groups."""

    shape: tuple[int, int]
    bits: int
    group: int
    axis: int

    @property
    def matrix(self) -> tuple[int, int]:
        """The sides of the matrix of groups."""
        others = self.shape[0] * self.shape[1] // self.group
        return (others, self.group) if self.axis else (self.group, others)


def hqq(quantization: dict[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`: each weight says how it is stored."""
    return _find


def _find(checkpoint: StoredCheckpoint) -> None:
    for name in list(checkpoint):
        stem = name.removesuffix(CODES)
        if stem != name:
            _add(checkpoint, stem)
    require_none_left(checkpoint, tuple(f".{end}" for end in SAID))


def _add(checkpoint: StoredCheckpoint, stem: str) -> None:
    """Make the weight STEM.weight of its codes, scales and zeros."""
    stored = _stated(checkpoint, stem)
    rows, columns = stored.matrix
    kind, each = PACKED[stored.bits]
    codes = checkpoint.entries[f"{stem}.W_q"]
    needed = -(-rows // each) * columns * kind.itemsize
    if codes.bytes != needed or (stored.bits != 3 and rows % each):
        count = f"{rows} x {columns} codes of {stored.bits} bits"
        raise UsageError(f"tensor {stem}.W_q has {codes.bytes} bytes; {count} take {needed}")
    sides = (rows, 1) if stored.axis else (1, columns)
    for part in ("scale", "zero"):
        require(checkpoint, f"{stem}.{part}", sides)
    for end in SAID:
        checkpoint.entries.pop(f"{stem}.{end}", None)
    parts = tuple(f"{stem}.{part}" for part in ("W_q", "scale", "zero"))
    checkpoint.add(f"{stem}.weight", stored.shape, parts, functools.partial(from_hqq, stored))


def _stated(checkpoint: StoredCheckpoint, stem: str) -> StoredGroups:
    """How the weight STEM is stored. Raises UsageError or UnsupportedError if it is not read."""
    shape, bits = _numbers(checkpoint, f"{stem}.shape"), _number(checkpoint, f"{stem}.nbits")
    for end in ("quant_scale", "quant_zero"):
        if f"{stem}.{end}" in checkpoint and _number(checkpoint, f"{stem}.{end}"):
            raise UnsupportedError(f"weight {stem}: scales or zeros that are rounded themselves ({end}) are not read")
    if len(shape) != 2 or min(shape) < 1 or bits not in PACKED:
        raise UnsupportedError(f"weight {stem}: shape {shape} in {bits} bits is not read")
    axis = _number(checkpoint, f"{stem}.axis")
    whole = shape[1] if axis else shape[0]
    group = _number(checkpoint, f"{stem}.group_size") if f"{stem}.group_size" in checkpoint else whole
    if axis not in (0, 1) or group < 1 or shape[0] * shape[1] % group:
        raise UsageError(f"weight {stem}: axis {axis} and group_size {group} do not fit its shape {shape}")
    return StoredGroups((shape[0], shape[1]), bits, group, axis)


def _number(checkpoint: StoredCheckpoint, name: str) -> int:
    numbers = _numbers(checkpoint, name)
    if len(numbers) != 1:
        raise UsageError(f"tensor {name} holds {len(numbers)} numbers; one belongs there")
    return numbers[0]


def _numbers(checkpoint: StoredCheckpoint, name: str) -> list[int]:
    """The whole numbers in the tensor `name`, which says how a weight is stored."""
    entry = checkpoint.entries.get(name)
    if entry is None or entry.dtype.is_floating_point or entry.bytes > MOST_NUMBERS * entry.dtype.itemsize:
        actual = "missing" if entry is None else f"{entry.dtype} of shape {list(entry.shape)}"
        raise UsageError(f"tensor {name} is {actual}; whole numbers that say how a weight is stored belong there")
    return [int(number) for number in checkpoint.map(name, entry).flatten().tolist()]


def from_hqq(stored: StoredGroups, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Packed codes, scales and zeros of groups -> float32 of the weight's shape."""
    rows, columns = stored.matrix
    kind, each = PACKED[stored.bits]
    words = packed.flatten().view(kind).view(-1, columns)
    value = torch.empty(len(words) * each, columns)
    for place in range(each):
        codes = words >> (stored.bits * (each - 1 - place)) & (2**stored.bits - 1)
        value[place * len(words) : (place + 1) * len(words)] = codes
    value = value[:rows]
    value.sub_(zeros.to(torch.float32)).mul_(scales.to(torch.float32))
    return value.view(stored.shape)
