"""Branches on positions: decided by the context, tried both ways, or refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcompile.checkpoints.branches import Condition
from qcompile.checkpoints.huggingface import _export
from qcompile.errors import UnsupportedError

CONTEXT = 32

Choice = Callable[[Tensor], float]


class Branching(nn.Module):
    """Logits times `choose(positions)`, called as transformers' models are."""

    def __init__(self, choose: Choice) -> None:
        super().__init__()
        self.choose = choose
        self.embed = nn.Embedding(8, 4)
        self.config: Any = SimpleNamespace(model_type="branching", max_position_embeddings=CONTEXT)
        self.config.get_text_config = lambda **_: self.config

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.embed(input_ids) * self.choose(position_ids))


def factors(choose: Choice) -> list[float]:
    """The factors of the traced model's products."""
    graph = _export(Branching(choose), 1 << 16).graph
    return [float(node.args[1]) for node in graph.nodes if "mul" in str(node.target)]


DECIDED: dict[str, tuple[Choice, float]] = {
    "never longer": (lambda p: 2.0 if torch.max(p) + 1 > CONTEXT else 3.0, 3.0),
    "always at least one": (lambda p: 2.0 if p.max() + 1 >= 1 else 3.0, 2.0),
    "a length that is not 0": (lambda p: 2.0 if torch.max(p) + 1 else 3.0, 2.0),
    "less": (lambda p: 2.0 if p.max() < CONTEXT else 3.0, 2.0),
    "an offset below": (lambda p: 2.0 if p.max() - 4 > CONTEXT - 5 else 3.0, 3.0),
    "both ways alike": (lambda p: 2.0 if p.max() > 5 and len(p.shape) > 2 else 3.0, 3.0),
    "two conditions alike": (lambda p: 3.0 if p.max() > 5 or p.max() < 7 or len(p.shape) == 2 else 2.0, 3.0),
}


@pytest.mark.parametrize("kind", DECIDED)
def test_decided(kind: str) -> None:
    choose, factor = DECIDED[kind]
    assert factors(choose) == [factor]


DIFFER: dict[str, Choice] = {
    "at the last position": lambda p: 2.0 if p.max() + 1 > CONTEXT - 1 else 3.0,
    "at the first": lambda p: 2.0 if p.max() < 1 else 3.0,
    "at the first, by its number": lambda p: 2.0 if p.max() else 3.0,
    "where two conditions hold": lambda p: 2.0 if p.max() > 5 and p.max() < 7 else 3.0,
}


@pytest.mark.parametrize("kind", DIFFER)
def test_what_differs_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match="in another way for long sequences"):
        factors(DIFFER[kind])


def test_too_many_ways_are_refused() -> None:
    def choose(p: Tensor) -> float:
        return sum(0.0 for bound in range(4, 9) if p.max() > bound) + 3.0

    with pytest.raises(UnsupportedError, match="too many ways"):
        factors(choose)


OTHER: tuple[Choice, ...] = (
    lambda p: 2.0 if p.min() > 5 else 3.0,
    lambda p: 2.0 if p.sum() > 0 else 3.0,
    lambda p: 2.0 if p.max() - 1 else 3.0,
)


@pytest.mark.parametrize("choose", OTHER)
def test_other_values_do_not_decide(choose: Choice) -> None:
    with pytest.raises(UnsupportedError, match="branches on the values of its inputs"):
        factors(choose)


def test_outcomes() -> None:
    assert Condition("gt", 1, 32).outcome(32) is False
    assert Condition("ge", 1, 32).outcome(32) is None
    assert Condition("lt", 0, 32).outcome(32) is True
    assert Condition("le", 0, 0).outcome(2) is None
