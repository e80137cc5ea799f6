"""Which pages of the KV cache hold which text, so that requests with the same first tokens reuse the pages.

Keys and values of a position depend on the tokens up to it and on the adapter alone, in every bit: neither the division
of a text into steps nor the other requests of a step change them. A cached page therefore holds the bits that computing
it again would give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Sharing = tuple[str | None, str]
"""Requests share pages if they have the same adapter, None for the model alone, and the same owner, empty for all."""
ALL: Sharing = (None, "")


class CachedPage:
    """A full page: a node of a tree in which the path from the root spells the text up to the page's end.

    drafted: for each draft stage, whether its own cache holds the page's positions too.
    """

    __slots__ = ("attached", "children", "depth", "drafted", "key", "page", "parent")

    def __init__(self, page: int, key: tuple[int, ...], parent: CachedPage | None) -> None:
        self.page, self.key, self.parent = page, key, parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[tuple[int, ...], CachedPage] = {}
        self.drafted: list[bool] = []
        self.attached = True


_NOTHING = CachedPage(-1, (), None)


@dataclass(frozen=True, eq=False, slots=True)
class CachedText:
    """The text of a request that has ended over a hierarchical cache, and all its pages.

    tokens: those of which the pages hold keys and values. drafted: how many of them each draft stage's own cache holds.
    sharing: the adapter that computed them, and the owner of the text.
    The newest tokens are in the ring of the text. A continuation overwrites the ring, so only one request can continue
    the text.
    """

    tokens: list[int]
    pages: list[int]
    drafted: list[int]
    sharing: Sharing = ALL

    def is_prefix_of(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` begin with the text and are longer."""
        count = len(self.tokens)
        return count < len(tokens) and tokens[count - 1] == self.tokens[-1] and tokens[:count] == self.tokens


class PrefixTree:
    """The cached pages of `page_tokens` positions each; those of requests that share nothing are apart."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._roots: dict[Sharing, CachedPage] = {}  # of which each has a page, as anybody can make up a key
        self._nodes: dict[int, CachedPage] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, tokens: Sequence[int], sharing: Sharing = ALL) -> list[CachedPage]:
        """The pages of the longest cached prefix, with at least one token left over: its logits are wanted."""
        path, node = [], self._roots.get(sharing, _NOTHING)
        for start in range(0, len(tokens) - self._page_tokens, self._page_tokens):
            child = node.children.get(tuple(tokens[start : start + self._page_tokens]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def add(
        self, at: CachedPage | None, tokens: Sequence[int], pages: Sequence[int], sharing: Sharing = ALL
    ) -> CachedPage:
        """Note that `pages` are full and hold the first positions of `tokens`. Returns the node of the last page.

        `at` is what the previous call for these tokens returned. Where another page holds the same text already, that
        page stays in the tree, and the given one is not added.
        """
        node = at if at and at.attached else self._roots.setdefault(sharing, CachedPage(-1, (), None))
        for depth in range(node.depth, len(pages)):
            key = tuple(tokens[depth * self._page_tokens : (depth + 1) * self._page_tokens])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[pages[depth]] = CachedPage(pages[depth], key, node)
            node = child
        return node

    def note_drafts(self, pages: Sequence[int], positions: Sequence[int]) -> None:
        """Note of a text's pages that the own cache of draft stage i holds the first `positions[i]` positions."""
        for depth, page in enumerate(pages, start=1):
            if node := self._nodes.get(page):
                held = [count >= depth * self._page_tokens for count in positions]
                node.drafted = [a or b for a, b in zip(held, node.drafted or held, strict=True)]

    def forget(self, page: int) -> Iterator[int]:
        """Forget a page. Yields the numbers of the pages below it, which can be found no more."""
        first = self._nodes[page]
        if first.parent:
            del first.parent.children[first.key]
            if first.depth == 1 and not first.parent.children:
                self._roots = {sharing: root for sharing, root in self._roots.items() if root is not first.parent}
        left = [first]
        while left:
            node = left.pop()
            node.attached = False
            del self._nodes[node.page]
            left.extend(node.children.values())
            if node is not first:
                yield node.page


def cached_positions(pages: Sequence[CachedPage], stage: int, page_tokens: int) -> int:
    """Positions from the start that the own cache of draft stage `stage` holds in these pages."""
    count = 0
    while count < len(pages) and stage < len(pages[count].drafted) and pages[count].drafted[stage]:
        count += 1
    return count * page_tokens
