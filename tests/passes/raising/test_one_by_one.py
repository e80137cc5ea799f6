"""Routers that choose experts one after another, weighed by their share among those near them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import raise_module, right, used

COUNT, WIDTH = 6, 16
HIDDEN = float("-inf")


def far(best: Tensor, scores: Tensor, tolerance: float = 0.6) -> Tensor:
    return ((best - scores) / scores.abs().clamp(min=best)) > tolerance


def share(scores: Tensor, left: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The share and the index of the best of the scores `left`."""
    best, index = left.max(-1, keepdim=True)
    return left.masked_fill(how(best, scores), HIDDEN).softmax(-1).gather(-1, index), index


class Mixer(nn.Module):
    """Logits of an embedding plus its `slots` experts, chosen one after another, each times its weight."""

    def __init__(self, slots: int = 2, **options: Any) -> None:
        super().__init__()
        self.slots, self.options = slots, options
        self.embed, self.router = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, COUNT)
        self.experts = nn.Parameter(torch.zeros(COUNT, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows = x.flatten(0, 1)
        weight, index = self.choose(self.router(rows), **self.options)
        flat = index.reshape(-1)
        y = (self.experts[flat] @ rows.repeat_interleave(self.slots, 0).unsqueeze(-1)).squeeze(-1)
        y = (y * weight.reshape(-1, 1)).view(-1, self.slots, WIDTH).sum(1)
        return self.head(x + y.view(x.shape))

    def choose(
        self,
        scores: Tensor,
        how: Callable[[Tensor, Tensor], Tensor] = far,
        hidden: float = HIDDEN,
        last_first: bool = False,
        first_twice: bool = False,
    ) -> tuple[Tensor, Tensor]:
        left, result = scores, []
        for _ in range(self.slots):
            result.append(share(scores, left, how))
            left = left if first_twice else left.scatter(-1, result[-1][1], hidden)
        if last_first:
            result.reverse()
        weights, indices = zip(*result, strict=True)
        return torch.cat(weights, -1), torch.cat(indices, -1)


@pytest.mark.parametrize("slots", [2, 3])
def test_choices_in_turn_are_one_choice(slots: int) -> None:
    graph = right(modules.randomized(Mixer(slots)))
    (chosen,) = graph.calls("top_k")
    (made,) = graph.calls("near_share")
    assert chosen.args[1] == slots and made.args[1] is chosen and made.args[2] == 0.6
    assert not used(graph)["pick"]


def of_those_left(best: Tensor, scores: Tensor) -> Tensor:
    return ((scores - best) / scores.abs().clamp(min=best)) > 0.6


def of_magnitudes(best: Tensor, scores: Tensor) -> Tensor:
    return ((best - scores.abs()) / scores.abs().clamp(min=best)) > 0.6


def of_signed(best: Tensor, scores: Tensor) -> Tensor:
    return ((best - scores) / scores.clamp(min=best)) > 0.6


def of_bounded(best: Tensor, scores: Tensor) -> Tensor:
    return ((best - scores) / scores.abs().clamp(min=best, max=best + 1.0)) > 0.6


def of_mean(best: Tensor, scores: Tensor) -> Tensor:
    return far(scores.mean(-1, keepdim=True), scores)


def near(best: Tensor, scores: Tensor) -> Tensor:
    return ((best - scores) / scores.abs().clamp(min=best)) < 0.6


@pytest.mark.parametrize(
    "options",
    [
        *({"how": how} for how in (of_those_left, of_magnitudes, of_signed, of_bounded, of_mean, near)),
        {"how": lambda best, scores: far(best * 0.9, scores)},
        {"how": lambda best, scores: far(best, scores, -0.1)},
        {"hidden": -1.0},
        {"last_first": True},
        {"first_twice": True},
    ],
)
def test_other_routers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(Mixer(**options)))


def test_shares_of_another_choice_are_refused() -> None:
    class Other(Mixer):
        """The second expert has the share that it has among all."""

        def choose(self, scores: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
            best, first = scores.max(-1, keepdim=True)
            second = scores.scatter(-1, first, HIDDEN).max(-1, keepdim=True)[1]
            shares = scores.masked_fill(far(best, scores), HIDDEN).softmax(-1)
            return shares.gather(-1, torch.cat((first, second), -1)), torch.cat((first, second), -1)

    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(Other()))


class Scaled(Mixer):
    """Weights times a number of each expert, at the index of the choice or of another."""

    def __init__(self, shuffled: bool = False) -> None:
        super().__init__()
        self.shuffled, self.scale = shuffled, nn.Parameter(torch.zeros(COUNT))

    def choose(self, scores: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        best, index = scores.softmax(-1).topk(2, -1)
        return best * self.scale[index[:, [1, 0]] if self.shuffled else index], index


def test_numbers_of_experts_are_picked() -> None:
    graph = right(modules.randomized(Scaled()))
    assert sum(graph.is_weight(node.args[0]) for node in graph.calls("pick")) == 1


class Few(Mixer):
    """Some experts have no weights: what is computed for them has no weight, and the token itself is added instead."""

    def __init__(self, last: int = 3) -> None:
        super().__init__()
        self.last = last
        self.experts = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))
        self.register_buffer("has", (torch.arange(COUNT) < 4).float())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows = x.flatten(0, 1)
        weight, index = self.router(rows).softmax(-1).topk(2, -1)
        weight, flat = weight * 1.5, index.reshape(-1)
        own = self.has[flat]
        y = (self.experts[flat.clamp(max=self.last)] @ rows.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1)
        y = y * weight.reshape(-1, 1) * own[:, None]
        rest = rows * (weight.reshape(-1) * (1 - self.has)[flat]).view(-1, 2).sum(1, keepdim=True)
        return self.head(x + (y.view(-1, 2, WIDTH).sum(1) + rest).view(x.shape))


def test_experts_without_weights() -> None:
    graph = right(modules.randomized(Few()))
    (bound,) = graph.calls("bound_choice")
    assert bound.args[1] == 3 and [node.args[1] for node in graph.calls("expert_linear")] == [bound]


def test_an_index_bounded_to_other_experts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="bounded to other experts"):
        raise_module(modules.randomized(Few(last=2)))


def test_numbers_of_experts_in_another_order_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="another index"):
        raise_module(modules.randomized(Scaled(shuffled=True)))
