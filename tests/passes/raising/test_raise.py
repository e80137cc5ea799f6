"""Raise: for every style of writing a decoder, the raised graph has our operators and the same logits."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable

import pytest
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
    ids = torch.randint(0, modules.VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(tokens).expand(batch, tokens)


def raise_module(module: nn.Module, takes: int = 1) -> Graph:
    graph = frontend.load(module, example_inputs=inputs()[:takes], max_position=LONGEST)
    return apply(Raise(), graph).graph


def used(graph: Graph) -> Counter[str]:
    return Counter(str(ops.name_of(node.target)) for node in graph.calls())


STYLES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (modules.Plain, 1),
    "plain, one kv head": (lambda: modules.Plain(kv_heads=1), 1),
    "plain, all kv heads": (lambda: modules.Plain(kv_heads=modules.HEADS), 1),
    "classic": (modules.Classic, 1),
    "modern": (modules.Modern, 2),
    "cached": (modules.Cached, 1),
    "cached, slow turns": (lambda: modules.Cached(size=64, base=1e6), 1),
    "modern, wide window": (lambda: modules.Modern(window=LONGEST), 2),
}


@pytest.mark.parametrize("style", STYLES)
def test_same_logits(style: str) -> None:
    build, takes = STYLES[style]
    module = modules.randomized(build())
    graph = raise_module(module, takes)
    exact_module = copy.deepcopy(module).double()
    for tokens in (1, 2, 9, 48):
        ids, positions = inputs(tokens=tokens)
        with torch.no_grad():
            expected = module(*(ids, positions)[:takes])
            exact = exact_module(*(ids, positions)[:takes])
        assert check.max_relative_error(graph.run(ids, positions), expected) < 3e-6
        assert check.max_relative_error(graph.run(ids, positions, dtype=torch.float64), exact) < 1e-6


def test_exported_program() -> None:
    module = modules.randomized(modules.Plain())
    sizes: dict[int, object] = {0: torch.export.Dim("b"), 1: torch.export.Dim("t", max=LONGEST)}
    if torch.__version__ < "2.13":  # which finds spurious guards on named sizes
        sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC(max=LONGEST)}
    program = torch.export.export(module, inputs()[:1], dynamic_shapes=(sizes,))
    ids, positions = inputs(3, 5)
    graph = frontend.load(program, max_position=LONGEST)
    for source in (graph, frontend.load(program.run_decompositions(), max_position=LONGEST)):
        raised = apply(Raise(), source).graph
        assert check.max_relative_error(raised.run(ids, positions), module(ids)) < 3e-6
    assert check.max_relative_error(graph.run(ids), module(ids)) < 3e-6


def test_operators_and_nothing_else() -> None:
    graph = raise_module(modules.randomized(modules.Plain(layers=1)))
    assert used(graph) == Counter(
        embedding=1, linear=8, rms_norm=3, split_heads=3, rope=2, attention=1, merge_heads=1, unary=1, mul=1, add=2
    )
    attention = graph.calls("attention")[0]
    assert [tuple(n.meta["val"].shape[2:]) for n in attention.args[:3]] == [(6, 8), (2, 8), (2, 8)]
    assert [node.target for node in graph.inputs] == ["token_ids", "positions"]
    assert not any(node.kwargs for node in graph.nodes)


def test_facts_of_attention() -> None:
    _, _, _, scale, window, softcap, sinks = (
        raise_module(modules.randomized(modules.Modern()), 2).calls("attention")[0].args
    )
    assert (scale, window, softcap, sinks) == (0.3, 5, 0.0, None)
    ropes = raise_module(modules.randomized(modules.Modern()), 2).calls("rope")
    assert all(node.args[4] is True and node.args[2].meta["val"].shape == (2,) for node in ropes)


def test_positions_decide_not_places() -> None:
    graph = raise_module(modules.randomized(modules.Classic()))
    ids, positions = inputs()
    table = graph.weights["places.weight"]
    graph.weights.add_tensor("places.weight", table.roll(3, 0))
    assert not torch.equal(graph.run(ids, positions), graph.run(ids, positions + 3))
    graph.weights.add_tensor("places.weight", table)
    moved = graph.run(ids, positions + 3)
    graph.weights.add_tensor("places.weight", table.roll(-3, 0))
    assert torch.equal(graph.run(ids, positions), moved)


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
    ],
)
def test_activations_of_one_operator(kind: str, curve: Curve) -> None:
    module = modules.randomized(Bent(curve))
    graph = raise_module(module)
    assert used(graph) == Counter(embedding=1, unary=1, linear=1) and graph.calls("unary")[0].args[1] == kind
    ids, positions = inputs()
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 1e-6


OTHERS: dict[str, Curve] = {
    "steeper mish": lambda x: x * torch.tanh(F.softplus(x, 2.0)),
    "mish that ends early": lambda x: x * torch.tanh(F.softplus(x, 1.0, 0.5)),
    "mish of others": lambda x: x * torch.tanh(F.softplus(x.flip(-1))),
    "deeper elu": lambda x: F.elu(x, 0.5),
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


# ---- refusals ------------------------------------------------------------------------------------------


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


def biased(ids: Tensor, bias: Tensor) -> Tensor:
    return torch.where(place(ids)[:, None] >= place(ids), bias, -torch.inf)


def rotated(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, angle: Callable[[Tensor], Tensor]) -> Tensor:
    turn = angle(place(ids).float())[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01], device=q.device)
    cos, sin = (f(torch.cat((turn, turn), -1)) for f in (torch.cos, torch.sin))
    q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def stored(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, spoil: float) -> Tensor:
    angle = torch.arange(LONGEST)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01, 1.0, 0.5, 0.1, 0.01])
    cos, sin = angle.cos()[: ids.shape[1]], (angle.sin() + spoil * angle.square().sin())[: ids.shape[1]]
    q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "not causal": (sdpa(), "attends to later tokens"),
    "mask off by one": (sdpa(attn_mask=lambda ids: place(ids)[:, None] + 1 >= place(ids)), "neither causal nor"),
    "mask of ids": (sdpa(attn_mask=lambda ids: ids[:, None, :, None] >= ids[:, None, None]), "from token ids"),
    "bias of distances that is not linear": (
        sdpa(attn_mask=lambda ids: biased(ids, -0.1 * (place(ids)[:, None] - place(ids)).abs().sqrt())),
        "bias to its scores that is no mask and depends on more than the key",
    ),
    "blocks": (
        sdpa(attn_mask=lambda ids: (place(ids)[:, None] // 4 == place(ids) // 4) & (place(ids)[:, None] >= place(ids))),
        "neither causal nor",
    ),
    "angle not linear": (lambda *a: rotated(*a, angle=lambda p: p * p), "no counterpart"),
    "angle of a root": (lambda *a: rotated(*a, angle=torch.sqrt), "sqrt"),
    "stored table that is no rotation": (lambda *a: stored(*a, spoil=1e-4), "mul has no counterpart"),
    "heads mixed up": (
        lambda q, k, v, ids: F.scaled_dot_product_attention(q, k.roll(1, 1), v, is_causal=True),
        "roll",
    ),
    "unknown operator": (lambda q, k, v, ids: sdpa(is_causal=True)(q.erfinv(), k, v, ids), "erfinv"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    attend, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        raise_module(modules.randomized(Attend(attend)))


def test_accepted_beside_the_refused() -> None:
    causal = sdpa(attn_mask=lambda ids: place(ids)[:, None] >= place(ids))
    for attend in (
        sdpa(is_causal=True),
        causal,
        sdpa(attn_mask=lambda ids: biased(ids, -0.1 * place(ids))),
        sdpa(attn_mask=lambda ids: biased(ids, torch.arange(1, 7)[:, None, None] * (0.1 * place(ids) - 0.7))),
        sdpa(attn_mask=lambda ids: biased(ids, -0.1 * (place(ids)[:, None] - place(ids)))),
        lambda *a: rotated(*a, angle=lambda p: 3 * p + p / 7),
        lambda *a: stored(*a, spoil=0.0),
    ):
        module = modules.randomized(Attend(attend))
        ids, positions = inputs()
        assert check.max_relative_error(raise_module(module).run(ids, positions), module(ids)) < 3e-6


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
    if unbiased:
        with pytest.raises(UnsupportedError, match="no counterpart"):
            raise_module(module)
        return
    graph = raise_module(module)
    assert len(graph.calls("layer_norm")) == 1
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 3e-6


def test_repeated_heads_in_the_wrong_order() -> None:
    """K tiled instead of repeated: query head h reads key head h % Hk, which our attention does not support."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k[:, :2].repeat(1, 3, 1, 1), v[:, :2].repeat(1, 3, 1, 1), is_causal=True
        )

    module = modules.randomized(Attend(attend))
    ids, positions = inputs()
    try:
        graph = raise_module(module)
    except UnsupportedError:
        return
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 3e-6


def test_fixed_sizes_are_refused() -> None:
    program = torch.export.export(modules.randomized(modules.Plain()), inputs()[:1])
    with pytest.raises(UnsupportedError, match="fixed sizes; export with dynamic"):
        apply(Raise(), frontend.load(program, max_position=LONGEST))


def test_positions_beyond_a_table() -> None:
    graph = frontend.load(modules.randomized(modules.Classic(longest=32)), example_inputs=inputs()[:1], max_position=32)
    raised = apply(Raise(), graph)
    assert raised.fired and check.sample(raised.graph, tokens=40).shape == (32, modules.VOCAB)
    sizes = {0: torch.export.Dim("b"), 1: torch.export.Dim("t", max=31)}
    program = torch.export.export(
        modules.randomized(modules.Classic(longest=32)), inputs()[:1], dynamic_shapes=(sizes,)
    )
    with pytest.raises(UnsupportedError, match="takes at most 31 tokens; give a max_position of at most 32"):
        apply(Raise(), frontend.load(program, max_position=40))
