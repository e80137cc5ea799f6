"""Variations of mixtures of experts: routers, choices, weights, and what is done with results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.variations.decoder import HIDDEN, Part, Table

TABLE = Table()
COUNT, INNER = 6, 12


def prepared(m: Any) -> None:
    """Give each layer's MLP a router, and experts of two linears with a gate between."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(size, generator=generator) * size[-1] ** -0.5)

    for layer in m.layers:
        layer.router, layer.bias = drawn(COUNT, HIDDEN), drawn(COUNT)
        layer.both, layer.back = drawn(COUNT, 2 * INNER, HIDDEN), drawn(COUNT, HIDDEN, INNER)
        layer.by_expert, layer.added = drawn(COUNT), drawn(COUNT, 2 * INNER)


def add(right: str, name: str, mlp: Part) -> None:
    TABLE.add(right, name, mlp=lambda m, x: mlp(m, x.flatten(0, 1)).view(x.shape), prepare=prepared)


def run(m: Any, x: Tensor, index: Tensor, slots: int = 2) -> Tensor:
    """The chosen experts' outputs, one row for each pair of token and slot."""
    gate, up = _first(m, x, index.reshape(-1), slots).chunk(2, -1)
    return torch.bmm(m.back[index.reshape(-1)], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)


def _first(m: Any, x: Tensor, chosen: Tensor, slots: int = 2) -> Tensor:
    return torch.bmm(m.both[chosen], x.repeat_interleave(slots, 0).unsqueeze(-1)).squeeze(-1)


def mixed(m: Any, x: Tensor, factor: Tensor, index: Tensor) -> Tensor:
    slots = index.shape[-1]
    y = run(m, x, index, slots) * factor.reshape(-1)[:, None]
    return y.view(-1, slots, HIDDEN).sum(1)


def scores(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.router)


def routed(change: Part, k: int = 2) -> Part:
    """The best `k` of the scores that `change` makes, weighted by them."""
    return lambda m, x: mixed(m, x, *change(m, scores(m, x)).topk(k, -1))


def weighed(change: Part, k: int = 2) -> Part:
    """The best `k` by softmax, with weights changed behind the choice."""

    def mlp(m: Any, x: Tensor) -> Tensor:
        factor, index = scores(m, x).softmax(-1).topk(k, -1)
        return mixed(m, x, change(m, factor), index)

    return mlp


def gathered(of: Part, by: Part, k: int = 2) -> Part:
    """The best `k` by one function of the scores, weighted by another."""

    def mlp(m: Any, x: Tensor) -> Tensor:
        s = scores(m, x)
        index = by(m, s).topk(k, -1)[1]
        return mixed(m, x, of(m, s).gather(-1, index), index)

    return mlp


# ---- routers -------------------------------------------------------------------------------------------

