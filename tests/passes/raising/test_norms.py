"""Norms written out, and separate norms of heads or parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile import check
from tests.support import modules
from tests.support.raising import Attend, inputs, raise_module, right, used


def test_parts_normalized_apart() -> None:
    """Separate norms of parts of a value, joined along features or heads: one norm with a weight per head."""

    class Parts(nn.Module):
        def __init__(self, axis: int) -> None:
            super().__init__()
            self.axis = axis
            self.embed, self.inner = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, 48)
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
            self.head = nn.Linear(48, modules.VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.inner(self.embed(ids))
            parts = x.unflatten(-1, (3, 16)).split(1, 2) if self.axis == 2 else x.split(16, -1)
            return self.head(torch.cat([n(p) for n, p in zip(self.norms, parts, strict=True)], self.axis).flatten(2))

    for axis in (2, -1):
        module = modules.randomized(Parts(axis))
        graph, (ids, positions) = raise_module(module), inputs()
        assert len(graph.calls("layer_norm")) == 1
        assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 3e-6


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_norm_written_out_divides_by_the_number_of_features(unbiased: bool) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, modules.VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            variance = x.var(-1, correction=int(unbiased), keepdim=True)
            return self.head((x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5))

    module, (ids, positions) = modules.randomized(Written()), inputs()
    graph = raise_module(module)
    assert len(graph.calls("layer_norm")) == int(not unbiased)  # the other is a formula of means
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 3e-6


def test_norms_of_heads_that_share_their_first() -> None:
    """Queries and keys with a separate norm per head, except that both share the norm of the first head."""

    class Normed(Attend):
        def __init__(self) -> None:
            super().__init__(self._attend)
            self.first = nn.RMSNorm(8)
            self.others = nn.ModuleList(nn.RMSNorm(8) for _ in range(2))

        def _attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
            q, k = (
                torch.cat([self.first(t[:, :1]), other(t[:, 1:2])], 1)
                for t, other in zip((q, k), self.others, strict=True)
            )
            y = F.scaled_dot_product_attention(q, k, v[:, :2], is_causal=True)
            return y.repeat(1, 3, 1, 1)

    graph = right(modules.randomized(Normed()))
    assert used(graph)["rms_norm"] == 2
