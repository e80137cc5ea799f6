"""Gates, biases and weights with one number for each head, and such that only look like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support import modules
from tests.support.raising import refused_or_right, right, used

HEADS, SIZE = 6, 8

Gate = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gated(nn.Module):
    """Logits of heads [B, T, H, D] changed by `gate`, which also takes a linear's outputs [B, T, H] and a weight."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        width = HEADS * SIZE
        self.embed, self.head = nn.Embedding(modules.VOCAB, width), nn.Linear(width, modules.VOCAB)
        self.linear, self.weight = nn.Linear(width, HEADS), nn.Parameter(torch.zeros(HEADS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.gate(x.unflatten(-1, (HEADS, SIZE)), self.linear(x), self.weight).flatten(2))


BY_HEAD: dict[str, Gate] = {
    "gate": lambda x, y, w: x * torch.sigmoid(y)[..., None],
    "linear gate": lambda x, y, w: y[..., None] * x,
    "sum": lambda x, y, w: x + y.tanh()[..., None],
    "gate of heads transposed": lambda x, y, w: (x.transpose(1, 2) * y.tanh().transpose(1, 2)[..., None]).transpose(
        1, 2
    ),
    "weight": lambda x, y, w: x * w[:, None],
    "bias": lambda x, y, w: w[None, None, :, None] + x,
    "weight behind a norm": lambda x, y, w: nn.functional.rms_norm(x, (SIZE,)) * w[:, None],
    "weight behind a norm with a weight": lambda x, y, w: (
        nn.functional.rms_norm(x, (SIZE,), w.new_ones(SIZE)) * w[:, None]
    ),
}


@pytest.mark.parametrize("kind", BY_HEAD)
def test_by_head(kind: str) -> None:
    graph = right(modules.randomized(Gated(BY_HEAD[kind])))
    assert set(used(graph)) & {"mul", "add", "rms_norm"}


@pytest.mark.parametrize("gate", [lambda x, y, w: x * y[:, :, :1, None], lambda x, y, w: x * y.flip(-1)[..., None]])
def test_near_misses(gate: Gate) -> None:
    refused_or_right(Gated(gate))
