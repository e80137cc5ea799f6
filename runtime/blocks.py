"""The pages of the KV cache: who holds which."""

from __future__ import annotations

import bisect


def pages_for(tokens: int, page_tokens: int, ring_tokens: int = 0) -> int:
    """Pages that hold this many positions.

    A hierarchical cache's `ring_tokens`, three groups of positions, take two pages for each page's worth of them; the
    ring is whole, and the group before the two newest in pages of its own, once there are more than two groups.
    """
    pages = -(-tokens // page_tokens)
    group = ring_tokens // 3
    if not ring_tokens:
        return pages
    if tokens <= 2 * group:
        return 2 * pages
    return 2 * ring_tokens // page_tokens + ((tokens - 1) // group - 1) * (group // page_tokens)


class BlockPool:
    """`total` pages of `page_tokens` positions each. A page is free or held, and `check` says so.

    `ring_tokens` is that of the cache (see `pages_for`).
    """

    def __init__(self, total: int, page_tokens: int, ring_tokens: int = 0) -> None:
        self.total, self.page_tokens, self._ring_tokens = total, page_tokens, ring_tokens
        self._free = list(range(total - 1, -1, -1))  # a stack: the page freed last is still in the cache
        self._held = bytearray(total)

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages somebody holds."""
        return self._held.count(1)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many positions."""
        return pages_for(tokens, self.page_tokens, self._ring_tokens)

    @property
    def most_tokens(self) -> int:
        """The most positions that all pages together can hold for one request."""
        return bisect.bisect_right(range(self.total * self.page_tokens + 1), self.total, key=self.pages_for) - 1

    def take(self, count: int) -> list[int]:
        """`count` page numbers, now held. The caller has seen that so many are free."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._held[page] = 1
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Free these pages and empty the list."""
        for page in reversed(pages):
            if not self._held[page]:
                raise ValueError(f"page {page} is already free")
            self._held[page] = 0
            self._free.append(page)
        pages.clear()

    def check(self, *holders: list[int]) -> None:
        """Raises RuntimeError unless free + used == total, each page is one of the two, and `holders`
        (the page lists of all who hold any) hold each used page exactly once."""
        held = [page for pages in holders for page in pages]
        if len(self._free) + self.used != self.total or any(self._held[page] for page in self._free):
            raise RuntimeError(f"KV pages: {len(self._free)} free + {self.used} used of {self.total}")
        if len(set(held)) != len(held) or len(held) != self.used:
            raise RuntimeError(f"KV pages: {self.used} used, {len(held)} held, {len(set(held))} of them distinct")
