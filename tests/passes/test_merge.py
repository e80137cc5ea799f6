"""Merge: linears of one input become one, but for those of which kernels need the whole result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qcompile import check, ops
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.merge import Merge
from tests.support import modules
from tests.support.raising import inputs, raise_module


class Siblings(nn.Module):
    """Three linears of one value, of which the `special` one is read by a linear, or has another value added."""

    def __init__(self, special: int, added: bool) -> None:
        super().__init__()
        self.special, self.added = special, added
        self.embed, self.head = nn.Embedding(modules.VOCAB, 24), nn.Linear(24, modules.VOCAB)
        self.three = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(3))
        self.last = nn.Linear(24, 24, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        parts = [each(x) for each in self.three]
        one = parts.pop(self.special)
        read = one + self.last(torch.tanh(x)) if self.added else self.last(one)
        return self.head(torch.tanh(read) * torch.sigmoid(parts[0]) * torch.tanh(parts[1]))


@pytest.mark.parametrize("special", [0, 1, 2])
@pytest.mark.parametrize("added", [False, True])
def test_what_is_read_whole_is_no_slice_within_another(special: int, added: bool) -> None:
    before = raise_module(modules.randomized(Siblings(special, added)))
    after = apply(Merge(), apply(AssignPrecision(), before).graph).graph
    for reader in after.calls("linear", *(["add"] if added else [])):
        for x in reader.all_input_nodes:
            assert ops.name_of(x.target) != "slice_features" or ops.operand(x, "start") == 0
    assert len(after.calls("slice_features")) == (3 if special == 0 else 2)
    assert check.equivalent(after, before, inputs()) < 1e-12
