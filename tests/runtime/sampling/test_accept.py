"""Acceptance rules against the distribution they promise, on a vocabulary of 16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompile.runtime.sampling import accept
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.sampling import Sampler

VOCAB, DRAWS = 16, 200_000
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.7},
    "counts": {"frequency_penalty": 1.1, "presence_penalty": -0.4},
    "all": {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
}
Rule = Callable[[Any, Any, Any], Any]


def table(options: dict[str, Any], seed: int) -> np.ndarray:
    """Probabilities [previous token, token] of a random model with these options; all of a prompt (3, 7) is seen."""
    logits = (2 * np.random.default_rng(seed).standard_normal((VOCAB, VOCAB))).astype(np.float32)
    result = np.zeros((VOCAB, VOCAB))
    for previous in range(VOCAB):
        sampler = Sampler(SamplingParams(**options), 0, [3, 7], VOCAB)
        ids, probabilities = sampler.distribution(logits[previous], [previous])
        result[previous, ids] = probabilities
    return result


def pick(rows: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """A token from each row of probabilities [draws, vocabulary]."""
    return np.minimum((rows.cumsum(-1) <= uniform[:, None] * rows.sum(-1, keepdims=True)).sum(-1), VOCAB - 1)


def speculate(target: np.ndarray, draft: np.ndarray, keeps: Rule, rng: np.random.Generator) -> np.ndarray:
    """The first two tokens [draws, 2] after token 0, both drafted and decided by the rule; drawn at once."""
    tokens = np.zeros((DRAWS, 2), np.int64)
    alive = np.ones(DRAWS, bool)  # the second draft counts only where the first was kept
    previous = drafted_before = np.zeros(DRAWS, np.int64)
    for place in range(2):
        p, q = target[previous], draft[drafted_before]
        guess = pick(q, rng.random(DRAWS))
        rows = np.arange(DRAWS)
        kept = alive & keeps(p[rows, guess], q[rows, guess], rng.random(DRAWS))
        left = np.where((p > q).any(-1, keepdims=True), p, p + 1)  # where p equals q nothing is ever rejected
        other = pick(np.where(alive[:, None], accept.residual(left, np.minimum(q, left)), p), rng.random(DRAWS))
        tokens[:, place] = np.where(kept, guess, other)
        previous, drafted_before, alive = tokens[:, place], guess, kept
    return tokens


def p_value(tokens: np.ndarray, target: np.ndarray) -> float:
    """Chi-square of pairs of tokens against their exact probabilities; sparse cells are joined."""
    import torch

    expected = (target[0][:, None] * target).reshape(-1) * len(tokens)
    observed = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB * VOCAB)
    assert observed[expected == 0].sum() == 0  # never a token that the options rule out
    thin = expected < 10
    cells = [np.append(x[~thin], x[thin].sum()) for x in (observed, expected)]
    cells = [x[: len(x) - (cells[1][-1] == 0)] for x in cells]
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    freedom = torch.tensor((len(cells[0]) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize("name", SETTINGS)
def test_rejection_sampling_keeps_the_targets_distribution(name: str) -> None:
    target, draft = table(SETTINGS[name], 0), table(SETTINGS[name], 1)
    rng = np.random.default_rng(3)
    plain = np.zeros((DRAWS, 2), np.int64)
    plain[:, 0] = pick(target[plain[:, 0]], rng.random(DRAWS))
    plain[:, 1] = pick(target[plain[:, 0]], rng.random(DRAWS))
    assert p_value(plain, target) > 1e-3
    assert p_value(speculate(target, draft, accept.keeps, rng), target) > 1e-3


def test_a_wrong_rule_is_noticed() -> None:
    target, draft = table({}, 0), table({}, 1)
    rng = np.random.default_rng(3)
    wrong: list[Rule] = [
        lambda p, q, u: u < p,  # forgets what the draft was drawn from
        lambda p, q, u: u * q < p * 1.05,
        lambda p, q, u: p >= q,
    ]
    for keeps in wrong:
        assert p_value(speculate(target, draft, keeps, rng), target) < 1e-3


def test_the_rule_for_one_request_is_the_rule() -> None:
    """`rejection` and `drawn` token by token, 20,000 rounds of two drafts."""
    target, draft = table({"top_k": 6}, 0), table({"top_k": 6}, 1)
    rng = np.random.default_rng(5)

    def sparse(row: np.ndarray) -> accept.Distribution:
        ids = np.flatnonzero(row)
        return ids, row[ids]

    targets, drafts = [sparse(row) for row in target], [sparse(row) for row in draft]
    for rule in ("rejection", "drawn"):
        tokens = np.zeros((20_000, 2), np.int64)
        for index in range(len(tokens)):
            first = accept.pick(drafts[0], rng.random())
            drafted = [first, accept.pick(drafts[first], rng.random())]
            before = [0, *drafted]
            if rule == "rejection":
                proposed = [drafts[0], drafts[first]]
                got = accept.rejection(drafted, proposed, lambda i, before=before: targets[before[i]], rng.random)  # type: ignore[misc]
            else:
                got = accept.drawn(drafted, lambda i, before=before: accept.pick(targets[before[i]], rng.random()))  # type: ignore[misc]
            if len(got) < 2:
                got = [*got, accept.pick(targets[got[0]], rng.random())]
            tokens[index] = got[:2]
        assert p_value(tokens, target) > 1e-3


def test_greedy_keeps_what_the_target_would_choose() -> None:
    assert accept.greedy([], [4]) == [4]
    assert accept.greedy([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accept.greedy([1, 2, 3], [1, 5, 3, 4]) == [1, 5]
    assert accept.greedy([9], [1, 5]) == [1]


def test_guesses_use_the_numbers_that_draws_will() -> None:
    """Alike distributions draw alike, and guessing changes no later draw."""
    logits = np.random.default_rng(0).standard_normal((9, 50)).astype(np.float32)
    params = SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.3)
    alone = Sampler(params, 0, [1], 50)
    wanted = [alone.draw(row) for row in logits]
    guessing = Sampler(params, 0, [1], 50)
    for start in range(0, 9, 3):
        ahead: list[int] = []
        for row in logits[start : start + 3]:
            ahead.append(guessing.guess(row, ahead)[0])
        assert [guessing.draw(row) for row in logits[start : start + 3]] == ahead == wanted[start : start + 3]
