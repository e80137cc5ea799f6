"""Activations as one operator and written out, and functions that resemble them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile import check
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph
from tests.support import modules
from tests.support.raising import inputs, raise_module, used

Curve = Callable[[Tensor], Tensor]


class Bent(nn.Module):
    """Logits of values transformed by `curve`."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self.curve = curve
        self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.curve(self.embed(ids)))


def bent(x: Tensor, slope: float = 0.79788456, cube: float = 0.044715, one: float = 1.0, power: int = 2) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(slope * x * (one + cube * x**power)))


GELUS: dict[str, Curve] = {
    "factored": lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "factored, other order": lambda x: (torch.tanh((x.square() * 0.044715 + 1) * (x * 0.79788456)) + 1) * (x / 2),
    "summed": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3.0)))),
    "summed of products": lambda x: 0.5 * x * (1 + torch.tanh((x + 0.044715 * x * x * x) * 0.7978845608)),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "quick, other order": lambda x: torch.sigmoid(x / (1 / 1.702)) * x,
}


@pytest.mark.parametrize("style", GELUS)
def test_a_gelu_that_is_written_out_is_one(style: str) -> None:
    module = modules.randomized(Bent(GELUS[style]))
    graph = raise_module(module)
    ids, positions = inputs()
    wanted = "gelu_quick" if "quick" in style else "gelu_tanh"
    assert used(graph) == Counter(embedding=1, unary=1, linear=1) and graph.calls("unary")[0].args[1] == wanted
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "curve"),
    [
        ("mish", F.mish),
        ("mish", lambda x: x * torch.tanh(F.softplus(x))),
        ("mish", lambda x: F.softplus(x).tanh() * x),
        ("elu", F.elu),
        ("softplus", F.softplus),
        ("softplus", lambda x: torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x)))),
        ("softplus", lambda x: torch.where(x >= 30, x, x.exp().log1p())),
    ],
)
def test_activations_of_one_operator(kind: str, curve: Curve) -> None:
    module = modules.randomized(Bent(curve))
    graph = raise_module(module)
    assert used(graph) == Counter(embedding=1, unary=1, linear=1) and graph.calls("unary")[0].args[1] == kind
    ids, positions = inputs()
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


def test_the_logarithm_of_a_sigmoid_is_a_softplus() -> None:
    module = modules.randomized(Bent(lambda x: F.logsigmoid(3 * x)))
    graph = raise_module(module)
    assert [node.args[1] for node in graph.calls("unary")] == ["softplus"]
    ids, positions = inputs()
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


def test_infinite_bounds_bound_nothing() -> None:
    module = modules.randomized(Bent(lambda x: x.clamp(0.0, math.inf) * x.clamp(-math.inf, math.inf)))
    graph = raise_module(module)
    (clamp,) = graph.calls("clamp")
    assert clamp.args[1:] == (0.0, None)
    ids, positions = inputs()
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


OTHERS: dict[str, Curve] = {
    "steeper mish": lambda x: x * torch.tanh(F.softplus(x, 2.0)),
    "mish that ends early": lambda x: x * torch.tanh(F.softplus(x, 1.0, 0.5)),
    "mish of others": lambda x: x * torch.tanh(F.softplus(x.flip(-1))),
    "steeper softplus": lambda x: F.softplus(x, 2.0),
    "softplus that ends early": lambda x: F.softplus(x, 1.0, 0.5),
    "deeper elu": lambda x: F.elu(x, 0.5),
    "softplus that ends early, written out": lambda x: torch.where(x > 0.5, x, torch.log(1.0 + torch.exp(x))),
    "softplus of two bases": lambda x: torch.where(x > 20, x, torch.log(2.0 + torch.exp(x))),
    "softplus of others": lambda x: torch.where(x > 20, x, torch.log(1.0 + torch.exp(x.flip(-1)))),
    "slope": lambda x: bent(x, slope=0.8),
    "cube": lambda x: bent(x, cube=0.0447),
    "one": lambda x: bent(x, one=1.01),
    "power": lambda x: bent(x, power=3),
    "summed twice": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * x * (x + 0.044715 * x.pow(3)))),
    "of others": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * x.flip(-1) * (1 + 0.044715 * x * x))),
}


def refused_or_right(curve: Curve) -> Graph | None:
    """The raised graph, checked against the module; None if raising refuses it."""
    module = modules.randomized(Bent(curve))
    try:
        graph = raise_module(module)
    except UnsupportedError:
        return None
    ids, positions = inputs()
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6
    return graph


@pytest.mark.parametrize("curve", OTHERS)
def test_what_is_no_gelu_is_none(curve: str) -> None:
    graph = refused_or_right(OTHERS[curve])
    assert graph is None or all(node.args[1] == "tanh" for node in graph.calls("unary"))


def inside(x: Tensor) -> Tensor:
    return 0.79788456 * x * (1 + 0.044715 * x * x)


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


