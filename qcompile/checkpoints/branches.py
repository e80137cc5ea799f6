"""Branches of a model's Python code on its positions, such as rotary embeddings that change with the length.

Positions are at least 0 and less than the context, which decides most conditions on the largest of them. Where both
outcomes can occur, the model is traced with each, and refused if that makes a difference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from qcompile.checkpoints import state
from qcompile.errors import UnsupportedError

MOST_TRACES = 8

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    name: function
    for function, names in {
        operator.gt: ("gt", "__gt__", "greater"),
        operator.ge: ("ge", "__ge__", "greater_equal"),
        operator.lt: ("lt", "__lt__", "less"),
        operator.le: ("le", "__le__", "less_equal"),
    }.items()
    for name in names
}
_SHIFT = {"add": 1, "__add__": 1, "__radd__": 1, "sub": -1, "__sub__": -1}


@dataclass(frozen=True)
class Condition:
    """Whether the largest position + `offset` compares with `number` as `name` says."""

    name: str
    offset: int
    number: int | float

    def outcome(self, context: int) -> bool | None:
        """The condition's value, if it is the same for every largest position below `context`; else None."""
        least, most = (_COMPARE[self.name](place + self.offset, self.number) for place in (0, context - 1))
        return least if least == most else None


class Branches(TorchFunctionMode):
    """Decides conditions on the largest of `positions`, which are less than `context`, while the mode is active.

    Conditions that may have either value have that of `forced`, else False, and are noted in `open`.
    """

    def __init__(self, positions: Tensor, context: int, forced: Mapping[Condition, bool], open: set[Condition]) -> None:
        super().__init__()
        self._positions, self._context, self._forced, self._open = positions, context, forced, open
        self._largest: dict[int, tuple[Tensor, int]] = {}
        self._conditions: dict[int, tuple[Tensor, Condition]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__bool__" and (condition := self._condition(args[0])) is not None:
            return self._decide(condition)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not kwargs:
            self._note(name, args, result)
        return result

    def _condition(self, item: Tensor) -> Condition | None:
        """What the truth of `item` says of the largest position; None if that is not known."""
        if (compared := self._conditions.get(id(item))) is not None:
            return compared[1]
        number = self._largest.get(id(item))
        # A number that is never below 0 is true where it is above.
        return Condition("gt", number[1], 0) if number is not None and number[1] >= 0 else None

    def _note(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        """Remember the largest position plus a number, and comparisons of it with numbers."""
        if name in ("max", "amax") and len(args) == 1 and args[0] is self._positions:
            self._largest[id(result)] = result, 0
        known = self._largest.get(id(args[0])) if args else None
        if known is None or len(args) != 2 or not isinstance(args[1], int | float):
            return
        if name in _SHIFT and isinstance(args[1], int):
            self._largest[id(result)] = result, known[1] + _SHIFT[name] * args[1]
        elif name in _COMPARE:
            self._conditions[id(result)] = result, Condition(name, known[1], args[1])

    def _decide(self, condition: Condition) -> bool:
        outcome = condition.outcome(self._context)
        if outcome is not None:
            return outcome
        self._open.add(condition)
        return self._forced.get(condition, False)


def trace_all(
    trace: Callable[[Mapping[Condition, bool], set[Condition]], ExportedProgram], name: str
) -> ExportedProgram:
    """The program that `trace(forced, open)` makes with every outcome of the conditions that it adds to `open`.

    Raises UnsupportedError if the programs differ, or if there are too many.
    """
    first: ExportedProgram | None = None
    waiting: list[dict[Condition, bool]] = [{}]
    for _ in range(MOST_TRACES):
        forced, met = waiting.pop(), set[Condition]()
        program = trace(forced, met)
        first = first or program
        if not state.alike(first, program):
            raise UnsupportedError(f"{name} computes its values in another way for long sequences than for short ones")
        for condition in met - forced.keys():
            waiting.append(forced | {condition: True})
            forced = forced | {condition: False}
        if not waiting:
            return first
    raise UnsupportedError(f"{name} cannot be exported: it branches in too many ways on its positions")
