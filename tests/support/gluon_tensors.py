"""What Gluon kernels compute with, on NumPy: tensors, pointers into memory that is watched, shared memory, MMAs.

Layouts say who holds what and change no value, so they are ignored; sums of two numbers have no order either. bf16 is
kept as float32 that was rounded. A product by the tensor cores is computed when it is waited for, the latest moment at
which they read their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from types import EllipsisType
from typing import Any

import numpy as np
import torch

NUMPY = {
    "int1": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "float16": np.float16,
    "bfloat16": np.float32,
    "float32": np.float32,
}
SIZES = {name: 2 if name == "bfloat16" else np.dtype(kind).itemsize for name, kind in NUMPY.items()}
Index = int | slice | EllipsisType | None


def stored(values: np.ndarray, type: str) -> np.ndarray:
    """The values as they are in memory: bf16 as their 16 bits."""
    if type != "bfloat16":
        return values.astype(NUMPY[type])
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def read(raw: np.ndarray, type: str) -> np.ndarray:
    """Values that are in memory as `raw`."""
    return (raw.astype(np.uint32) << 16).view(np.float32) if type == "bfloat16" else raw


def raw_type(type: str) -> Any:
    """NumPy's type of what is in memory."""
    return np.uint16 if type == "bfloat16" else NUMPY[type]


def type_of(values: np.ndarray) -> str:
    """The type of what NumPy has computed."""
    name = values.dtype.name
    return {"bool": "int1", "float64": "float32"}.get(name, name)


class Tensor:
    """A tensor, or a scalar that a kernel computes."""

    def __init__(self, values: Any, type: str = "") -> None:
        values = np.asarray(values)
        self.type = type or type_of(values)
        self.values = values.astype(NUMPY[self.type], copy=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> str:
        return self.type

    def to(self, type: str, bitcast: bool = False) -> Tensor:
        """As another type: the same value, or the same bits."""
        if bitcast:
            return Tensor(read(stored(self.values, self.type).view(raw_type(type)), type), type)
        return Tensor(read(stored(self.values, type), type), type)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.values.reshape(shape[0] if isinstance(shape[0], tuple) else shape), self.type)

    def permute(self, *axes: Any) -> Tensor:
        return Tensor(self.values.transpose(axes[0] if isinstance(axes[0], tuple) else axes), self.type)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        return Tensor(self.values[index], self.type)

    def __index__(self) -> int:
        return int(self.values)

    def __bool__(self) -> bool:
        return bool(self.values)

    def _with(self, other: Any, operation: Any, turned: bool = False) -> Any:
        if isinstance(other, Pointer | Pending):
            return NotImplemented
        right = other.values if isinstance(other, Tensor) else other
        with np.errstate(all="ignore"):
            values = operation(right, self.values) if turned else operation(self.values, right)
        exact = self.type if isinstance(other, Tensor) and other.type == self.type else ""
        result = type_of(np.asarray(values))
        return Tensor(values, exact if exact == "bfloat16" else result)

    def __neg__(self) -> Tensor:
        return Tensor(-self.values, self.type)

    def __invert__(self) -> Tensor:
        return Tensor(~self.values, self.type)


