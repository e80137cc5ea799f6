"""Features chosen by conditions on the token's number: rows of one table for the vocabulary, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import raise_module, right, used

FIRST = 50
"""The first token with an embedding of its own."""
WIDTH = 8

Change = Callable[["Chosen", Tensor, Tensor], Tensor]


class Chosen(nn.Module):
    """Logits of embeddings that `change` changes for some tokens, with a second table of its own width."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.embed, self.other = nn.Embedding(modules.VOCAB, WIDTH), nn.Embedding(modules.VOCAB - FIRST, 5)
        self.widen, self.norm = nn.Linear(5, WIDTH), nn.RMSNorm(5, eps=1e-6)
        self.head = nn.Linear(WIDTH, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.change(self, ids, self.embed(ids) * 3.0))

    def second(self, ids: Tensor) -> Tensor:
        """Features of the second table for the tokens from FIRST on, and those of its last row for the others."""
        own = torch.where(ids >= FIRST, ids, modules.VOCAB - 1)
        return self.widen(self.norm(self.other(own - FIRST)))


def twice(module: Chosen, ids: Tensor, x: Tensor) -> Tensor:
    x = torch.where(((ids >= FIRST) & (ids < FIRST + 4)).unsqueeze(-1), module.second(ids), x)
    return torch.where((ids >= FIRST + 4)[..., None].expand_as(x), -module.second(ids), x)


CHANGES: dict[str, Change] = {
    "a second table": lambda module, ids, x: torch.where((ids >= FIRST)[..., None], module.second(ids), x),
    "two tables one after the other": twice,
    "zeros": lambda module, ids, x: x.masked_fill((ids == 5).unsqueeze(-1), 0.0),
    "a number": lambda module, ids, x: torch.where((ids == 5).unsqueeze(-1), x, 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_features_chosen_by_token(change: Change) -> None:
    graph = right(modules.randomized(Chosen(change)))
    assert used(graph) == {"embedding": 1, "linear": 1}
    assert graph.info.embeds_scale == 0


def test_a_condition_that_every_token_meets_needs_no_table() -> None:
    graph = right(modules.randomized(Chosen(lambda _, ids, x: torch.where((ids < modules.VOCAB)[..., None], x, -x))))
    (node,) = graph.calls("embedding")
    assert str(node.args[1].target) == "embed.weight"  # type: ignore[union-attr]


REFUSED: dict[str, Change] = {
    "by another token": lambda _, ids, x: torch.where((ids.roll(1, 1) == 5)[..., None], -x, x),
    "by how many there are": lambda _, ids, x: torch.where((ids == 5).sum() > 1, -x, x),
    "by the features": lambda _, ids, x: torch.where(x > 0, -x, x),
    "by token and feature": lambda _, ids, x: torch.where((ids == 5)[..., None] & (x > 0), -x, x),
    "of other tokens": lambda _, ids, x: torch.where((ids == 5)[..., None], x.cumsum(1), x),
    "of the position": lambda _, ids, x: torch.where((ids == 5)[..., None], x * torch.arange(ids.shape[1])[:, None], x),
    "by the position": lambda _, ids, x: torch.where((torch.arange(ids.shape[1]) == 3)[:, None], -x, x),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_near_misses_are_refused(change: Change) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(Chosen(change)))
