"""Experts that compute every token, each times a score that is 0 unless it was chosen: which match, which do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules
from tests.support.families import COMMON, EXPERTS, save
from tests.support.raising import inputs, raise_module, right, used

COUNT, WIDTH, INNER = 5, 16, 12


class Dense(nn.Module):
    """Logits of an embedding plus what `run_experts` makes of its rows [tokens, WIDTH]."""

    def __init__(self, run_experts: Callable[[Any, Tensor], Tensor], chosen: int = 2) -> None:
        super().__init__()
        self.run_experts, self.chosen = run_experts, chosen
        self.embed, self.router = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, COUNT)
        self.gates = nn.Parameter(torch.zeros(COUNT, WIDTH, 2 * INNER))
        self.down = nn.Parameter(torch.zeros(COUNT, INNER, WIDTH))
        self.bias = nn.Parameter(torch.zeros(COUNT, 1, 2 * INNER))
        self.head = nn.Linear(WIDTH, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.run_experts(self, x.flatten(0, 1)).view(x.shape))


def scores(m: Any, x: Tensor, rest: float = -torch.inf, **options: Any) -> Tensor:
    """The logits of the chosen experts, and `rest` elsewhere."""
    logits = m.router(x)
    best, index = logits.topk(m.chosen, -1)
    return torch.full_like(logits, rest).scatter(-1, index, best, **options)


def compute(m: Any, rows: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Each expert on its rows of [experts * tokens, WIDTH]."""
    gate, up = (rows.view(COUNT, -1, WIDTH) @ m.gates).chunk(2, -1)
    return act(gate) * up @ m.down


def summed(m: Any, x: Tensor, weight: Tensor, **how: Any) -> Tensor:
    """The sum of all experts' results for the inputs `x` times `weight` [tokens, experts]."""
    return compute(m, x.repeat(COUNT, 1) * weight.T.reshape(-1, 1), **how).sum(0)


def after_sigmoid(m: Any, x: Tensor) -> Tensor:
    return summed(m, x, scores(m, x).sigmoid())


def zeros_elsewhere(m: Any, x: Tensor) -> Tensor:
    best, index = m.router(x).softmax(-1).topk(m.chosen, -1)
    weight = torch.zeros_like(m.router(x)).scatter_(1, index, best)
    return summed(m, x, weight * 0.5, act=lambda y: F.gelu(y, approximate="tanh"))


def broadcast(m: Any, x: Tensor) -> Tensor:
    """Without repeated rows: the scores have a dimension of experts, which the tokens lack."""
    rows = scores(m, x).sigmoid().transpose(0, 1).unsqueeze(-1) * x[None]
    return compute(m, rows).sum(dim=0)


@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("run_experts", [after_sigmoid, zeros_elsewhere, broadcast])
def test_only_the_chosen_are_computed(run_experts: Callable[[Any, Tensor], Tensor], chosen: int) -> None:
    graph = right(modules.randomized(Dense(run_experts, chosen)))
    calls = used(graph)
    assert calls["expert_linear"] == 3 and calls["combine"] == 1  # gate, up and down
    assert all(node.args[1].meta["val"].shape[-1] == chosen for node in graph.calls("expert_linear"))


def rest_that_counts(m: Any, x: Tensor) -> Tensor:
    return summed(m, x, scores(m, x))  # minus infinity


def half_elsewhere(m: Any, x: Tensor) -> Tensor:
    return summed(m, x, scores(m, x, 0.0).sigmoid())


def added_scores(m: Any, x: Tensor) -> Tensor:
    return summed(m, x, scores(m, x, 1.0, reduce="add").relu())


def with_biases(m: Any, x: Tensor) -> Tensor:
    """An expert with biases makes something of inputs that are 0."""
    rows = x.repeat(COUNT, 1) * scores(m, x).sigmoid().T.reshape(-1, 1)
    gate, up = (rows.view(COUNT, -1, WIDTH) @ m.gates + m.bias).chunk(2, -1)
    return (F.silu(gate) * up @ m.down).sum(0)


def curved(m: Any, x: Tensor) -> Tensor:
    """An activation that is not 0 at 0."""
    rows = x.repeat(COUNT, 1) * scores(m, x).sigmoid().T.reshape(-1, 1)
    return ((rows.view(COUNT, -1, WIDTH) @ m.gates[..., :INNER]).sigmoid() @ m.down).sum(0)


def by_halves(m: Any, x: Tensor) -> Tensor:
    """The sum of a part of the experts."""
    return compute(m, x.repeat(COUNT, 1) * scores(m, x).sigmoid().T.reshape(-1, 1))[:3].sum(0)


def by_token(m: Any, x: Tensor) -> Tensor:
    """Repeated tokens and scores in different orders: a token meets the score of another."""
    return summed(m, x, scores(m, x).sigmoid().reshape(COUNT, -1).T)


def interleaved(m: Any, x: Tensor) -> Tensor:
    rows = x.repeat_interleave(COUNT, 0) * scores(m, x).sigmoid().T.reshape(-1, 1)
    return compute(m, rows).sum(0)


def reversed_scores(m: Any, x: Tensor) -> Tensor:
    return summed(m, x, scores(m, x).sigmoid().flip(-1))


def scores_of_the_first(m: Any, x: Tensor) -> Tensor:
    return x * scores(m, x).sigmoid()[:, :1]


@pytest.mark.parametrize(
    "run_experts",
    [
        rest_that_counts,
        half_elsewhere,
        added_scores,
        with_biases,
        curved,
        by_halves,
        by_token,
        interleaved,
        reversed_scores,
        scores_of_the_first,
    ],
)
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_what_others_contribute_to_is_refused(run_experts: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedError, match="has no counterpart"):
        raise_module(modules.randomized(Dense(run_experts)))


def test_llama4(tmp_path: Any) -> None:
    settings = COMMON | EXPERTS | {"head_dim": 16, "intermediate_size": 40, "attention_chunk_size": 16}
    module = save("llama4_text", settings, tmp_path)
    graph = apply(Raise(), frontend.load(tmp_path)).graph
    assert used(graph)["combine"] == 2
    ids, positions = inputs(2, 31)
    with torch.no_grad():
        assert check.max_relative_error(graph.run(ids, positions), module(ids).logits) < 5e-6
