"""Copies of recurrent states at the ends of cached pages, so that a request continues there instead of at its start.

Keys and values of a position stay in their page, but a state has moved on when the next position is computed. So the
scheduler ends a step where a page ends that others may share, and keeps a copy of the slot with the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompile.runtime.engine.prefixes import CachedPage
from qcompile.runtime.step import SlotCopies


class Snapshots:
    """Copies in the slots of `places`. Each belongs to a cached page, and is the state after the text up to its end."""

    def __init__(self, places: SlotCopies) -> None:
        self._slots = range(places.first, places.first + places.many)
        self._free = list(self._slots)
        self._held: dict[CachedPage, int] = {}  # the one unused for longest first
        self._copy = places.copy
        self.apart = places.apart
        """As of SlotCopies."""

    def usable(self, pages: Sequence[CachedPage]) -> list[CachedPage]:
        """The first `pages` of a text, up to the last one with a copy."""
        last = max((place for place, page in enumerate(pages, start=1) if page in self._held), default=0)
        return list(pages[:last])

    def restore(self, page: CachedPage, slot: int) -> None:
        """Set `slot` to the state after `page`, which must have a copy."""
        self._held[page] = self._held.pop(page)
        self._copy(self._held[page], slot)

    def keep(self, page: CachedPage, slot: int) -> None:
        """Keep a copy of `slot`, the state after `page`, unless there is one; the one unused for longest may go."""
        if page in self._held:
            return
        for other in [other for other in self._held if not other.attached]:
            self._free.append(self._held.pop(other))
        if not self._free:
            self._free.append(self._held.pop(next(iter(self._held))))
        self._held[page] = self._free.pop()
        self._copy(slot, self._held[page])

    def check(self) -> None:
        """Raise RuntimeError if a slot of copies is lost or used twice."""
        if sorted([*self._free, *self._held.values()]) != list(self._slots):
            raise RuntimeError(f"copies of states: {self._free} free and {list(self._held.values())} held")
