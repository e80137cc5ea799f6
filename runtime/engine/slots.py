"""Allocation of the slots of recurrent states: each running request has one, and no two share one."""

from __future__ import annotations

from collections.abc import Iterable

NO_SLOT = -1
"""The slot of a request that does not run."""


class SlotPool:
    """`total` slots. Every slot is free or held by one request. A model without states has slots of no bytes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # a stack: a slot that was never used takes no memory yet

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def listed(self) -> list[int]:
        """The free slots."""
        return list(self._free)

    def take(self) -> int:
        """Take a slot, which still holds what its last holder left. The caller must have checked that one is free."""
        if not self._free:
            raise ValueError(f"all {self.total} slots are held")
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Release a slot; NO_SLOT is ignored."""
        if slot == NO_SLOT:
            return
        if slot in self._free:
            raise ValueError(f"slot {slot} is already free")
        self._free.append(slot)

    def check(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless each slot is either free or held once. `held` are the slots of all requests."""
        listed = sorted([*self._free, *held])
        if listed != list(range(self.total)):
            raise RuntimeError(f"slots of states: {self._free} free and {list(held)} held of {self.total}")
