"""Token numbers changed before the table is read: rows of the table are chosen for the whole vocabulary, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import raise_module, right

PLACEHOLDER = 5


class Mapped(nn.Module):
    """Logits of tokens changed by `change`."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.embed, self.head = nn.Embedding(modules.VOCAB, 8), nn.Linear(8, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(self.change(ids)))


def written_over(ids: Tensor) -> Tensor:
    changed = ids.clone()
    changed[(ids == PLACEHOLDER) | (ids == 7)] = 0
    return changed


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "written over": written_over,
    "chosen": lambda ids: torch.where((ids >= 3) & (ids < 9), ids, torch.zeros_like(ids)),
    "masked": lambda ids: ids.masked_fill(ids == PLACEHOLDER, 2),
    "clamped": lambda ids: ids.clamp(max=modules.VOCAB - 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_mapped_tokens(change: Callable[[Tensor], Tensor]) -> None:
    assert right(modules.randomized(Mapped(change))).calls("embedding")


def test_tokens_that_stay_read_the_table_itself() -> None:
    graph = right(modules.randomized(Mapped(lambda ids: ids.clamp(min=0))))
    (node,) = graph.calls("embedding")
    assert str(node.args[1].target) == "embed.weight"  # type: ignore[union-attr]


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "of another token": lambda ids: torch.where(ids == PLACEHOLDER, ids.roll(1, 1), ids),
    "by position": lambda ids: torch.where(torch.arange(ids.shape[1]) > 2, ids, torch.zeros_like(ids)),
    "by how many there are": lambda ids: torch.where((ids == PLACEHOLDER).sum() > 1, ids, torch.zeros_like(ids)),
    "by those before": lambda ids: ids.masked_fill((ids == PLACEHOLDER).cumsum(1) > 0, 0),
    "outside the table": lambda ids: ids.masked_fill(ids == PLACEHOLDER, modules.VOCAB),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_near_misses_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(Mapped(change)))
