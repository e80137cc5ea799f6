"""Products written as einsum, or with weights on the left: those with weights become linears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qcompile import check
from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import inputs, raise_module, refused_or_right, right, used

WIDTH, HEADS, SIZE = 24, 3, 8
Product = Callable[[Tensor, Tensor], Tensor]


class Multiplied(nn.Module):
    """Logits of `product` of values [B, T, 24] and a weight."""

    def __init__(self, product: Product, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.product = product
        self.embed, self.head = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, modules.VOCAB)
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.product(self.embed(ids), self.weight))


RIGHT: dict[str, tuple[Product, tuple[int, ...]]] = {
    "inputs first": (lambda x, w: torch.einsum("btd,df->btf", x, w), (WIDTH, WIDTH)),
    "outputs first": (lambda x, w: torch.einsum("b t d, f d -> b t f", x, w), (WIDTH, WIDTH)),
    "weight first": (lambda x, w: torch.einsum("fd,btd->btf", w, x), (WIDTH, WIDTH)),
    "weight transposed before": (lambda x, w: torch.einsum("btd,df->btf", x, w.t()), (WIDTH, WIDTH)),
    "dots": (lambda x, w: torch.einsum("...d,df->...f", x, w), (WIDTH, WIDTH)),
    "to heads": (lambda x, w: torch.einsum("btd,dhk->bthk", x, w).flatten(2), (WIDTH, HEADS, SIZE)),
    "to heads ahead of tokens": (
        lambda x, w: torch.einsum("btd,hkd->bhtk", x, w).transpose(1, 2).flatten(2),
        (HEADS, SIZE, WIDTH),
    ),
    "from heads": (lambda x, w: torch.einsum("bthk,hkd->btd", x.unflatten(-1, (HEADS, SIZE)), w), (HEADS, SIZE, WIDTH)),
    "from heads ahead of tokens": (
        lambda x, w: torch.einsum("bhtk,dhk->btd", x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2), w),
        (WIDTH, HEADS, SIZE),
    ),
    "features of heads first": (
        lambda x, w: torch.einsum("bthk,khd->btd", x.unflatten(-1, (HEADS, SIZE)), w),
        (SIZE, HEADS, WIDTH),
    ),
    "tokens in one dimension": (
        lambda x, w: torch.einsum("nd,df->nf", x.flatten(0, 1), w).view(x.shape),
        (WIDTH, WIDTH),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_product_with_a_weight_is_a_linear(name: str) -> None:
    module = modules.randomized(Multiplied(*RIGHT[name]))
    graph = raise_module(module)
    counts = used(graph)
    assert counts["linear"] == 2 and not set(counts) - {"embedding", "linear", "split_heads", "merge_heads"}, counts
    for batch, tokens in ((1, 2), (3, 48)):
        ids, positions = inputs(batch, tokens)
        assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


def test_weights_as_they_are_stored_stay_so() -> None:
    """Nothing is copied if the weight, or the weight it transposes, has a linear's layout already."""
    for name in ("outputs first", "weight transposed before"):
        graph = raise_module(modules.randomized(Multiplied(*RIGHT[name])))
        assert [node.args[1].target for node in graph.calls("linear")] == ["weight", "head.weight"]


OTHERS: dict[str, tuple[Product, tuple[int, ...]]] = {
    "a weight for each head": (
        lambda x, w: torch.einsum("bthk,hkd->bthd", x.unflatten(-1, (HEADS, SIZE)), w).flatten(2),
        (HEADS, SIZE, SIZE),
    ),
    "the same for each head": (
        lambda x, w: torch.einsum("bthk,kd->bthd", x.unflatten(-1, (HEADS, SIZE)), w).flatten(2),
        (SIZE, SIZE),
    ),
    "over tokens": (lambda x, w: torch.einsum("btd,df->bf", x, w)[:, None].expand_as(x), (WIDTH, WIDTH)),
    "of a weight that is summed": (lambda x, w: torch.einsum("btd,dfg->btf", x, w), (WIDTH, WIDTH, 2)),
    "a diagonal": (lambda x, w: torch.einsum("btd,dff->btf", x, w), (WIDTH, WIDTH, WIDTH)),
    "a weight of one input": (lambda x, w: torch.einsum("btd,df->btf", x, w), (1, WIDTH)),
    "no sum": (lambda x, w: torch.einsum("btd,d->btd", x, w), (WIDTH,)),
    "three": (lambda x, w: torch.einsum("btd,df,fg->btg", x, w, w), (WIDTH, WIDTH)),
    "no arrow": (lambda x, w: torch.einsum("btd,df", x, w), (WIDTH, WIDTH)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_refused_or_right(name: str) -> None:
    module = modules.randomized(Multiplied(*OTHERS[name]))
    try:
        graph = raise_module(module)
    except UnsupportedError:
        return
    ids, positions = inputs(2, 5)
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


def test_projections_of_attention_may_be_einsums() -> None:
    """As in models with a dimension for heads in their weights."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, modules.VOCAB)
            self.qkv = nn.ParameterList(torch.zeros(WIDTH, HEADS, SIZE) for _ in range(3))
            self.out = nn.Parameter(torch.zeros(HEADS, SIZE, WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            q, k, v = (torch.einsum("btd,dhk->bhtk", x, weight) for weight in self.qkv)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(x + torch.einsum("bhtk,hkd->btd", y, self.out))

    module = modules.randomized(Attends())
    graph = raise_module(module)
    assert used(graph) == Counter(embedding=1, linear=5, split_heads=3, attention=1, merge_heads=1, add=1)
    ids, positions = inputs(2, 9)
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-5


# ---- weights on the left ---------------------------------------------------------------------------------


class FromTheLeft(nn.Module):
    """Logits of an embedding [B, T, 48] that `curve` transforms with a weight [heads, size, 16]."""

    def __init__(self, curve: Callable[[Tensor, Tensor], Tensor], size: int = 16) -> None:
        super().__init__()
        self.curve = curve
        self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, modules.VOCAB)
        self.weight = nn.Parameter(torch.ones(3, size, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.curve(self.embed(ids), self.weight))


@pytest.mark.parametrize(
    ("curve", "linears"),
    [
        (lambda x, w: (w.flatten(0, 1) @ x.mT[:, :16]).mT, 2),
        (lambda x, w: (w[:, None] @ x.mT.unflatten(1, (3, 16)).transpose(0, 1)).transpose(0, 1).flatten(1, 2).mT, 4),
    ],
)
def test_weights_on_the_left(curve: Callable[[Tensor, Tensor], Tensor], linears: int) -> None:
    assert used(right(modules.randomized(FromTheLeft(curve))))["linear"] == linears


@pytest.mark.parametrize(
    "curve",
    [
        lambda x, w: (w @ x.mT.unflatten(1, (3, 16))).flatten(1, 2).mT,  # heads behind the batch
        lambda x, w: (w[:2, None] @ x.mT.unflatten(1, (3, 16)).transpose(0, 1)[:2]).sum(0).mT.repeat(1, 1, 3),
    ],
)
def test_other_weights_on_the_left(curve: Callable[[Tensor, Tensor], Tensor]) -> None:
    refused_or_right(FromTheLeft(curve))
