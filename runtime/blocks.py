"""Allocation of the KV cache's pages."""

from __future__ import annotations

import bisect

from qcompile.errors import UsageError


def pages_for(tokens: int, page_tokens: int, ring_tokens: int = 0) -> int:
    """Pages that this many positions take.

    A hierarchical cache has a ring of `ring_tokens` positions (three groups) in 16 bits, which takes two pages per
    `page_tokens` positions. Up to two groups only the used part of the ring has pages. With more, the whole ring has,
    and all groups but the two newest have quantized pages as well.
    """
    pages = -(-tokens // page_tokens)
    group = ring_tokens // 3
    if not ring_tokens:
        return pages
    if tokens <= 2 * group:
        return 2 * pages
    return 2 * ring_tokens // page_tokens + ((tokens - 1) // group - 1) * (group // page_tokens)


def requested_pages(kv_cache_bytes: int, page_bytes: int) -> int:
    """Pages, each of `page_bytes` over all layers and paths, of a cache of this size. UsageError if it has none."""
    if kv_cache_bytes < page_bytes:
        raise UsageError(f"kv_cache_bytes {kv_cache_bytes:,} is less than one page of {page_bytes:,} bytes")
    return kv_cache_bytes // page_bytes


class BlockPool:
    """`total` pages of `page_tokens` positions each. Every page is either free or held, which `check` verifies.

    `ring_tokens` is that of the cache (see `pages_for`).
    """

    def __init__(self, total: int, page_tokens: int, ring_tokens: int = 0) -> None:
        self.total, self.page_tokens, self._ring_tokens = total, page_tokens, ring_tokens
        self._free = list(range(total - 1, -1, -1))  # a stack: the page freed last may still be in the CPU's cache
        self._held = bytearray(total)

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of held pages."""
        return self._held.count(1)

    def pages_for(self, tokens: int) -> int:
        """Pages that this many positions take."""
        return pages_for(tokens, self.page_tokens, self._ring_tokens)

    @property
    def most_tokens(self) -> int:
        """The most positions that all pages together can hold for one request."""
        return bisect.bisect_right(range(self.total * self.page_tokens + 1), self.total, key=self.pages_for) - 1

    def take(self, count: int) -> list[int]:
        """Take `count` pages, and return their numbers. The caller must have checked that as many are free."""
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
        """Raise RuntimeError unless each page is either free or held, and each held page is exactly once in `holders`,
        the page lists of all requests."""
        held = [page for pages in holders for page in pages]
        if len(self._free) + self.used != self.total or any(self._held[page] for page in self._free):
            raise RuntimeError(f"KV pages: {len(self._free)} free + {self.used} used of {self.total}")
        if len(set(held)) != len(held) or len(held) != self.used:
            raise RuntimeError(f"KV pages: {self.used} used, {len(held)} held, {len(set(held))} of them distinct")