add("agrees", "softmax, then the best", routed(lambda m, s: s.softmax(-1)))
add("agrees", "the best, then softmax", lambda m, x: mixed(m, x, *_softened(scores(m, x).topk(2, -1))))
add("refused", "softmax in bfloat16", routed(lambda m, s: s.softmax(-1, dtype=torch.bfloat16).float()))
add("refused", "softmax in bfloat16, not cast back", routed(lambda m, s: s.softmax(-1, dtype=torch.bfloat16)))
add("refused", "softmax of rounded scores", routed(lambda m, s: s.bfloat16().softmax(-1).float()))
add("agrees", "softmax in float64", routed(lambda m, s: s.softmax(-1, dtype=torch.float64).float()))
add("refused", "softmax over tokens", routed(lambda m, s: s.softmax(0)))
add("agrees", "softmax of sharper scores", routed(lambda m, s: (s * 3).softmax(-1)))
add("agrees", "softmax of negated scores", routed(lambda m, s: (-s).softmax(-1)))
add("refused", "softmax less 1", routed(lambda m, s: 1 - s.softmax(-1)))
add("agrees", "sigmoid", routed(lambda m, s: s.sigmoid()))
add("agrees", "no function", routed(lambda m, s: s))
add("agrees", "softmax of the sigmoid", routed(lambda m, s: s.sigmoid().softmax(-1)))
add("agrees", "tanh", routed(lambda m, s: torch.tanh(s)))
add("refused", "square root of softplus", routed(lambda m, s: F.softplus(s).sqrt()))
add("refused", "noise on scores", routed(lambda m, s: (s + torch.randn_like(s)).softmax(-1)))
add("refused", "one noise for all", routed(lambda m, s: (s + torch.rand(COUNT)).softmax(-1)))
add("refused", "gumbel", routed(lambda m, s: F.gumbel_softmax(s, dim=-1)))
add("agrees", "scores with a bias", routed(lambda m, s: (s + m.by_expert).softmax(-1)))
add("agrees", "scores behind softmax with a bias", routed(lambda m, s: s.softmax(-1) + m.by_expert))
add("agrees", "scores times a factor each", routed(lambda m, s: s.softmax(-1) * m.by_expert.abs()))
add(
    "agrees",
    "chosen with a bias, weighted without",
    gathered(lambda m, s: s.sigmoid(), lambda m, s: s.sigmoid() + m.by_expert),
)
add(
    "agrees",
    "chosen without, weighted with",
    gathered(lambda m, s: s.sigmoid() + m.by_expert, lambda m, s: s.sigmoid()),
)
add("agrees", "chosen by another function", gathered(lambda m, s: s.softmax(-1), lambda m, s: -s))
add("refused", "chosen in bfloat16", gathered(lambda m, s: s.softmax(-1), lambda m, s: s.bfloat16()))
add("refused", "the worst", lambda m, x: mixed(m, x, *scores(m, x).topk(2, -1, largest=False)))
add("agrees", "unsorted", lambda m, x: mixed(m, x, *scores(m, x).topk(2, -1, sorted=False)))
add("agrees", "all of them", routed(lambda m, s: s.softmax(-1), COUNT))
add(
    "refused",
    "the best by sort",
    lambda m, x: mixed(m, x, *(t[..., :2] for t in scores(m, x).sort(-1, descending=True))),
)
add(
    "refused",
    "the best tokens of each expert",
    lambda m, x: mixed(m, x, scores(m, x).softmax(0)[:, :2], scores(m, x).argsort(0)[:, :2] % COUNT),
)
add(
    "refused",
    "experts by token number",
    lambda m, x: mixed(
        m, x, scores(m, x)[:, :2], torch.arange(x.shape[0])[:, None] % COUNT + torch.zeros(1, 2, dtype=torch.int64)
    ),
)
add("agrees", "the best of half of the experts", lambda m, x: mixed(m, x, *scores(m, x)[:, :3].topk(2, -1)))
add("refused", "the best of the other half", lambda m, x: mixed(m, x, *_shifted(scores(m, x)[:, 3:].topk(2, -1), 3)))
add("agrees", "the best of experts in another order", routed(lambda m, s: s[:, torch.arange(COUNT - 1, -1, -1)]))
add("refused", "each choice's neighbour", lambda m, x: mixed(m, x, *_shifted(scores(m, x)[:, :5].topk(2, -1), 1)))
add(
    "refused",
    "choices swapped",
    lambda m, x: mixed(m, x, *(t if t.is_floating_point() else t.flip(-1) for t in scores(m, x).topk(2, -1))),
)
add("refused", "weights swapped", weighed(lambda m, w: w.flip(-1)))
add("agrees", "weights swapped by number", weighed(lambda m, w: w[:, torch.tensor([1, 0])]))
add("agrees", "weights rolled by concatenation", weighed(lambda m, w: torch.cat((w[:, 1:], w[:, :1]), -1)))
add("refused", "weights of the token before", weighed(lambda m, w: w.roll(1, 0)))


def _softened(best: Any) -> tuple[Tensor, Tensor]:
    return best[0].softmax(-1), best[1]


def _shifted(best: Any, by: int) -> tuple[Tensor, Tensor]:
    return best[0], best[1] + by


# ---- weights ---------------------------------------------------------------------------------------------

