"""Loops over experts that ask for the number of their expert, and may compute something else for some experts.

Python compares such a number where nobody sees it. So the loop runs for every number, and each function that it calls
is compared with what it called for the numbers before: the same function of the same operands has the same result, and
is not called again. Numbers for which the loop called the same functions to its end share an outcome.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from qcompile.errors import UnsupportedError

ASKS = ("item", "__int__")
"""Functions that ask for the number."""
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    spelled: getattr(operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for spelled in (name, f"__{name}__")
}
"""Functions that compare the number with another."""


@dataclass(frozen=True)
class ExpertChoice:
    """The choice `index` [N, k] of an expert of `experts`, from which masks are made."""

    index: Tensor
    experts: int


class SomeRows:
    """The number of rows of an expert that some token chose: all that is known is that it is not 0."""

    def __eq__(self, other: object) -> bool:
        if other != 0:
            raise UnsupportedError("a loop over experts counts its rows")
        return False

    __hash__ = None  # type: ignore[assignment]


Sums = list[tuple[Tensor, Tensor]]
"""Rows and what they are added to: (target, rows)."""


@dataclass
class _Step:
    """The loop after some functions: `next` leads on, `sums` are those so far, and `experts` those that end here."""

    sums: Sums = field(default_factory=list)
    next: dict[Any, tuple[Any, _Step]] = field(default_factory=dict)
    experts: list[int] = field(default_factory=list)


class NumberedLoop:
    """One loop over the experts of `choice`; `asked` once it has asked for a number, and `left` if it ended early.

    `element` is the loop's variable [1] as a scalar, once the loop has taken it.
    """

    def __init__(self, choice: ExpertChoice) -> None:
        self.choice = choice
        self.element: Tensor | None = None
        self.asked = self.left = False
        self._number, self._answered, self._summed = 0, -1, False
        self._start = self._at = _Step()
        self._steps = [self._start]
        self._sums: Sums = []
        self._held: list[Any] = []  # operands: as long as they live, no other object gets their id

    def numbers(self) -> Iterator[int]:
        """The numbers for which the loop has to run."""
        for number in range(self.choice.experts):
            if number and not self.asked:
                return
            self._number, self._at = number, self._start
            yield number
            self._at.experts.append(self._number)

    def ask(self) -> int:
        """The expert's number."""
        if self._answered != self._number:
            if self._summed or self._at.sums:
                raise UnsupportedError("a loop over experts asks for the number of one after it has added results")
            self.asked, self._answered, self._at = True, self._number, self._start
        return self._number

    def is_number(self, item: Any) -> bool:
        """Whether `item` may be the expert's number."""
        return self.asked and type(item) is int and item == self._number

    def step(self, func: Any, name: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
        """The result of a function in the loop, which is `call()` unless it was called alike for another number."""
        if name.endswith("_") and not name.endswith("__") and name != "index_add_":
            raise UnsupportedError(f"a loop over experts changes a tensor by {name}")
        number = name == "__getitem__" and self.is_number(args[1])
        leaves, structure = tree_flatten((args[:1] if number else args, kwargs))
        alike = (id(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        key = (func, number, str(structure), *alike)
        if key not in self._at.next:
            self._held.append((args, kwargs))
            self._sums = list(self._at.sums)
            result = call()
            self._at.next[key] = result, _Step(self._sums)
            self._steps.append(self._at.next[key][1])
        result, self._at = self._at.next[key]
        return result

    def add(self, target: Tensor, rows: Tensor) -> None:
        """Note that the loop adds `rows` to `target`."""
        self._sums.append((target, rows))
        self._summed |= not self.asked

    def outcomes(self) -> Iterator[tuple[list[int], Sums]]:
        """Experts for which the loop did the same, and what it added."""
        yield from ((step.experts, step.sums) for step in self._steps if step.experts)
