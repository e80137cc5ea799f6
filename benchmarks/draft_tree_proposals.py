"""Trees that a draft proposes at the places of a text, by the steps of an artifact's executors (draft_trees.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.draft_tree_costs import DEPTH, NODES, WIDTH
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.step import Rows

NEVER = 1 << 30
"""The rank of a token that the tree does not have."""
Floats = NDArray[np.float32]


class Node(NamedTuple):
    """A node to expand. on_text: the target's text begins with its path. chain: its path has first choices alone.

    number: its place among the nodes of its level, which are the WIDTH choices of each node that was expanded before.
    """

    token: int
    product: float
    on_text: bool
    chain: bool
    number: int

    @property
    def parent(self) -> int:
        """Its parent's place among those that were expanded."""
        return self.number // WIDTH


@dataclass
class Proposal:
    """What the draft proposes at one place of a text.

    ranks: [DEPTH, DEPTH], of the target's token at level d + 1 among all nodes of at most D + 1 levels, at [D, d].
    chain: first choices that are the target's tokens. second: whether the token after them is the second choice.
    branches, rows: leaves of the trees of NODES, and the rows of all paths from the root to a leaf.
    """

    ranks: NDArray[np.int64]
    branches: NDArray[np.int64]
    rows: NDArray[np.int64]
    chain: int = 0
    second: bool = False


