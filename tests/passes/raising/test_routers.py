"""Routers that choose experts from their best groups: which match limit_groups, and which do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qcompile import check
from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import inputs, raise_module, used

EXPERTS, GROUPS, KEPT = 12, 4, 2
Judge = Callable[[Tensor], Tensor]


def best(runs: Tensor) -> Tensor:
    return runs.max(-1).values


def best_two(runs: Tensor) -> Tensor:
    return runs.topk(2, -1)[0].sum(-1)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1, dtype=torch.float32)


def shifted_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1) - 0.1


class Router(nn.Module):
    """Logits of the `chosen` best scores in the best groups."""

    def __init__(
        self, score: Judge, judge: Judge, hidden: float, chosen: int = 3, largest: bool = True, groups: int = GROUPS
    ) -> None:
        super().__init__()
        self.score, self.judge, self.hidden, self.chosen = score, judge, hidden, chosen
        self.largest, self.groups = largest, groups
        self.embed, self.gate = nn.Embedding(modules.VOCAB, 16), nn.Linear(16, EXPERTS)
        self.head = nn.Linear(chosen, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.score(self.gate(self.embed(ids).view(-1, 16)))
        each = EXPERTS // self.groups
        groups = self.judge(scores.view(-1, self.groups, each))
        mask = torch.zeros_like(groups)
        kept = min(KEPT, self.groups - 1)
        mask.scatter_(1, groups.topk(kept, dim=-1, largest=self.largest, sorted=False)[1], 1)
        mask = self.spread(mask, each)
        left = scores.masked_fill(~mask.bool(), self.hidden)
        return self.head(left.topk(self.chosen, dim=-1)[0].view(*ids.shape, self.chosen))

    def spread(self, mask: Tensor, each: int) -> Tensor:
        """The entry of `mask` [tokens, groups] for the group of each expert."""
        return mask.unsqueeze(-1).expand(-1, self.groups, each).reshape(-1, EXPERTS)


class Dealt(Router):
    """Hides experts as if they were assigned to groups round-robin."""

    def spread(self, mask: Tensor, each: int) -> Tensor:
        return mask.unsqueeze(1).expand(-1, each, self.groups).reshape(-1, EXPERTS)


@pytest.mark.parametrize(
    ("score", "judge", "hidden"),
    [
        (softmax, best, 0.0),
        (softmax, lambda runs: runs.amax(-1), 0.0),
        (softmax, best_two, 0.0),
        (torch.sigmoid, best_two, -torch.inf),
        (shifted_softmax, best, -torch.inf),
    ],
)
def test_same_logits(score: Judge, judge: Judge, hidden: float) -> None:
    module = modules.randomized(Router(score, judge, hidden))
    graph = raise_module(module)
    ids, positions = inputs(3, 17)
    assert used(graph)["limit_groups"] == 1
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


@pytest.mark.parametrize(
    "router",
    [
        (softmax, best, 0.0, 7),  # only 6 scores are left
        (softmax, best, 0.01),
        (torch.sigmoid, best, 0.0),
        (shifted_softmax, best, 0.0),  # 0 is more than some scores
        (softmax, lambda runs: runs.min(-1).values, 0.0),
        (softmax, lambda runs: runs.topk(3, -1)[0].sum(-1), 0.0),
        (softmax, lambda runs: runs.topk(2, -1, largest=False)[0].sum(-1), 0.0),
        (softmax, lambda runs: runs.topk(2, -1)[0].sum(1), 0.0, 3, True, 2),  # sums over groups
        (softmax, best, 0.0, 3, False),  # the worst groups
    ],
)
def test_what_judges_or_hides_otherwise_is_refused(router: tuple[Judge, Judge, float]) -> None:
    with pytest.raises(UnsupportedError, match="has no counterpart"):
        raise_module(modules.randomized(Router(*router)))


def test_more_experts_than_the_best_groups_have_are_refused() -> None:
    right = modules.randomized(Router(torch.sigmoid, best_two, -torch.inf, 6))
    assert used(raise_module(right))["limit_groups"] == 1
    with pytest.raises(UnsupportedError, match=r"node topk\w*: topk chooses 7 experts, and the best groups have 6"):
        raise_module(modules.randomized(Router(torch.sigmoid, best_two, -torch.inf, 7)))


def test_a_mask_laid_out_otherwise_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="has no counterpart"):
        raise_module(modules.randomized(Dealt(softmax, best, 0.0)))


# ---- weights normalized by a norm ----------------------------------------------------------------------


class Normed(nn.Module):
    """Logits of the best scores over what `norm` makes of them."""

    def __init__(self, score: Judge, norm: Judge) -> None:
        super().__init__()
        self.score, self.norm = score, norm
        self.embed, self.gate = nn.Embedding(modules.VOCAB, 16), nn.Linear(16, EXPERTS)
        self.head = nn.Linear(3, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        weights = self.score(self.gate(self.embed(ids))).topk(3, dim=-1)[0]
        return self.head(weights / self.norm(weights))


def test_the_norm_of_positive_weights_is_their_sum() -> None:
    module = modules.randomized(Normed(softmax, lambda w: torch.norm(w, p=1.0, dim=-1, keepdim=True)))
    graph = raise_module(module)
    ids, positions = inputs(3, 17)
    assert used(graph)["normalize"] == 1
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


@pytest.mark.parametrize(
    ("score", "norm"),
    [
        (softmax, lambda w: torch.norm(w, p=2.0, dim=-1, keepdim=True)),
        (softmax, lambda w: torch.norm(w, p=1.0, dim=1, keepdim=True)),
        (softmax, lambda w: torch.norm(w * 2, p=1.0, dim=-1, keepdim=True)),
        (shifted_softmax, lambda w: torch.norm(w, p=1.0, dim=-1, keepdim=True)),
        (lambda x: x, lambda w: torch.norm(w, p=1.0, dim=-1, keepdim=True)),
    ],
)
def test_other_norms_are_refused(score: Judge, norm: Judge) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(Normed(score, norm)))
