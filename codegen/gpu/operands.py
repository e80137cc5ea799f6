"""What a launch passes to a kernel, and its grid sizes, as values and as JSON objects of a launch plan.

An operand is an address or a number; the runtime finds both by name. In JSON an operand is an object with its `kind`
and its fields; fields with their default value are left out. A grid size is a number, or an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal


def _given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their default value."""
    return {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}


@dataclass(frozen=True)
class GridSize:
    """A grid size that depends on a count of the step: count / `divisor` rounded up, times `times`, plus `plus`."""

    count: str
    divisor: int = 1
    times: int = 1
    plus: int = 0

    def to_json(self) -> dict[str, Any]:
        """The grid size in a launch plan."""
        return _given(self)


Size = int | GridSize
Grid = tuple[Size, Size, Size]


def grid_size(size: Size, counts: Mapping[str, int]) -> int:
    """A grid size for these counts."""
    if isinstance(size, int):
        return size
    return -(-counts[size.count] // size.divisor) * size.times + size.plus


@dataclass(frozen=True)
class Operand:
    """What a launch passes for one argument of a kernel."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The operand in a launch plan."""
        return {"kind": self.kind, **_given(self)}


Operands = dict[str, Operand]
"""Operands by the name of the kernel's argument; those that the kernel does not have are ignored."""


@dataclass(frozen=True)
class NamedOperand(Operand):
    """An operand that the runtime finds by its name alone."""

    name: str


@dataclass(frozen=True)
class ActivationRef(Operand):
    """Address of activations: `bytes_per_row` times the rows of the arena for `rows`, plus `column_bytes`."""

    kind: ClassVar[str] = "activation"
    rows: Literal["tokens", "outputs"]
    bytes_per_row: int
    column_bytes: int = 0


class WeightRef(NamedOperand):
    """Address of a weight."""

    kind = "weight"


@dataclass(frozen=True)
class InputRef(Operand):
    """Address of an input (token_ids, positions, ...) or of a result (logits, argmax, ...) of the step.

    The address is that many 32-bit numbers past the beginning as the product of the counts named in `past`, if any.
    """

    kind: ClassVar[str] = "input"
    name: str
    past: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScratchRef(Operand):
    """Address of scratch memory, initially zero, that takes at least `bytes` times the product of `counts`.

    References of the same name share memory of the largest size. The count `room` is the most rows of any step.
    """

    kind: ClassVar[str] = "scratch"
    name: str
    bytes: int
    counts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The operand in a launch plan, which states the size of all scratch memory elsewhere."""
        return {"kind": self.kind, "name": self.name}


@dataclass(frozen=True)
class CacheRef(Operand):
    """Address of a layer's KV pages."""

    kind: ClassVar[str] = "cache"
    layer: int


@dataclass(frozen=True)
class SlotsRef(Operand):
    """Address of the slots of recurrent states."""

    kind: ClassVar[str] = "slots"


class CountRef(NamedOperand):
    """A count of the step."""

    kind = "count"


@dataclass(frozen=True)
class NumberRef(Operand):
    """A fixed number."""

    kind: ClassVar[str] = "number"
    value: int


class DraftRef(NamedOperand):
    """Address of an input or result of the draft path."""

    kind = "draft"


class StateRef(NamedOperand):
    """Address of an array of the state of speculation rounds."""

    kind = "state"


@dataclass(frozen=True)
class PeerRef(Operand):
    """Address of the peer memory of a rank of a divided model, or of this one's own (codegen/gpu/peer_memory.py)."""

    kind: ClassVar[str] = "peer"
    of: int | None = None


@dataclass(frozen=True)
class RankRef(Operand):
    """The number of this process among those that run a divided model."""

    kind: ClassVar[str] = "rank"
