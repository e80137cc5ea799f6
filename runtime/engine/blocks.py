"""Allocation of the KV cache's pages."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence

from qcompile.errors import UsageError
from qcompile.runtime.engine.prefixes import CachedText, PrefixTree
from qcompile.runtime.step import pages_for


def requested_pages(kv_cache_bytes: int, page_bytes: int) -> int:
    """Number of pages of a cache of this size. A page has `page_bytes` over all layers and paths.

    Raises UsageError if the cache is smaller than a page.
    """
    if kv_cache_bytes < page_bytes:
        raise UsageError(f"kv_cache_bytes {kv_cache_bytes:,} is less than one page of {page_bytes:,} bytes")
    return kv_cache_bytes // page_bytes


class BlockPool:
    """`total` pages of `page_tokens` positions each. Every page is free or held, by one request or several.

    ring_tokens: positions of the ring of a hierarchical cache (see `pages_for`), 0 for other caches. remember: most
    free pages that keep their text for reuse. Free pages without a text are taken first, then those unused for longest.
    A hierarchical cache keeps the pages of a text together, as a CachedText.
    """

    def __init__(self, total: int, page_tokens: int, ring_tokens: int = 0, remember: int = 0) -> None:
        self.total, self.page_tokens, self._ring_tokens = total, page_tokens, ring_tokens
        self.group = ring_tokens // 3
        """Positions that a hierarchical cache rounds together; 0 for other caches."""
        self._empty = list(range(total - 1, -1, -1))  # a stack: the page freed last may still be in the CPU's cache
        self._idle: dict[int, None] = {}  # free, with a known text; the one unused for longest first
        self._holders = [0] * total
        self._remember = remember
        self.prefixes = PrefixTree(page_tokens) if remember and not ring_tokens else None
        self.texts: list[CachedText] | None = [] if remember and ring_tokens else None
        """Cached texts, of which all pages are free; the one unused for longest first."""

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._empty) + self._remembered

    @property
    def _remembered(self) -> int:
        """Number of free pages with a known text."""
        return len(self._idle) + sum(len(text.pages) for text in self.texts or ())

    @property
    def used(self) -> int:
        """Number of held pages."""
        return sum(map(bool, self._holders))

    def pages_for(self, tokens: int) -> int:
        """Number of pages that `tokens` positions take."""
        return pages_for(tokens, self.page_tokens, self._ring_tokens)

    @property
    def most_tokens(self) -> int:
        """The most positions that all pages together can hold for one request."""
        return bisect.bisect_right(range(self.total * self.page_tokens + 1), self.total, key=self.pages_for) - 1

    def held(self, page: int) -> bool:
        """Whether a request holds this page."""
        return self._holders[page] > 0

    def take(self, count: int) -> list[int]:
        """Take `count` pages, and return their numbers. The caller must have checked that they are free."""
        if count > self.free:
            raise ValueError(f"{count} pages asked, {self.free} free")
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def _evict(self) -> int:
        """Forget the text of the page unused for longest, and return it."""
        if self.texts:
            self._empty += self.texts.pop(0).pages
            return self._empty.pop()
        assert self.prefixes is not None
        page = next(iter(self._idle))
        del self._idle[page]
        for other in self.prefixes.forget(page):
            if other in self._idle:
                del self._idle[other]
                self._empty.append(other)
        return page

    def keep_text(self, text: CachedText) -> None:
        """Give the pages of a text back, and keep the text for reuse."""
        assert self.texts is not None
        for page in text.pages:
            self._holders[page] -= 1
        self.texts.append(text)
        self._forget_surplus()

    def reuse_text(self, text: CachedText) -> None:
        """Hold the pages of a cached text, which a request continues: it is no longer cached."""
        assert self.texts is not None
        self.texts.remove(text)
        for page in text.pages:
            self._holders[page] += 1

    def share(self, pages: Sequence[int]) -> None:
        """Hold cached pages, which other requests may hold too."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Release `pages`, and empty the list."""
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

    def forget_texts(self) -> None:
        """Forget the texts of all free pages: what the pages hold is lost."""
        self._forget_until(0)

    def _forget_surplus(self) -> None:
        self._forget_until(self._remember)

    def _forget_until(self, left: int) -> None:
        while self._remembered > left:
            self._empty.append(self._evict())

    def check(self, *holders: list[int]) -> None:
        """Raise RuntimeError unless each page is either free or held, and its number of holders is right.

        `holders` are the page lists of all requests.
        """
        free = [*self._empty, *self._idle, *(page for text in self.texts or () for page in text.pages)]
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