add("agrees", "divided by their sum", weighed(lambda m, w: w / w.sum(-1, keepdim=True)))
add("agrees", "divided in place", weighed(lambda m, w: w.div_(w.sum(-1, keepdim=True))))
add("agrees", "divided by their sum and eps", weighed(lambda m, w: w / (w.sum(-1, keepdim=True) + 0.1)))
add("agrees", "divided by a clamped sum", weighed(lambda m, w: w / w.sum(-1, keepdim=True).clamp_min(0.5)))
add("refused", "divided by a sum clamped above", weighed(lambda m, w: w / w.sum(-1, keepdim=True).clamp(max=0.5)))
add("refused", "divided by the sum over tokens", weighed(lambda m, w: w / w.sum(0, keepdim=True)))
add("refused", "divided by the sum of squares", weighed(lambda m, w: w / w.square().sum(-1, keepdim=True)))
add("refused", "divided by the mean", weighed(lambda m, w: w / w.mean(-1, keepdim=True)))
add("refused", "divided by the largest", weighed(lambda m, w: w / w.amax(-1, keepdim=True)))
add("refused", "divided by a sum in bfloat16", weighed(lambda m, w: w / w.sum(-1, keepdim=True, dtype=torch.bfloat16)))
add("refused", "divided by another's sum", weighed(lambda m, w: w / (w * 2).relu().sum(-1, keepdim=True)))
add(
    "refused",
    "divided by the sum of all",
    lambda m, x: mixed(
        m,
        x,
        scores(m, x).sigmoid().topk(2, -1)[0] / scores(m, x).sigmoid().sum(-1, keepdim=True),
        scores(m, x).topk(2, -1)[1],
    ),
)
add("agrees", "scaled", weighed(lambda m, w: w * 2.5))
add("refused", "scaled, then divided", weighed(lambda m, w: w * 2.5 / (w * 2.5).sum(-1, keepdim=True)))
add("agrees", "divided, then scaled", weighed(lambda m, w: w / w.sum(-1, keepdim=True) * 2.5))
add("agrees", "divided twice", weighed(lambda m, w: _divided(_divided(w))))
add("agrees", "negated", weighed(lambda m, w: -w))
add("agrees", "of ones", weighed(lambda m, w: w * 0 + 1))
add("refused", "rounded", weighed(lambda m, w: w.bfloat16().float()))
add("refused", "rounded with float16", weighed(lambda m, w: w.half()))
add("refused", "rounded to float8", weighed(lambda m, w: w.to(torch.float8_e4m3fn).float()))
add("refused", "to whole numbers", weighed(lambda m, w: (w * 8).to(torch.int32).float()))
add("agrees", "softmax of weights", weighed(lambda m, w: w.softmax(-1)))
add("agrees", "sigmoid of weights", weighed(lambda m, w: w.sigmoid()))
add("refused", "softmax of weights over tokens", weighed(lambda m, w: w.softmax(0)))
add("agrees", "the first alone weighted", weighed(lambda m, w: w * torch.tensor([1.0, 0.0])))
add("agrees", "a factor of each slot", weighed(lambda m, w: w * torch.tensor([1.0, -2.0])))
add("refused", "a threshold", weighed(lambda m, w: w * (w > 0.2)))
add("refused", "hidden below a threshold", weighed(lambda m, w: w.masked_fill(w < 0.2, 0.0)))
add("refused", "random dropout", weighed(lambda m, w: F.dropout(w, 0.5)))
add(
    "refused",
    "weights by expert",
    lambda m, x: mixed(m, x, m.by_expert[scores(m, x).topk(2, -1)[1]], scores(m, x).topk(2, -1)[1]),
)


def _divided(w: Tensor) -> Tensor:
    return w / (w.sum(-1, keepdim=True) + 0.1)


# ---- experts ---------------------------------------------------------------------------------------------


def chosen(change: Part) -> Part:
    """`change` of the module, inputs, weights and choice of two experts."""
    return lambda m, x: change(m, x, *scores(m, x).softmax(-1).topk(2, -1))


def summed(y: Tensor, w: Tensor) -> Tensor:
    return (y * w.reshape(-1)[:, None]).view(-1, 2, HIDDEN).sum(1)


