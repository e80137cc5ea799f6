"""Experts that compute pairs of token and slot sorted by expert, and split where the next one begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import raise_module, right, used

COUNT, WIDTH, INNER, SLOTS = 4, 16, 12, 2


class InTurn(nn.Module):
    """Logits of an embedding plus its gated experts, each computed for the rows of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, COUNT)
        self.gates = nn.Parameter(torch.zeros(COUNT, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.zeros(COUNT, WIDTH, INNER))
        self.head = nn.Linear(WIDTH, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.run_experts(x.flatten(0, 1)).view(x.shape))

    def run_experts(self, x: Tensor) -> Tensor:
        best, index = self.router(x).topk(SLOTS, 1)
        sizes = self.sizes(torch.zeros(x.shape[0], COUNT).scatter(1, index, 1))
        order = self.order(index)
        token = order.div(SLOTS, rounding_mode="trunc")
        factor = best.softmax(-1).flatten()[order]
        gate, up = self.every(x[token], self.gates, sizes).chunk(2, -1)
        y = self.every(F.silu(gate) * up, self.down, sizes) * factor[:, None]
        return self.back(torch.zeros_like(x), token, order, y)

    def sizes(self, marks: Tensor) -> list[int]:
        """Rows of each expert."""
        return marks.long().sum(0).tolist()

    def order(self, index: Tensor) -> Tensor:
        """Pairs in the order in which they are computed."""
        return index.flatten().sort(0)[1]

    def every(self, rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        """The rows of each expert times its weight."""
        parts = rows.split(sizes, 0)
        return torch.cat([F.linear(parts[i], weight[i]) for i in range(COUNT)], 0)

    def back(self, zeros: Tensor, token: Tensor, order: Tensor, y: Tensor) -> Tensor:
        """The sum of the rows of each token."""
        return zeros.index_add(0, token, y)


class ByPair(InTurn):
    def back(self, zeros: Tensor, token: Tensor, order: Tensor, y: Tensor) -> Tensor:
        pairs = torch.zeros(zeros.shape[0] * SLOTS, WIDTH).index_add(0, order, y)
        return pairs.view(-1, SLOTS, WIDTH).sum(1)


@pytest.mark.parametrize("kind", [InTurn, ByPair])
def test_pairs_are_computed_by_experts(kind: type[InTurn]) -> None:
    calls = used(right(modules.randomized(kind())))
    assert calls["expert_linear"] == 3 and calls["combine"] == 1  # gate, up and down


class Descending(InTurn):
    def order(self, index: Tensor) -> Tensor:
        return index.flatten().sort(0, descending=True)[1]


class BySlot(InTurn):
    """Tokens of pairs that lie slot by slot."""

    def order(self, index: Tensor) -> Tensor:
        return index.T.flatten().sort(0)[1]


class Exchanged(InTurn):
    def every(self, rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        parts = rows.split(sizes, 0)
        return torch.cat([F.linear(parts[i], weight[COUNT - 1 - i]) for i in range(COUNT)], 0)


class ExchangedSizes(InTurn):
    def sizes(self, marks: Tensor) -> list[int]:
        return super().sizes(marks)[::-1]


class OtherSizes(InTurn):
    """The sizes of what is not chosen."""

    def sizes(self, marks: Tensor) -> list[int]:
        return (1 - marks).long().sum(0).tolist()


class MixedRows(InTurn):
    def every(self, rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        parts = rows.split(sizes, 0)
        return torch.cat([F.linear(parts[i] - parts[i].sum(0), weight[i]) for i in range(COUNT)], 0)


class Ordered(InTurn):
    def back(self, zeros: Tensor, token: Tensor, order: Tensor, y: Tensor) -> Tensor:
        return zeros.index_add(0, token, y.cumsum(0))


class Added(InTurn):
    def back(self, zeros: Tensor, token: Tensor, order: Tensor, y: Tensor) -> Tensor:
        return (zeros + 1).index_add(0, token, y)


class Unsorted(InTurn):
    """Rows that are read in another order than they are added."""

    def back(self, zeros: Tensor, token: Tensor, order: Tensor, y: Tensor) -> Tensor:
        return y.view(-1, SLOTS, WIDTH).sum(1)


@pytest.mark.parametrize(
    "kind", [Descending, BySlot, Exchanged, ExchangedSizes, OtherSizes, MixedRows, Ordered, Added, Unsorted]
)
def test_other_orders_are_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(kind()))
