"""Launches of a plan, prepared once for steps of any counts.

A step has hundreds of launches, but few different grids and numbers, as the layers of a model are alike. Launches that
have one in common share its memory, so that a step writes each once.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qcompile.runtime.cuda.counts import Counts, grid
from qcompile.runtime.cuda.driver import LaunchShape, SharedCall

_MOST_SELECTED = 256
"""Most selections of variants that are kept: a few hundred pointers each."""
ArgumentOf = Callable[[dict[str, Any], Counts], int]
"""The value of an operand (codegen/gpu/operands.py)."""


@dataclass
class _Selection:
    """Launches of some variants, with what changes from step to step: grids, and arguments."""

    calls: list[SharedCall]
    shapes: list[tuple[LaunchShape, dict[str, Any]]]
    numbers: list[tuple[ctypes.c_uint64, str]]
    changing: list[tuple[ctypes.c_uint64, dict[str, Any]]]


@dataclass(frozen=True)
class _Choice:
    """Which variant launches of one kind have: the first with room for a count."""

    by: str
    mosts: tuple[int, ...]

    def place(self, counts: Counts) -> int:
        """The place of the variant; -1 for no launch."""
        count = counts[self.by]
        if count:
            for place, most in enumerate(self.mosts):
                if not most or count <= most:
                    return place
        return -1


@dataclass
class LaunchProgram:
    """Launches in their order. kernels: those of the plan. functions: their addresses, by label."""

    launches: Sequence[dict[str, Any]]
    kernels: Mapping[str, Any]
    functions: Mapping[str, int]
    argument_of: ArgumentOf
    stream: int | None
    _selections: dict[tuple[int, ...], _Selection] = field(default_factory=dict)
    _shapes: dict[str, tuple[LaunchShape, dict[str, Any]]] = field(default_factory=dict)
    _cells: dict[str, ctypes.c_uint64] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = [_Choice(each["by"], tuple(one["most"] for one in each["variants"])) for each in self.launches]
        self._choices = list(dict.fromkeys(kinds))
        self._kinds = [self._choices.index(kind) for kind in kinds]

    def calls(self, counts: Counts) -> list[SharedCall]:
        """The launches that have work for these counts. They are valid until the next call."""
        key = tuple([choice.place(counts) for choice in self._choices])
        selection = self._selections.get(key)
        if selection is None:
            while len(self._selections) >= _MOST_SELECTED:
                del self._selections[next(iter(self._selections))]
            selection = self._selections[key] = self._select(key, counts)
        for shape, sizes in selection.shapes:
            shape.grid = grid(sizes, counts)
        for cell, name in selection.numbers:
            cell.value = counts[name]
        for cell, operand in selection.changing:
            cell.value = self.argument_of(operand, counts)
        return selection.calls

    def _select(self, key: Sequence[int], counts: Counts) -> _Selection:
        calls: list[SharedCall] = []
        shapes: dict[int, tuple[LaunchShape, dict[str, Any]]] = {}
        numbers: dict[int, tuple[ctypes.c_uint64, str]] = {}
        changing: dict[int, tuple[ctypes.c_uint64, dict[str, Any]]] = {}
        for launch, kind in zip(self.launches, self._kinds, strict=True):
            variant = launch["variants"][key[kind]] if key[kind] >= 0 else None
            if variant is None or not variant["kernel"]:
                continue
            kernel = self.kernels[variant["kernel"]]
            shape, sizes = self._shape(kernel, variant)
            shapes[id(shape)] = shape, sizes
            arguments = []
            for operand in (variant["args"][name] for name in kernel["arguments"]):
                cell = self._cell(operand, counts)
                arguments.append(cell)
                if operand["kind"] == "count":
                    numbers[id(cell)] = cell, operand["name"]
                elif "past" in operand:
                    changing[id(cell)] = cell, operand
            calls.append(SharedCall(self.functions[variant["kernel"]], shape, arguments))
        return _Selection(calls, list(shapes.values()), list(numbers.values()), list(changing.values()))

    def _shape(self, kernel: Mapping[str, Any], variant: dict[str, Any]) -> tuple[LaunchShape, dict[str, Any]]:
        how = kernel["threads"], kernel["shared_bytes"], kernel["prelaunch"]
        key = json.dumps([variant["grid"], how], sort_keys=True)
        if key not in self._shapes:
            self._shapes[key] = LaunchShape(self.stream, *how), {"grid": variant["grid"]}
        return self._shapes[key]

    def _cell(self, operand: dict[str, Any], counts: Counts) -> ctypes.c_uint64:
        key = json.dumps(operand, sort_keys=True)
        if key not in self._cells:
            self._cells[key] = ctypes.c_uint64(self.argument_of(operand, counts))
        return self._cells[key]