class Branches:
    """The draft of an artifact at the places of one text; target and draft have computed the positions of the text."""

    def __init__(self, llm: Any, text: Sequence[int]) -> None:
        drafter, self.text = llm.engine.speculation.drafter, text
        stage, target = drafter.stages[0], drafter.target
        self.draft: Executor = stage.executor
        self.tokens = getattr(drafter, "_tokens", None)  # those that a head proposes; None for all
        self.head = bool(target.features.size)
        self.page = self.draft.limits.page_tokens
        self.pages = list(range(-(-len(text) // self.page)))
        self.size = self.draft.caches[0].size // self.draft.kv_pages
        self.features = np.empty((0, 0), np.float32)
        if self.head:
            target.return_features(True)
        room = self.draft.limits.max_tokens
        for start in range(0, len(text), room):
            part = text[start : start + room]
            target.step([Rows(part, start, self.pages, 0)], False)
            if not self.head and not stage.shares_cache:
                self.draft.step([Rows(part, start, self.pages, 0)], False)
            if self.head:
                self._fill_head(start, target.features[: len(part)].copy())

    def _fill_head(self, start: int, features: Floats) -> None:
        """Compute the head's rows of positions from `start` on, each with the token after it."""
        self.features = np.concatenate([self.features.reshape(-1, features.shape[1]), features])
        tokens = self.text[start + 1 : start + 1 + len(features)]
        self.draft.given[: len(tokens)] = features[: len(tokens)]
        self.draft.step([Rows(tokens, start, self.pages, 0)], False)

    def own_pages(self, level: int, index: int) -> list[int]:
        """The two pages of a branch; levels take turns, so that a level's are copied from those of the one before."""
        first = len(self.pages) + 2 * ((level % 2) * (WIDTH + 1) + index)
        return [first, first + 1]

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages of the draft's cache."""
        base = self.draft.caches[0].address
        for a, b in zip(source, target, strict=True):
            ctypes.memmove(base + b * self.size, base + a * self.size, self.size)

    def expand(self, level: int, nodes: Sequence[Node], place: int, given: Floats | None) -> tuple[Floats, Floats]:
        """The draft's logits and features after each of a level's nodes, the token at `place` being that of level 0.

        A head's row of a token has the position before it, and reads the features of the row before.
        """
        start = place - self.head + level
        first = (place - self.head) // self.page
        many = start // self.page - first + 1  # pages of its own that the branch has reached
        rows = []
        for index, node in enumerate(nodes):
            own = self.own_pages(level, index)
            source = self.own_pages(level - 1, node.parent)[:many] if level else [first]
            self.copy(source, own[: len(source)])
            rows.append(Rows([node.token], start, [*self.pages[:first], *own], 1))
        if given is not None:
            self.draft.given[: len(nodes)] = given
        _, logits = self.draft.step(rows, True)
        assert logits is not None
        return logits, self.draft.features[: len(nodes)].copy()

    def propose(self, place: int) -> Proposal:
        """The tree after the token at `place`, compared with the text."""
        nodes = [Node(self.text[place], 0.0, True, True, 0)]
        given = self.features[place - 1 : place] if self.head else None
        every: list[NDArray[np.float64]] = []  # by level, the products of all nodes
        path: list[float] = []  # by level, the product of the target's token
        chain, second = 0, False
        for level, wanted in enumerate([*self.text[place + 1 : place + 1 + DEPTH], *[-1] * DEPTH][:DEPTH]):
            logits, features = self.expand(level, nodes, place, given)
            tokens, shares = best(logits, self.tokens)
            products = np.array([[node.product] for node in nodes]) + shares
            every.append(products.ravel())
            following = []
            for i, node in enumerate(nodes):
                hit = next((j for j in range(WIDTH) if node.on_text and tokens[i, j] == wanted), -1)
                if hit >= 0:
                    path.append(products[i, hit])
                if node.on_text and node.chain:
                    chain, second = chain + (hit == 0), hit == 1
                following += [
                    Node(int(tokens[i, j]), products[i, j], j == hit, node.chain and j == 0, i * WIDTH + j)
                    for j in range(WIDTH)
                ]
            nodes = sorted(following, key=lambda node: -node.product)
            nodes = nodes[:WIDTH] + [node for node in nodes[WIDTH:] if node.chain]
            given = features[[node.parent for node in nodes]] if self.head else None
        return Proposal(ranked(every, path), *branching(every), chain, second)


def ranked(every: Sequence[NDArray[np.float64]], path: Sequence[float]) -> NDArray[np.int64]:
    """`Proposal.ranks` of the nodes with the products `path`, by level, among `every` node."""
    result = np.full((DEPTH, DEPTH), NEVER)
    for level, product in enumerate(path):
        # Of equal products, the node of fewer levels comes first: so no node comes before its parent.
        before = [int((each >= product if at < level else each > product).sum()) for at, each in enumerate(every)]
        result[level:, level] = np.cumsum(before)[level:]
    return result


def branching(every: Sequence[NDArray[np.float64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`Proposal.branches` and `Proposal.rows`, of trees of DEPTH levels."""
    order = np.argsort(-np.concatenate(every), kind="stable")
    levels = np.repeat(np.arange(DEPTH), [len(each) for each in every])[order]
    starts = np.cumsum([0, *map(len, every)])
    branches, rows = [], []
    for nodes in NODES:
        leaves = np.bincount(levels[:nodes], minlength=DEPTH)
        for level in range(1, DEPTH):
            chosen = order[:nodes][levels[:nodes] == level] - starts[level]
            leaves[level - 1] -= len(set(chosen // WIDTH))  # these nodes have children
        branches.append(int(leaves.sum()))
        rows.append(int(leaves @ np.arange(2, DEPTH + 2)))
    return np.array(branches), np.array(rows)


def best(logits: Floats, names: NDArray[np.int32] | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The WIDTH most probable tokens after each row, and the logarithms of their probabilities."""
    chosen = np.argpartition(logits, -WIDTH, axis=1)[:, -WIDTH:]
    values = np.take_along_axis(logits, chosen, axis=1).astype(np.float64)
    order = np.argsort(-values, axis=1, kind="stable")
    chosen, values = np.take_along_axis(chosen, order, axis=1), np.take_along_axis(values, order, axis=1)
    top = values[:, :1]
    total = np.exp(logits - top).sum(axis=1, keepdims=True)
    return (chosen if names is None else names[chosen].astype(np.int64)), values - top - np.log(total)
