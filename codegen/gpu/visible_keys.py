"""Which keys a query sees, as Triton expressions: those up to its own, in its window, in its chunk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VisibleKeys:
    """A query at position p sees keys from p - window + 1 on (`window` > 0), or from p - p % chunk on (`chunk` > 0)."""

    window: int = 0
    chunk: int = 0

    @property
    def hides_early(self) -> bool:
        """Whether queries do not see all keys before them."""
        return self.window > 0 or self.chunk > 0

    def first_visible(self, position: str) -> str:
        """The first position that a query at `position` sees; both are Triton expressions."""
        near = f"tl.maximum({position} - {self.window - 1}, 0)"
        own = f"{position} - {position} % {self.chunk}"
        if self.window and self.chunk:
            return f"tl.maximum({near}, {own})"
        return near if self.window else f"({own})" if self.chunk else "0"
