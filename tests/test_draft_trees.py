"""What benchmarks/draft_trees.py counts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.draft_tree_costs import DEPTH, NODES, WIDTH, Rounds, gains
from benchmarks.draft_tree_proposals import NEVER, Proposal, best, branching, ranked
from benchmarks.draft_trees import Texts


def random_tree(seed: int) -> tuple[list[np.ndarray], dict[tuple[int, int], tuple[int, int] | None]]:
    """Products of all nodes by level, and the parent of each node (level, number); some products are equal."""
    draw = np.random.default_rng(seed)
    every: list[np.ndarray] = []
    parents: dict[tuple[int, int], tuple[int, int] | None] = {}
    expanded: list[tuple[float, tuple[int, int] | None]] = [(0.0, None)]
    for level in range(DEPTH):
        steps = -np.sort(draw.integers(0, 6, (len(expanded), WIDTH)) / 2.0, axis=1)
        every.append(np.concatenate([product + row for (product, _), row in zip(expanded, steps, strict=True)]))
        parents |= {(level, number): expanded[number // WIDTH][1] for number in range(len(every[-1]))}
        order = np.argsort(-every[-1], kind="stable")[:WIDTH]
        expanded = [(float(every[-1][number]), (level, int(number))) for number in order]
    return every, parents


@pytest.mark.parametrize("seed", range(4))
def test_trees_are_the_nodes_of_the_highest_products(seed: int) -> None:
    every, parents = random_tree(seed)
    nodes = sorted(parents, key=lambda node: (-every[node[0]][node[1]], node))
    branches, rows = branching(every)
    for many, leaves, paths in zip(NODES, branches, rows, strict=True):
        tree = set(nodes[:many])
        assert all(parents[node] is None or parents[node] in tree for node in tree)
        ends = tree - {parents[node] for node in tree}
        assert leaves == len(ends)
        assert paths == sum(level + 2 for level, _ in ends)


@pytest.mark.parametrize("seed", range(4))
def test_a_token_is_in_the_tree_by_its_rank(seed: int) -> None:
    every, parents = random_tree(seed)
    path = [max((node for node in parents if node[0] == DEPTH - 1), key=lambda node: every[node[0]][node[1]])]
    while (parent := parents[path[0]]) is not None:
        path.insert(0, parent)
    ranks = ranked(every, [float(every[level][number]) for level, number in path])
    for depth in range(DEPTH):
        before = [every[level][number] for level, number in parents if level <= depth]
        for level in range(DEPTH):
            product = every[level][path[level][1]]
            assert (ranks[depth, level] == NEVER) == (level > depth)
            if level <= depth:
                assert sum(each > product for each in before) <= ranks[depth, level] < len(before)
        assert (np.diff(ranks[depth, : depth + 1]) > 0).all()  # no token comes before its parent


def test_rounds_follow_each_other() -> None:
    texts = Texts()
    none = np.zeros(len(NODES), int)
    ranks = np.full((DEPTH, DEPTH), NEVER)
    ranks[1:, :2] = 0, 5  # a tree of 4 nodes has the first token, one of 6 the second too
    ranks[0, 0] = 3
    texts.add([Proposal(ranks, none, none, chain=1, second=True) for _ in range(12)])
    yields = texts.yields()
    assert yields["chain 1"] == yields["chain 8"] == 2
    assert yields["comb 1"] == 2
    assert yields["comb 2"] == 3
    assert yields["tree 4, 1 levels"] == yields["tree 4, 8 levels"] == 2
    assert yields["tree 6, 2 levels"] == 3


def test_probabilities_of_the_best_tokens() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    tokens, shares = best(logits, np.arange(50, dtype=np.int32)[::-1].copy())
    wanted = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True)
    order = np.argsort(-wanted, axis=1)[:, :WIDTH]
    assert (tokens == 49 - order).all()
    # float64 sums of 50 terms in two orders differ in the last bits
    assert np.allclose(np.exp(shares), np.take_along_axis(wanted, order, axis=1), rtol=1e-12)


def test_gains_are_over_the_best_chain() -> None:
    texts = Texts()
    none = np.zeros(len(NODES), int)
    ranks = np.triu(np.full((DEPTH, DEPTH), NEVER), 1)  # the target's tokens are the first of each level
    ranks[np.tril_indices(DEPTH)] = np.tile(np.arange(DEPTH), (DEPTH, 1))[np.tril_indices(DEPTH)]
    texts.add([Proposal(ranks, none, none, chain=2) for _ in range(90)])
    result = gains(texts.yields(), Rounds(6, lambda rows, levels, width, estimate: 1 + 0.1 * levels + estimate))
    assert result["chain"] == {"gamma": 2, "tokens_a_round": 3}
    assert result["bound"]["chain"]["gain"] == 1
    assert result["bound"]["tree 8"] == {"levels": 8, "tokens_a_round": 9, "gain": round(9 / 1.8 / (3 / 1.2), 3)}
    assert result["estimate"]["tree 8"]["gain"] < result["bound"]["tree 8"]["gain"]
