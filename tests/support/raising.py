"""Helpers for tests of raising: modules raised with their example inputs, and compared with the raised graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile import check, ops
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules

LONGEST = 64


def inputs(batch: int = 2, tokens: int = 9) -> tuple[Tensor, Tensor]:
    """Random token ids and their positions, both [batch, tokens]."""
    ids = torch.randint(0, modules.VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(tokens).expand(batch, tokens)


def raise_module(module: nn.Module, takes: int = 1) -> Graph:
    """The raised graph of a module that takes token ids, and positions if `takes` is 2."""
    graph = frontend.load(module, example_inputs=inputs()[:takes], max_position=LONGEST)
    return apply(Raise(), graph).graph


def used(graph: Graph) -> Counter[str]:
    """How often `graph` has each operator."""
    return Counter(str(ops.name_of(node.target)) for node in graph.calls())


def right(module: nn.Module) -> Graph:
    """The raised graph of a module, checked for batches of several sequences and lengths."""
    graph = raise_module(module)
    for _, weight, *bias in (node.args for node in graph.calls("linear")):
        assert not bias or bias[0].meta["val"].shape == weight.meta["val"].shape[:1]
    for batch, tokens in ((1, 2), (3, 48)):
        ids, positions = inputs(batch, tokens)
        with torch.no_grad():
            assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-5
    return graph


def refused_or_right(module: nn.Module) -> None:
    """Raise a module with random weights; if it is not refused, compare it."""
    try:
        right(modules.randomized(module))
    except UnsupportedError:
        return


class Attend(nn.Module):
    """One attention block around `attend(q, k, v, ids)`; everything else is as simple as possible."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.embed, self.qkv = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, 144)
        self.head = nn.Linear(48, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        batch, tokens = ids.shape
        q, k, v = (t.view(batch, tokens, 6, 8).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        return self.head(self.attend(q, k, v, ids).transpose(1, 2).flatten(2))


def sdpa(**options: Callable[[Tensor], Tensor] | bool) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        made = {name: option(ids) if callable(option) else option for name, option in options.items()}
        return F.scaled_dot_product_attention(q, k, v, **made)  # type: ignore[arg-type]

    return attend


def place(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device)
