"""Functions that resemble a pattern of raising but differ from it: refused, or raised correctly."""

from __future__ import annotations

from collections.abc import Callable

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
from tests.support.programs import dynamic_size
from tests.support.raising import LONGEST, Attend, inputs, raise_module, refused_or_right, right, sdpa, used

WIDTH = 16
Curve = Callable[[Tensor, Tensor], Tensor]


class Bent(nn.Module):
    """Logits of values [B, T, 16] transformed by `curve`, which has 16 numbers of its own."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self.curve = curve
        self.embed, self.head = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, modules.VOCAB)
        self.own = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.curve(self.embed(ids), self.own))


def heads(x: Tensor) -> Tensor:
    """Split into as many heads as each has features."""
    return x.unflatten(-1, (4, 4))


def filled(own: Tensor, start: int) -> Tensor:
    table = own * 2
    table[start:] = 3.0
    return table


CURVES: dict[str, Curve] = {
    "a factor of each head": lambda x, own: (heads(x) * own[:4, None]).flatten(-2),
    "a factor of each head, heads first": lambda x, own: (
        (heads(x).transpose(1, 2) * own[:4, None, None]).transpose(1, 2).flatten(-2)
    ),
    "a bias of each head": lambda x, own: (heads(x) + own[:4, None]).flatten(-2),
    "an outer product": lambda x, own: (x[..., :4, None] * x[..., None, 4:8]).flatten(-2),
    "an outer sum": lambda x, own: (x[..., :4, None] + x[..., None, 4:8]).flatten(-2),
    "all tokens once more for each of two experts": lambda x, own: (
        x.flatten(0, 1).repeat(2, 1).view(2, *x.shape).sum(0)
    ),
    "all tokens times a table for each of two experts": lambda x, own: (
        (x.flatten(0, 1).repeat(2, 1) * torch.full_like(x.flatten(0, 1).repeat(2, 1), 3.0)).view(2, *x.shape).sum(0)
    ),
    "a weight written over in part": lambda x, own: x * filled(own, 5),
    "a weight written over": lambda x, own: x * own.mul_(2.0),
    "chosen heads, not the last dimension": lambda x, own: torch.ops.aten.index(
        heads(x), [None, None, torch.tensor([3, 1, 0, 2]), None]
    ).flatten(-2),
    "chosen by booleans": lambda x, own: torch.cat([x[..., torch.arange(WIDTH) % 2 == 0]] * 2, -1),
    "bits seen as integers": lambda x, own: x.view(torch.int32).float(),
    "a norm in half precision": lambda x, own: (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True).to(torch.bfloat16).float() + 1e-6)
    ),
    "one bias for all features": lambda x, own: torch.addmm(own[:1], x.flatten(0, 1), own.outer(own)).view(x.shape),
    "every other row of a table": lambda x, own: (
        x + torch.arange(2 * LONGEST * WIDTH).view(-1, WIDTH).cos()[: 2 * x.shape[1] : 2]
    ),
    "a largest position with its place": lambda x, own: x * (torch.arange(x.shape[1]).float().max(0)[0] + 1),
}


@pytest.mark.parametrize("curve", CURVES)
def test_values(curve: str) -> None:
    refused_or_right(Bent(CURVES[curve]))


def test_importing_changes_no_weight() -> None:
    """Refused, because the weight would change between steps, and left unchanged."""
    module = modules.randomized(Bent(lambda x, own: x * own.mul_(2.0)))
    before = module.own.detach().clone()
    with pytest.raises(UnsupportedError, match="in place"):
        raise_module(module)
    assert torch.equal(module.own, before)


class Kept(Bent):
    """Has a buffer that every step overwrites with the result of `write`."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(lambda x, own: x * write(self.kept, own))
        self.register_buffer("kept", torch.ones(WIDTH))


def test_a_buffer_that_is_all_copied_to_is_the_copy() -> None:
    module = modules.randomized(Kept(lambda kept, own: kept.copy_(own * 3)))
    raise_module(module).run(*inputs())
    assert torch.equal(module.kept, torch.ones(WIDTH))
    right(module)


@pytest.mark.parametrize(
    "write",
    [lambda kept, own: 2 * kept + kept.copy_(own), lambda kept, own: kept[:8].copy_(own[:8]).repeat(2)],
)
def test_a_buffer_that_the_next_step_reads_is_refused(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedError, match="in place"):
        raise_module(modules.randomized(Kept(write)))


@pytest.mark.parametrize("act", [nn.SiLU(inplace=True), nn.ReLU(inplace=True)])
def test_activations_in_place(act: nn.Module) -> None:
    graph = right(modules.randomized(Bent(lambda x, own: act(x * own))))
    assert used(graph)["unary"] == 1


# ---- experts -------------------------------------------------------------------------------------------


def test_a_multiple_of_experts_biases() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gate = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, 8)
            self.weight, self.bias = nn.Parameter(torch.zeros(8, WIDTH, WIDTH)), nn.Parameter(torch.zeros(8, WIDTH))
            self.head = nn.Linear(WIDTH, modules.VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids).flatten(0, 1)
            factor, index = self.gate(x).softmax(-1).topk(2, -1)
            chosen = index.reshape(-1)
            y = torch.bmm(self.weight[chosen], x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1)
            y = torch.add(y, self.bias[chosen], alpha=2) * factor.reshape(-1)[:, None]
            return self.head(y.view(-1, 2, WIDTH).sum(1).view(*ids.shape, WIDTH))

    refused_or_right(Experts())


# ---- names ---------------------------------------------------------------------------------------------


def test_a_weight_inside_a_module_called_module() -> None:
    """It is not confused with the weight of that name outside."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(WIDTH))

    class Outer(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.module = Scaled()
            self.embed, self.head = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, modules.VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(F.silu(self.embed(ids) * self.module.scale) * self.scale)

    module = modules.randomized(Outer())
    sizes = {0: dynamic_size("b"), 1: dynamic_size("t", max=LONGEST)}
    ids, positions = inputs()
    program = torch.export.export(module, (ids,), dynamic_shapes=(sizes,))
    for graph in (apply(Raise(), frontend.load(program, max_position=LONGEST)).graph, raise_module(module)):
        assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


def test_a_table_of_one_number_for_each_token() -> None:
    """Its size is the product of the numbers of sequences and tokens."""
    right(Bent(lambda x, own: (x.flatten(0, 1) * torch.full_like(x.flatten(0, 1), 3.0)).view(x.shape)))


def windowed(ids: Tensor) -> Tensor:
    """A mask that vmap makes."""
    places = torch.arange(ids.shape[1])
    rows = torch.vmap(lambda q, k: (k <= q) & (k > q - 4), (None, 0))
    return torch.vmap(rows, (0, None))(places, places)


def test_a_mask_by_vmap_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="is a step of vmap"):
        raise_module(modules.randomized(Attend(sdpa(attn_mask=windowed))))
