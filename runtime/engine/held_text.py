"""Text that is held back: it may turn out to be the start of a stop text, and special tokens may be in it.

A stop text may name a special token. Such a token has no text in the output, so it is only marked in what is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HeldText(NamedTuple):
    """Text and the ranges (start, end) of it that the output does not show: the texts of special tokens."""

    text: str = ""
    hidden: tuple[tuple[int, int], ...] = ()

    def __add__(self, more: object) -> HeldText:
        assert isinstance(more, str)
        return HeldText(self.text + more, self.hidden)

    def marked(self, special: str) -> HeldText:
        """The text, followed by that of a special token."""
        return HeldText(self.text + special, (*self.hidden, (len(self.text), len(self.text) + len(special))))

    def first_stop(self, stops: Sequence[str]) -> tuple[int, int, str] | None:
        """Start, end and text of the earliest stop text; None without one."""
        matches = ((at, at + len(stop), stop) for stop in stops if (at := self._find(stop)) >= 0)
        return min(matches, default=None)

    def _find(self, stop: str) -> int:
        """Where a stop text is; -1 if it is nowhere. No part of a special token's text is part of a stop text."""
        at = self.text.find(stop)
        while at >= 0 and any(start < at < end or start < at + len(stop) < end for start, end in self.hidden):
            at = self.text.find(stop, at + 1)
        return at

    def shown(self, end: int) -> str:
        """What the output shows of the text before `end`."""
        parts, at = [], 0
        for start, after in self.hidden:
            parts.append(self.text[at : min(start, end)])
            at = after
        return "".join(parts) + self.text[at:end]

    def possible_stop(self, stops: Sequence[str]) -> int:
        """Where the longest suffix begins that is the start of a stop text; the length of the text if none is."""
        for size in range(min(len(self.text), max(map(len, stops)) - 1), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in stops):
                return len(self.text) - size
        return len(self.text)

    def rest(self, start: int) -> HeldText:
        """The text from `start` on."""
        moved = ((max(first - start, 0), end - start) for first, end in self.hidden if end > start)
        return HeldText(self.text[start:], tuple(moved))
