"""Sparse attention over all keys: a model's selection is proved to be whole up to a bound, or refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcompile.checkpoints.attention_interface import attention
from qcompile.checkpoints.attention_masks import causal_mask
from qcompile.checkpoints.selected_keys import Ranked, Selected, ranked
from qcompile.errors import OwnAttention, UnsupportedError

MANY = 64
SCORES = torch.zeros(2, 7, 7)


def mask() -> Any:
    return causal_mask(lambda config: 100, mask_function=lambda b, h, q, k: k <= q, config=SimpleNamespace())


def best(scores: Any, count: int = MANY) -> Any:
    """As models select: the best keys of a query, at most `count`."""
    return scores.topk(min(count, scores.shape[-1]), dim=-1).indices.to(torch.int32)


def test_scores_with_a_causal_mask_are_ranked_whole() -> None:
    of_one_head = mask()[:, 0, :, :]
    scores = SCORES + of_one_head
    assert isinstance(scores, Ranked) and scores.shape[:2] == (2, 7)
    assert isinstance(best(scores), Selected) and best(scores).bound == MANY


@pytest.mark.parametrize("order", [min, lambda a, b: min(b, a), lambda a, b: b if b <= a else a])
def test_the_smaller_number_is_that_of_all_keys(order: Callable[[int, int], int]) -> None:
    scores: Any = ranked(SCORES)
    assert scores.topk(order(MANY, scores.shape[-1])).indices.bound == MANY


@pytest.mark.parametrize(
    "select",
    [
        lambda s: s.topk(MANY),
        lambda s: s.topk(s.shape[-1]),  # never compared: no bound is known
        lambda s: s.topk(min(MANY, s.shape[-1]), dim=1),
        lambda s: s.topk(min(MANY, s.shape[-1]), largest=False),
        lambda s: s.topk(min(MANY, s.shape[-1]) // 2),
        lambda s: s.sort(),
        lambda s: torch.relu(s),
        lambda s: s.topk(min(2.5, s.shape[-1])),
    ],
)
def test_other_selections_are_refused(select: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"model selects keys|model compares its number of keys"):
        select(ranked(SCORES))


@pytest.mark.parametrize("use", [lambda m: m[:, 0], lambda m: m[:, 0, 1:, :], lambda m: SCORES * m, lambda m: m + 1])
def test_other_uses_of_a_mask_are_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(OwnAttention):
        use(mask())


def attended(indices: Any) -> Tensor:
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    return attention(nn.Module(), q, q, q, mask(), indices=indices)[0]


def test_attention_to_all_keys_is_dense() -> None:
    assert torch.equal(attended(best(ranked(SCORES))), attended(None))
    with pytest.raises(UnsupportedError, match="attention option indices"):
        attended(torch.zeros(1, 5, 5, dtype=torch.int32))
