"""Conditions on the sequence length: the context is limited so that they have one value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules
from tests.support.raising import LONGEST, inputs, raise_module


class Stretched(nn.Module):
    """Logits of an embedding, times a weight that is doubled if `is_long(largest position)`."""

    def __init__(self, is_long: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.is_long = is_long
        self.embed, self.head = nn.Embedding(modules.VOCAB, 16), nn.Linear(16, modules.VOCAB)
        self.own = nn.Parameter(torch.zeros(16))

    def forward(self, ids: Tensor) -> Tensor:
        largest = torch.arange(ids.shape[1], device=ids.device).max()
        return self.head(self.embed(ids) * torch.where(self.is_long(largest), self.own * 2, self.own))


def test_the_context_ends_where_other_values_are_selected() -> None:
    module = modules.randomized(Stretched(lambda largest: largest + 1 > 30))
    result = apply(Raise(), frontend.load(module, example_inputs=inputs()[:1], max_position=LONGEST))
    assert result.graph.info.max_position == 30
    (note,) = result.notes
    assert "selects other values beyond 30 tokens" in note
    ids, positions = inputs(tokens=30)
    assert check.max_relative_error(result.graph.run(ids, positions), module(ids)) < 1e-6
    ids, positions = inputs(tokens=31)
    assert check.max_relative_error(result.graph.run(ids, positions), module(ids)) > 1e-2


@pytest.mark.parametrize(
    "is_long",
    [
        lambda largest: torch.add(largest, 1, alpha=20) > 30,
        lambda largest: largest - 1 > 30,
        lambda largest: largest * 2 > 30,
        lambda largest: largest + 1 >= 30,
        lambda largest: largest + 40 > 30,  # always
    ],
)
def test_other_conditions_are_refused(is_long: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedError, match="has no counterpart"):
        raise_module(modules.randomized(Stretched(is_long)))