CHANGED: dict[str, Curve] = {
    "one twice": lambda x: x * 0.5 * torch.add(torch.tanh(inside(x)), 1.0, alpha=2),
    "one twice, a tensor": lambda x: x * 0.5 * torch.add(torch.tanh(inside(x)), torch.tensor(1.0), alpha=2),
    "half, rounded": lambda x: torch.div(x, 2, rounding_mode="floor") * (1 + torch.tanh(inside(x))),
    "product, rounded": lambda x: (
        x * 0.5 * (1 + torch.tanh(torch.div(inside(x) / 0.79788456, 1 / 0.79788456, rounding_mode="floor")))
    ),
    "eps thrice": lambda x: x * torch.rsqrt(torch.add(mean_square(x), 0.5, alpha=3)),
    "mean thrice": lambda x: (
        torch.sub(x, x.mean(-1, keepdim=True), alpha=3) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)
    ),
    "whole numbers": lambda x: x * torch.rsqrt(mean_square(x.to(torch.int64).float()) + 0.1),
}


@pytest.mark.parametrize("curve", CHANGED)
def test_what_changes_a_pattern_is_seen(curve: str) -> None:
    """Factors of sums, rounded quotients and casts to integers change the function: refused or raised correctly."""
    refused_or_right(CHANGED[curve])


class Xielu(nn.Module):
    """`curve` of x, alpha_p, alpha_n, beta and eps, with learned alphas."""

    def __init__(self, curve: Callable[..., Tensor]) -> None:
        super().__init__()
        self.curve = curve
        self.p, self.n = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.register_buffer("beta", torch.tensor(0.5))
        self.register_buffer("eps", torch.tensor(-1e-2))

    def forward(self, x: Tensor) -> Tensor:
        return self.curve(x, F.softplus(self.p), self.beta + F.softplus(self.n), self.beta, self.eps)


def below(x: Tensor, n: Tensor, e: Tensor) -> Tensor:
    return (torch.expm1(torch.min(x, e)) - x) * n


XIELUS: dict[str, Callable[..., Tensor]] = {
    "published": lambda x, p, n, b, e: torch.where(x > 0, p * x * x + b * x, below(x, n, e) + b * x),
    "other order": lambda x, p, n, b, e: torch.where(
        x > 0, x / 2 + x.square() * p, x * b + n * (torch.expm1(torch.minimum(e, x)) - x)
    ),
}


@pytest.mark.parametrize("style", XIELUS)
def test_an_xielu_that_is_written_out_is_one(style: str) -> None:
    module = modules.randomized(Bent(Xielu(XIELUS[style])))
    graph = raise_module(module)
    (ids, positions), node = inputs(), graph.calls("xielu")[0]
    scalars = [F.softplus(module.curve.p), 0.5 + F.softplus(module.curve.n), torch.tensor([0.5, -1e-2])]
    assert torch.equal(graph.evaluate(node.args[1]), torch.cat(scalars))
    assert used(graph) == Counter(embedding=1, xielu=1, linear=1)
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


NO_XIELUS: dict[str, Callable[..., Tensor]] = {
    "from 0": lambda x, p, n, b, e: torch.where(x >= 0, p * x * x + b * x, below(x, n, e) + b * x),
    "from above 0": lambda x, p, n, b, e: torch.where(x > 0.1, p * x * x + b * x, below(x, n, e) + b * x),
    "turned": lambda x, p, n, b, e: torch.where(x > 0, below(x, n, e) + b * x, p * x * x + b * x),
    "cube": lambda x, p, n, b, e: torch.where(x > 0, p * x * x * x + b * x, below(x, n, e) + b * x),
    "slopes": lambda x, p, n, b, e: torch.where(x > 0, p * x * x + b * x, below(x, n, e) + 0.4 * x),
    "slope twice": lambda x, p, n, b, e: torch.where(
        x > 0, torch.add(p * x * x, b * x, alpha=2), torch.add(below(x, n, e), b * x, alpha=2)
    ),
    "offset": lambda x, p, n, b, e: torch.where(x > 0, p * x * x + b, below(x, n, e) + b),
    "largest": lambda x, p, n, b, e: torch.where(
        x > 0, p * x * x + b * x, (torch.expm1(torch.max(x, e)) - x) * n + b * x
    ),
    "exponential": lambda x, p, n, b, e: torch.where(
        x > 0, p * x * x + b * x, (torch.exp(torch.min(x, e)) - x) * n + b * x
    ),
    "less twice": lambda x, p, n, b, e: torch.where(
        x > 0, p * x * x + b * x, torch.sub(torch.expm1(torch.min(x, e)), x, alpha=2) * n + b * x
    ),
    "of others": lambda x, p, n, b, e: torch.where(x.flip(-1) > 0, p * x * x + b * x, below(x, n, e) + b * x),
    "by channel": lambda x, p, n, b, e: torch.where(
        x > 0, p.expand(48).cumsum(0) * x * x + b * x, below(x, n, e) + b * x
    ),
}


@pytest.mark.parametrize("curve", NO_XIELUS)
def test_what_is_no_xielu_is_none(curve: str) -> None:
    with pytest.raises(UnsupportedError, match="has no counterpart in qcompile, and linear linear needs it"):
        raise_module(modules.randomized(Bent(Xielu(NO_XIELUS[curve]))))
