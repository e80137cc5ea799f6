"""Formulas over the features of a token, and features that are changed in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import raise_module, right, used

WIDTH = 16
Formula = Callable[[Tensor, Tensor], Tensor]


class Formed(nn.Module):
    """Logits of `formula` of two linears [B, T, 16] of a token."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula
        self.embed, self.head = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, modules.VOCAB)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.formula(self.first(x), self.second(x)))


def size(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def sparse(x: Tensor, y: Tensor) -> Tensor:
    """What is above a quantile of a normal distribution."""
    cut = x.mean(-1, keepdim=True) + 0.7 * x.std(-1, keepdim=True, unbiased=False)
    return F.gelu(F.relu(x - cut)) * y


def as_long(x: Tensor, y: Tensor) -> Tensor:
    """y with the magnitude of x."""
    return y * size(x) ** 0.5 / size(y).clamp(min=1e-5).sqrt()


def changed_size(x: Tensor, y: Tensor) -> Tensor:
    """The result of a write, by the size of what was there before."""
    whole = x * 1.0
    part = whole[..., :8]
    before = torch.rsqrt(size(part) + 1e-6)
    part += y[..., :8]
    return torch.cat((part * before, whole[..., 8:]), -1)


def streams(x: Tensor) -> Tensor:
    """[4, B, T, 4]: the features as four streams."""
    return torch.stack(x.unflatten(-1, (4, 4)).unbind(2), 0)


def predicted(x: Tensor, y: Tensor) -> Tensor:
    """Streams mixed by weights that the token computes, and added to themselves in place."""
    stack, weights = torch.stack((x, y, x * y), 0), y[..., :9].unflatten(-1, (3, 3)).permute(0, 1, 3, 2)
    mixed = (stack.permute(1, 2, 3, 0) @ weights).permute(3, 0, 1, 2)
    mixed += stack
    return mixed.contiguous().mean(0)


def corrected(x: Tensor, y: Tensor) -> Tensor:
    """A part of the streams changed in place, and streams that are read before and after."""
    stack = streams(x) * (1.0 + streams(y)[..., :1])
    first = stack[0].clone()
    stack[1:] += first * 2.0
    return stack.permute(1, 2, 0, 3).flatten(2)


def overwritten(x: Tensor, y: Tensor) -> Tensor:
    """Features replaced by those of another tensor, through a view of a view that is read afterwards."""
    whole = x * 1.0
    later = whole[..., 2:]
    later[..., 4:9] = y[..., 1:6]
    later[..., 6:10].mul_(y[..., :4])
    return torch.cat((whole[..., :4], later[..., 2:]), -1)


def connected(x: Tensor, y: Tensor) -> Tensor:
    """Streams weighed and summed by the token, and what is made of the sum added to each of them."""
    stack = x.unflatten(-1, (4, 4))
    mixes = y[..., :8] * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    before, after = (torch.sigmoid(part) for part in mixes.split(4, -1))
    made = F.silu((before.unsqueeze(-1) * stack).sum(2))
    return (after.unsqueeze(-1) * made.unsqueeze(-2) + stack).flatten(2)


RIGHT: dict[str, Formula] = {
    "sparse": sparse,
    "the sample deviation": lambda x, y: x / (x.std(-1, keepdim=True) + 0.1) + y.var(-1, keepdim=True),
    "as long": as_long,
    "predicted": predicted,
    "corrected": corrected,
    "connected": connected,
    "a sum of features": lambda x, y: y * x.sum(-1, keepdim=True) + x / (1.0 + (x * x).sum(-1, keepdim=True)),
    "overwritten": overwritten,
    "changed size": changed_size,
    "weights before slots": lambda x, y: (x.unflatten(-1, (4, 4)) @ y.unflatten(-1, (4, 4))).flatten(2),
    "a number of each head": lambda x, y: (
        (x.unflatten(-1, (4, 4)) - x.unflatten(-1, (4, 4)).mean(-1, keepdim=True)).flatten(2) * y
    ),
    "a number of a token over features": lambda x, y: y[..., :1] / (x.square() + 1.0),
    "a reciprocal of a number": lambda x, y: 2.0 / (x.square() + 1.0) + y,
    "a mean that is dropped": lambda x, y: x * y.mean(-1)[..., None],
}


@pytest.mark.parametrize("formula", RIGHT)
def test_formulas(formula: str) -> None:
    right(modules.randomized(Formed(RIGHT[formula])))


def test_operators_of_formulas() -> None:
    assert used(raise_module(modules.randomized(Formed(sparse))))["mean"] == 2
    assert used(raise_module(modules.randomized(Formed(predicted))))["mix"] == 1


def read_across(x: Tensor, y: Tensor) -> Tensor:
    """A norm of features by their size before they are changed: no norm of what is multiplied."""
    whole = x * 1.0
    part = whole[..., :8]
    before = torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6)
    whole[..., :8].add_(y[..., :8])
    return torch.cat((part * before, whole[..., 8:]), -1)


def copied(x: Tensor, y: Tensor) -> Tensor:
    """A write into what may be a copy."""
    whole = x * 1.0
    turned = whole.unflatten(-1, (4, 4)).transpose(2, 3)
    turned.reshape(*x.shape)[..., :4] += y[..., :4]
    return whole


@pytest.mark.parametrize("formula", [read_across, copied])
def test_writes_that_are_not_followed(formula: Formula) -> None:
    with pytest.raises(UnsupportedError, match="in place"):
        raise_module(modules.randomized(Formed(formula)))
