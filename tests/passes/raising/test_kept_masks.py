"""Scores that are multiplied by a causal mask and then hidden by it, as in the first GPT, and biases expanded first."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import Attend, place, raise_module, right, used

Hide = Callable[[Tensor, Tensor], Tensor]
"""Changes scores by a mask that is 1 where a key is seen."""


def attend(hide: Hide) -> Callable[..., Tensor]:
    def made(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        kept = (place(ids)[:, None] >= place(ids)[None]).float()[None, None]
        return (hide(q @ k.transpose(-1, -2) / math.sqrt(8), kept)).softmax(-1) @ v

    return made


KEPT: dict[str, Hide] = {
    "times and plus": lambda w, b: w * b + -1e4 * (1 - b),
    "other order": lambda w, b: -1e9 * (1 - b) + b * w,
    "scaled later": lambda w, b: (w * b + -1e9 * (1 - b)) * 0.5,
    "a scale inside": lambda w, b: w * 0.5 * b + -1e9 * (1 - b),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_mask_that_multiplies(kind: str) -> None:
    graph = right(modules.randomized(Attend(attend(KEPT[kind]))))
    assert used(graph)["attention"] == 1


MISSES: dict[str, Hide] = {
    "not hidden": lambda w, b: w * b,
    "hidden too little": lambda w, b: w * b + -50.0 * (1 - b),
    "shown but scaled": lambda w, b: w * (b + b.tril(-2)) + -1e9 * (1 - b),
    "hidden elsewhere": lambda w, b: w * b.mT + -1e9 * (1 - b),
}


@pytest.mark.parametrize("kind", MISSES)
def test_other_factors_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(Attend(attend(MISSES[kind]))))


class Offset(nn.Module):
    """Logits of a norm of embeddings plus a weight that `spread` expands."""

    def __init__(self, spread: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.spread = spread
        self.embed, self.head = nn.Embedding(modules.VOCAB, 16), nn.Linear(16, modules.VOCAB)
        self.own, self.norm = nn.Parameter(torch.zeros(16)), nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * 3
        return self.head(self.norm(self.spread(self.own, x) + x))


@pytest.mark.parametrize(
    "spread",
    [
        lambda w, x: w.expand_as(x).contiguous(),
        lambda w, x: w.expand(*x.shape).clone(),
    ],
)
def test_a_bias_that_is_expanded_first(spread: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert used(right(modules.randomized(Offset(spread))))["add"] == 1
