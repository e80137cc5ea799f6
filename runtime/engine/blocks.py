"""Allocation of the KV cache's pages."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence

from qcompile.errors import UsageError
from qcompile.runtime.engine.prefixes import Ending, PrefixTree
from qcompile.runtime.step import pages_for


def requested_pages(kv_cache_bytes: int, page_bytes: int) -> int:
    """Pages, each of `page_bytes` over all layers and paths, of a cache of this size. UsageError if it has none."""
    if kv_cache_bytes < page_bytes:
        raise UsageError(f"kv_cache_bytes {kv_cache_bytes:,} is less than one page of {page_bytes:,} bytes")
    return kv_cache_bytes // page_bytes


class BlockPool:
    """`total` pages of `page_tokens` positions each. Every page is free or held, by one request or several.

    `ring_tokens` is that of the cache (see `pages_for`). Up to `remember` pages that were given back keep their text
    until they are taken for another: of free pages first those without any, then those unused for longest. Those of a
    hierarchical cache are kept together, as an Ending.
    """

    def __init__(self, total: int, page_tokens: int, ring_tokens: int = 0, remember: int = 0) -> None:
        self.total, self.page_tokens, self._ring_tokens = total, page_tokens, ring_tokens
        self.group = ring_tokens // 3
        """Positions that a hierarchical cache rounds together; 0 for others."""
        self._empty = list(range(total - 1, -1, -1))  # a stack: the page freed last may still be in the CPU's cache
        self._idle: dict[int, None] = {}  # free, with a known text; the one unused for longest first
        self._holders = [0] * total
        self._remember = remember
        self.prefixes = PrefixTree(page_tokens) if remember and not ring_tokens else None
        self.endings: list[Ending] | None = [] if remember and ring_tokens else None
        """Texts whose pages are free; the one unused for longest first."""

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._empty) + self._remembered

    @property
    def _remembered(self) -> int:
        """Number of free pages with a known text."""
        return len(self._idle) + sum(len(ending.pages) for ending in self.endings or ())

    @property
    def used(self) -> int:
        """Number of held pages."""
        return sum(map(bool, self._holders))

    def pages_for(self, tokens: int) -> int:
        """Pages that this many positions take."""
        return pages_for(tokens, self.page_tokens, self._ring_tokens)

    @property
    def most_tokens(self) -> int:
        """The most positions that all pages together can hold for one request."""
        return bisect.bisect_right(range(self.total * self.page_tokens + 1), self.total, key=self.pages_for) - 1

    def held(self, page: int) -> bool:
        """Whether a request holds this page."""
        return self._holders[page] > 0

    def take(self, count: int) -> list[int]:
        """Take `count` pages, and return their numbers. The caller must have checked that as many are free."""
        if count > self.free:
            raise ValueError(f"{count} pages asked, {self.free} free")
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def _evict(self) -> int:
        """Forget the text of the page unused for longest, and return it."""
        if self.endings:
            self._empty += self.endings.pop(0).pages
            return self._empty.pop()
        assert self.prefixes is not None
        page = next(iter(self._idle))
        del self._idle[page]
        for other in self.prefixes.forget(page):
            if other in self._idle:
                del self._idle[other]
                self._empty.append(other)
        return page

    def keep(self, ending: Ending) -> None:
        """Give the pages of a text back, and keep the text."""
        assert self.endings is not None
        for page in ending.pages:
            self._holders[page] -= 1
        self.endings.append(ending)
        self._forget_surplus()

    def go_on(self, ending: Ending) -> None:
        """Hold the pages of a text, which is no longer kept."""
        assert self.endings is not None
        self.endings.remove(ending)
        for page in ending.pages:
            self._holders[page] += 1

    def share(self, pages: Sequence[int]) -> None:
        """Hold known pages, which other requests may hold too."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Hold these pages no longer, and empty the list."""
        for page in reversed(pages):  # so that the last page of a text is forgotten before those that lead to it
            if not self._holders[page]:
                raise ValueError(f"page {page} is already free")
            self._holders[page] -= 1
            if not self._holders[page]:
                if self.prefixes is not None and page in self.prefixes:
                    self._idle[page] = None
                else:
                    self._empty.append(page)
        pages.clear()
        self._forget_surplus()

    def _forget_surplus(self) -> None:
        while self._remembered > self._remember:
            self._empty.append(self._evict())

    def check(self, *holders: list[int]) -> None:
        """Raise RuntimeError unless each page is either free or held, and held as often as it is in `holders`, the page
        lists of all requests."""
        free = [*self._empty, *self._idle, *(page for ending in self.endings or () for page in ending.pages)]
        if (
            len(set(free)) + self.used != self.total
            or len(free) + self.used != self.total
            or any(self._holders[page] for page in free)
        ):
            raise RuntimeError(f"KV pages: {len(free)} free + {self.used} used of {self.total}")
        counts = Counter(page for pages in holders for page in pages)
        wrong = [page for page, count in enumerate(self._holders) if count != counts[page]]
        if wrong:
            held, listed = self._holders[wrong[0]], counts[wrong[0]]
            raise RuntimeError(f"KV page {wrong[0]} is held by {held} requests, listed by {listed}")
        unknown = [page for page in self._idle if self.prefixes is None or page not in self.prefixes]
        if unknown or any(len(set(pages)) != len(pages) for pages in holders):
            raise RuntimeError(f"KV pages: {unknown} are kept without a text, or a request holds a page twice")