add("agrees", "outputs doubled", chosen(lambda m, x, w, i: summed(run(m, x, i) * 2, w)))
add("agrees", "sum doubled", chosen(lambda m, x, w, i: summed(run(m, x, i), w) * 2))
add(
    "refused",
    "mean of slots",
    chosen(lambda m, x, w, i: (run(m, x, i) * w.reshape(-1)[:, None]).view(-1, 2, HIDDEN).mean(1)),
)
add("refused", "largest of slots", chosen(lambda m, x, w, i: run(m, x, i).view(-1, 2, HIDDEN).amax(1)))
add("refused", "product of slots", chosen(lambda m, x, w, i: run(m, x, i).view(-1, 2, HIDDEN).prod(1)))
add(
    "refused",
    "slots and features exchanged",
    chosen(lambda m, x, w, i: summed(run(m, x, i), w) * 0 + run(m, x, i).view(-1, HIDDEN, 2).sum(2)),
)
add(
    "agrees",
    "the first slot less the second",
    chosen(lambda m, x, w, i: (lambda y: y[:, 0] - y[:, 1])(run(m, x, i).view(-1, 2, HIDDEN))),
)
add("agrees", "no weights", chosen(lambda m, x, w, i: run(m, x, i).view(-1, 2, HIDDEN).sum(1)))
add(
    "agrees",
    "weights of inputs",
    chosen(
        lambda m, x, w, i: (
            torch.bmm(
                m.back[i.reshape(-1)], (x.repeat_interleave(2, 0)[:, :INNER] * w.reshape(-1)[:, None]).unsqueeze(-1)
            )
            .squeeze(-1)
            .view(-1, 2, HIDDEN)
            .sum(1)
        )
    ),
)
add(
    "refused",
    "inputs tiled, not interleaved",
    chosen(
        lambda m, x, w, i: summed(
            torch.bmm(m.back[i.reshape(-1)], x[:, :INNER].repeat(2, 1).unsqueeze(-1)).squeeze(-1), w
        )
    ),
)
add(
    "refused",
    "choices by slot first",
    chosen(
        lambda m, x, w, i: summed(
            torch.bmm(m.back[i.t().reshape(-1)], x[:, :INNER].repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1), w
        )
    ),
)
add(
    "refused",
    "weights by slot first",
    chosen(lambda m, x, w, i: (run(m, x, i) * w.t().reshape(-1)[:, None]).view(-1, 2, HIDDEN).sum(1)),
)
add(
    "agrees",
    "weights of experts scaled",
    chosen(
        lambda m, x, w, i: summed(
            torch.bmm((m.back * 2)[i.reshape(-1)], x[:, :INNER].repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1), w
        )
    ),
)
add(
    "agrees",
    "weights of experts flipped",
    chosen(
        lambda m, x, w, i: summed(
            torch.bmm(m.back.flip(0)[i.reshape(-1)], x[:, :INNER].repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1), w
        )
    ),
)
add(
    "refused",
    "chosen weights scaled",
    chosen(
        lambda m, x, w, i: summed(
            torch.bmm(m.back[i.reshape(-1)] * 2, x[:, :INNER].repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1), w
        )
    ),
)
add(
    "refused",
    "chosen weights flipped",
    chosen(
        lambda m, x, w, i: summed(
            torch.bmm(m.back[i.reshape(-1)].flip(1), x[:, :INNER].repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1), w
        )
    ),
)
add(
    "refused",
    "chosen weights of all tokens",
    chosen(
        lambda m, x, w, i: summed(
            torch.bmm(m.back[i.flip(0).reshape(-1)], x[:, :INNER].repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1), w
        )
    ),
)


def after(change: Part) -> Part:
    """What `change` makes of the first linear's outputs and the pairs' experts, through the second."""

    def mlp(m: Any, x: Tensor) -> Tensor:
        w, i = scores(m, x).softmax(-1).topk(2, -1)
        y = change(m, _first(m, x, i.reshape(-1)), i)
        return summed(torch.bmm(m.back[i.reshape(-1)], y.unsqueeze(-1)).squeeze(-1), w)

    return mlp


def gated(y: Tensor, a: slice, b: slice) -> Tensor:
    return F.silu(y[:, a]) * y[:, b]