def _quotient(a: Any, b: Any) -> Any:
    """Towards zero, as C has it."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_OPERATORS: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": _quotient,
    "mod": lambda a, b: a - _quotient(a, b) * b,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
for _name, _operation in _OPERATORS.items():
    setattr(Tensor, f"__{_name}__", lambda self, other, o=_operation: self._with(other, o))
    setattr(Tensor, f"__r{_name}__", lambda self, other, o=_operation: self._with(other, o, True))


@dataclass(frozen=True, eq=False)
class Pointer:
    """Pointers into a torch tensor, in items of a type: loads and stores outside of it are errors."""

    memory: np.ndarray  # bytes
    type: str
    items: np.ndarray

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor, type: str) -> Pointer:
        """A pointer to the first item of a tensor; reads and writes use the tensor's memory."""
        assert tensor.is_contiguous()
        return cls(tensor.view(-1).view(torch.uint8).numpy(), type, np.asarray(0, np.int64))

    def __add__(self, offset: Any) -> Pointer:
        more = offset.values if isinstance(offset, Tensor) else np.asarray(offset)
        return Pointer(self.memory, self.type, self.items + more.astype(np.int64))

    __radd__ = __add__

    def __sub__(self, offset: int) -> Pointer:
        return self + -offset

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.type, self.items[index])

    def _view(self) -> np.ndarray:
        return self.memory.view(raw_type(self.type))

    def places(self, mask: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Indices, 0 where masked, and what is not."""
        live = np.asarray(True if mask is None else mask.values if isinstance(mask, Tensor) else mask)
        items, live = np.broadcast_arrays(self.items, live)
        wanted = items[live]
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self._view())):
            raise IndexError(f"items {wanted.min()} to {wanted.max()} of {len(self._view())} of {self.type}")
        return np.where(live, items, 0), live

    def load(self, mask: Tensor | None = None, other: Any = 0) -> Tensor:
        items, live = self.places(mask)
        view = self._view()
        result = read((view if len(view) else np.zeros(1, view.dtype))[items], self.type)
        return Tensor(np.where(live, result, other).astype(NUMPY[self.type]), self.type)

    def store(self, values: Any, mask: Tensor | None = None) -> None:
        items, live = self.places(mask)
        given = np.broadcast_to(values.values if isinstance(values, Tensor) else values, items.shape)
        self._view()[items[live]] = stored(given[live], self.type)


@dataclass(frozen=True, eq=False)
class Either:
    """Pointers into one tensor where `first`, into another elsewhere."""

    first: Tensor
    a: Pointer
    b: Pointer

    @property
    def items(self) -> np.ndarray:
        return np.broadcast_arrays(self.first.values, self.a.items, self.b.items)[1]

    @property
    def type(self) -> str:
        return self.a.type

    def __add__(self, offset: Any) -> Either:
        return Either(self.first, self.a + offset, self.b + offset)

    def load(self, mask: Tensor | None = None, other: Any = 0) -> Tensor:
        live = True if mask is None else mask.values
        a, b = (
            self.a.load(Tensor(self.first.values & live), other),
            self.b.load(Tensor(~self.first.values & live), other),
        )
        return Tensor(np.where(self.first.values, a.values, b.values), self.type)


class Shared:
    """Shared memory: bytes of which no one has written any are no numbers."""

    def __init__(self, values: np.ndarray, type: str) -> None:
        self.values, self.type = values, type

    @classmethod
    def of(cls, type: str, shape: Sequence[int]) -> Shared:
        floats = type in ("float16", "bfloat16", "float32")
        return cls(np.full(shape, np.nan if floats else 77, NUMPY[type]), type)

    def index(self, i: Any) -> Shared:
        return Shared(self.values[int(i)], self.type)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        cut = [slice(None)] * dim + [slice(start, start + length)]
        result = self.values[tuple(cut)]
        assert result.shape[dim] == length
        return Shared(result, self.type)

    def permute(self, axes: tuple[int, ...]) -> Shared:
        return Shared(self.values.transpose(axes), self.type)

    def reinterpret(self, type: str, shape: Sequence[int], layout: Any) -> Shared:
        assert SIZES[type] == SIZES[self.type] and self.values.flags.c_contiguous
        return Shared(self.values.reshape(shape), type)  # of the same size, which Triton 3.8 demands

    def load(self, layout: Any = None) -> Tensor:
        return Tensor(self.values.copy(), self.type)

    def store(self, value: Tensor) -> None:
        assert value.type == self.type and value.shape == self.values.shape
        self.values[...] = value.values


class Pending:
    """A product that the tensor cores may not have computed yet; only MMAs and waits take it."""

    def __init__(self, a: Any, b: Any, to: Any, added: bool) -> None:
        self.operands, self.result = (a, b, to, added), None
        self.shape = (a.values.shape[0], b.values.shape[1])

    def compute(self) -> Tensor:
        """Of the operands as they are now."""
        if self.result is None:
            a, b, to, added = self.operands
            to = to.compute() if isinstance(to, Pending) else to
            exact = a.type == "int8"  # as sums of integers are in float64
            left, right = (torch.from_numpy(x.values.astype(np.float64 if exact else np.float32)) for x in (a, b))
            product = (left @ right).numpy().astype(np.int32 if exact else np.float32)
            self.result = Tensor(to.values + product if added else product, "int32" if exact else "float32")
        return self.result


def added(x: np.ndarray, axis: int) -> np.ndarray:
    """Sums along an axis, one number after the other."""
    return reduce(np.add, np.moveaxis(x, axis, 0))