FIRST, SECOND = slice(INNER), slice(INNER, None)
add("agrees", "biases", after(lambda m, y, i: gated(y + m.added[i.reshape(-1)], FIRST, SECOND)))
add("refused", "biases halved", after(lambda m, y, i: gated(y + m.added[i.reshape(-1)] * 0.5, FIRST, SECOND)))
add(
    "refused",
    "biases doubled by alpha",
    after(lambda m, y, i: gated(torch.add(y, m.added[i.reshape(-1)], alpha=2), FIRST, SECOND)),
)
add("refused", "biases subtracted", after(lambda m, y, i: gated(y - m.added[i.reshape(-1)], FIRST, SECOND)))
add(
    "refused",
    "biases of the other slot",
    after(lambda m, y, i: gated(y + m.added[i.flip(-1).reshape(-1)], FIRST, SECOND)),
)
add("refused", "biases of doubled outputs", after(lambda m, y, i: gated(y * 2 + m.added[i.reshape(-1)], FIRST, SECOND)))
add("refused", "biases of part", after(lambda m, y, i: F.silu(y[:, :INNER] + m.added[i.reshape(-1)][:, :INNER])))
add(
    "refused",
    "biases twice",
    after(lambda m, y, i: gated(y + m.added[i.reshape(-1)] + m.added[i.reshape(-1)], FIRST, SECOND)),
)
add("agrees", "gates and ups exchanged", after(lambda m, y, i: gated(y, SECOND, FIRST)))
add("agrees", "gates and ups interleaved", after(lambda m, y, i: gated(y, slice(0, None, 2), slice(1, None, 2))))
add("agrees", "gates and ups overlapping", after(lambda m, y, i: gated(y, FIRST, slice(6, 6 + INNER))))
add(
    "agrees",
    "gates and ups reversed",
    after(lambda m, y, i: gated(y[:, torch.arange(2 * INNER - 1, -1, -1)], FIRST, SECOND)),
)
add("agrees", "gates and ups the same", after(lambda m, y, i: gated(y, FIRST, FIRST)))
add(
    "agrees",
    "gates clamped",
    after(lambda m, y, i: F.silu(y[:, FIRST].clamp(max=0.3)) * (y[:, SECOND].clamp(-0.3, 0.3) + 1)),
)
add(
    "agrees",
    "gates clamped otherwise",
    after(lambda m, y, i: F.silu(y[:, FIRST].clamp(-0.1, 0.3)) * (y[:, SECOND].clamp(-0.2, 0.3) - 1)),
)
add("agrees", "ups clamped alone", after(lambda m, y, i: F.silu(y[:, FIRST]) * y[:, SECOND].clamp(-0.3, 0.3)))
add(
    "agrees",
    "both clamped above",
    after(lambda m, y, i: F.silu(y[:, FIRST].clamp(max=0.3)) * y[:, SECOND].clamp(max=0.3)),
)
add(
    "agrees",
    "clamped to a negative limit",
    after(lambda m, y, i: F.silu(y[:, FIRST].clamp(max=-0.3)) * (y[:, SECOND].clamp(0.3, -0.3) + 1)),
)
add("agrees", "up of another choice", lambda m, x: other(m, x))
add("agrees", "norm of outputs", chosen(lambda m, x, w, i: summed(F.rms_norm(run(m, x, i), (HIDDEN,), m.first), w)))
add("agrees", "shared expert", chosen(lambda m, x, w, i: summed(run(m, x, i), w) + m.down(F.silu(m.gate(x)) * m.up(x))))
add(
    "agrees",
    "shared expert with a gate",
    chosen(
        lambda m, x, w, i: (
            summed(run(m, x, i), w) + torch.sigmoid(F.linear(x, m.first[None])) * m.down(F.silu(m.gate(x)) * m.up(x))
        )
    ),
)
add(
    "agrees",
    "shared expert times the first weight",
    chosen(lambda m, x, w, i: summed(run(m, x, i), w) + w[:, :1] * m.down(F.silu(m.gate(x)) * m.up(x))),
)
add(
    "refused",
    "shared expert times the sum of weights",
    chosen(lambda m, x, w, i: summed(run(m, x, i), w) + w.sum(-1, keepdim=True) * m.down(F.silu(m.gate(x)) * m.up(x))),
)
add("agrees", "experts twice", chosen(lambda m, x, w, i: summed(run(m, summed(run(m, x, i), w), i), w)))
add(
    "refused",
    "all experts weighted",
    lambda m, x: torch.einsum("te,eok,tk->to", scores(m, x).softmax(-1), m.back, x[:, :INNER]),
)
add(
    "refused",
    "experts one by one",
    chosen(
        lambda m, x, w, i: sum(
            (w * (i == e)).sum(-1, keepdim=True) * F.linear(x[:, :INNER], m.back[e]) for e in range(COUNT)
        )
    ),
)
add(
    "refused",
    "experts with a capacity",
    chosen(lambda m, x, w, i: summed(run(m, x, i), w * ((i == 0).long().cumsum(0) < 5))),
)


def other(m: Any, x: Tensor) -> Tensor:
    """Gates of the best experts, ups of the worst."""
    w, i = scores(m, x).topk(2, -1)
    worst = (-scores(m, x)).topk(2, -1)[1]
    y = F.silu(_first(m, x, i.reshape(-1))[:, FIRST]) * _first(m, x, worst.reshape(-1))[:, SECOND]
    return summed(torch.bmm(m.back[i.reshape(-1)], y.unsqueeze(-1)).squeeze(-1), w)
