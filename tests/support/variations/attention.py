"""Variations of attention: soft caps and scales of scores, heads, and what they read."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.variations.decoder import HEADS, HIDDEN, KV_HEADS, SIZE, Part, Table
from tests.support.variations.masks import far, hidden, written

TABLE = Table()
add = TABLE.add

# ---- scores --------------------------------------------------------------------------------------------


def capped(cap: float, inside: float, order: str) -> Part:
    def change(m: Any, s: Tensor, seen: Tensor) -> Tensor:
        s = hidden(s, seen) if order == "before" else s
        s = cap * torch.tanh(s / inside)
        return (hidden(s, seen) if order == "after" else s).softmax(-1)

    return written(change)


add("agrees", "cap, then mask", attend=capped(0.7, 0.7, "after"))
add("refused", "mask, then cap", attend=capped(0.7, 0.7, "before"))
add("agrees", "cap of another slope", attend=capped(0.7, 0.3, "after"))
add("agrees", "cap of a negative factor", attend=capped(-0.7, 0.7, "after"))
add("agrees", "cap turned twice", attend=capped(-0.7, -0.7, "after"))
add("agrees", "cap of a negative slope", attend=capped(0.7, -0.7, "after"))
add(
    "refused",
    "cap scaled again",
    attend=written(lambda m, s, seen: hidden(2.0 * (0.7 * torch.tanh(s / 0.7)), seen).softmax(-1)),
)
add(
    "refused",
    "cap of a cap",
    attend=written(lambda m, s, seen: hidden(0.7 * torch.tanh(torch.tanh(s * 3) / 0.7), seen).softmax(-1)),
)
add(
    "agrees",
    "scale of a tensor",
    attend=lambda m, q, k, v, p: (
        hidden(q @ k.transpose(-1, -2) / torch.full((1,), SIZE).sqrt(), far(p) >= 0).softmax(-1) @ v
    ),
)
add(
    "agrees",
    "scale twice",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q * SIZE**-0.5, k, v, is_causal=True),
)
add(
    "agrees",
    "scale of queries, keys and scores",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q * 0.5, k * -3, v * 2, is_causal=True, scale=0.3),
)
add("refused", "scale of 0", attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q * 0.0, k, v, is_causal=True))
add("refused", "scale of -1", attend=written(lambda m, s, seen: hidden(-s, seen).softmax(-1)))
add(
    "refused",
    "scale of each head",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q * m.by_head[:, None, None], k, v, is_causal=True),
)
add(
    "agrees",
    "scale of each layer",
    layers=2,
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / (1 + m.index)),
)
add(
    "agrees",
    "scale by position",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q * torch.log(p + 2.0)[:, None], k, v, is_causal=True),
)
add(
    "refused",
    "scale by length",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q * math.log(2.0) * torch.ones_like(p).sum().log(), k, v, is_causal=True
    ),
)
add(
    "agrees",
    "keys scaled by position",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k * torch.log(p + 2.0)[:, None], v, is_causal=True),
)
add(
    "agrees",
    "values scaled by position",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v * torch.log(p + 2.0)[:, None], is_causal=True),
)
add(
    "agrees",
    "weights of features of keys",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k * m.by_size, v, is_causal=True),
)
add(
    "agrees",
    "weights of features of queries and keys",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q * m.by_size, k * m.by_size, v * m.by_size, is_causal=True
    ),
)
add(
    "refused",
    "queries times keys, turned over",
    attend=lambda m, q, k, v, p: hidden((k @ q.transpose(-1, -2)).transpose(-1, -2), far(p) >= 0).softmax(-1) @ v,
)
add(
    "agrees",
    "keys in the place of queries",
    attend=lambda m, q, k, v, p: hidden(k @ q.transpose(-1, -2), far(p) >= 0).softmax(-1) @ v,
)
add(
    "refused",
    "values times probabilities",
    attend=lambda m, q, k, v, p: (
        v.transpose(-1, -2) @ hidden(q @ k.transpose(-1, -2), far(p) >= 0).softmax(-1).transpose(-1, -2)
    ).transpose(-1, -2),
)
add(
    "refused",
    "probabilities transposed",
    attend=lambda m, q, k, v, p: hidden(q @ k.transpose(-1, -2), far(p) >= 0).softmax(-1).transpose(-1, -2) @ v,
)
add("refused", "no softmax", attend=lambda m, q, k, v, p: (q @ k.transpose(-1, -2) * (far(p) >= 0)) @ v)
add(
    "refused",
    "cosine of queries and keys",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, is_causal=True
    ),
)
add(
    "refused",
    "difference of two attentions' probabilities",
    attend=written(lambda m, s, seen: hidden(s, seen).softmax(-1) - 0.3 * hidden(-s, seen).softmax(-1)),
)
add(
    "agrees",
    "difference of two attentions",
    attend=lambda m, q, k, v, p: (
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        - 0.3 * F.scaled_dot_product_attention(k, q, v, is_causal=True)
    ),
)
add(
    "refused",
    "talking heads",
    attend=written(
        lambda m, s, seen: torch.einsum("bhqk,hg->bgqk", hidden(s, seen).softmax(-1), m.by_head.outer(m.by_head))
    ),
)

# ---- heads ---------------------------------------------------------------------------------------------

add("agrees", "repeat in place of repeat_interleave", grouped=lambda m, k: k.repeat(1, HEADS // KV_HEADS, 1, 1))
add(
    "agrees",
    "keys repeated one way, values the other",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k[:, ::2].repeat(1, 2, 1, 1), v, is_causal=True),
)
add(
    "agrees",
    "enable_gqa",
    grouped=lambda m, k: k,
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
)
add("agrees", "one head of keys for all", grouped=lambda m, k: k[:, 1:].expand(-1, HEADS, -1, -1))
add(
    "agrees",
    "keys of one head, values of two",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, k[:, :1].expand(-1, HEADS, -1, -1), v, is_causal=True
    ),
)
add(
    "agrees",
    "heads of keys flipped",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, k.flip(1) if False else k[:, torch.tensor([3, 2, 1, 0])], v, is_causal=True
    ),
)
add(
    "agrees",
    "heads of queries permuted",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q[:, torch.tensor([2, 0, 3, 1])], k, v, is_causal=True),
)
add(
    "agrees",
    "groups uneven",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, k[:, torch.tensor([0, 2, 2, 2])], v[:, torch.tensor([0, 2, 2, 2])], is_causal=True
    ),
)
add(
    "agrees",
    "features interleaved across heads",
    heads=lambda m, x: (
        m.q(x).unflatten(-1, (SIZE, HEADS)).permute(0, 3, 1, 2),
        *(f(x).unflatten(-1, (SIZE, KV_HEADS)).permute(0, 3, 1, 2) for f in (m.k, m.v)),
    ),
)
add("agrees", "merged by features", merge=lambda m, y: y.permute(0, 2, 3, 1).flatten(2))
add("agrees", "keys are values", attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, k, is_causal=True))
add("agrees", "values are keys", attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, v, v, is_causal=True))
add("agrees", "queries are keys", attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, q, v, is_causal=True))
add(
    "agrees",
    "values shorter",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v[..., :6], is_causal=True).repeat(1, 1, 1, 2)[
        ..., :8
    ],
)
add(
    "refused",
    "keys shorter",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q[..., :6], k[..., 2:], v, is_causal=True),
)
add(
    "agrees",
    "values reversed",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v[..., torch.arange(7, -1, -1)], is_causal=True),
)
add(
    "agrees",
    "keys reversed",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k[..., torch.arange(7, -1, -1)], v, is_causal=True),
)
add(
    "agrees",
    "every second feature of values",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, k, torch.cat((v[..., ::2], v[..., 1::2]), -1), is_causal=True
    ),
)
add(
    "refused",
    "attention over heads",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
    ).transpose(1, 2),
)
add(
    "refused",
    "attention over the batch",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        *(t.transpose(0, 2) for t in (q, k, v)), is_causal=True
    ).transpose(0, 2),
)
add(
    "refused",
    "keys of the token before",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k.roll(1, 2), v, is_causal=True),
)
add(
    "refused",
    "keys of the next in the batch",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k.roll(1, 0), v, is_causal=True),
)
add(
    "refused",
    "a key of zeros before all",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, *(F.pad(t, (0, 0, 1, 0)) for t in (k, v)), attn_mask=F.pad(far(p) >= 0, (1, 0), value=True)
    ),
)
add(
    "agrees",
    "no dimension of heads",
    mix=lambda m, x, p: m.o(
        F.scaled_dot_product_attention(
            *(t[:, None] for t in (m.q(x), m.q(x) * 0.5, m.gate(x)[..., : HEADS * SIZE])), is_causal=True
        )[:, 0]
    ),
)
add(
    "refused",
    "three dimensions",
    mix=lambda m, x, p: m.o(F.scaled_dot_product_attention(m.q(x), m.q(x) * 0.5, m.gate(x)[..., :32], is_causal=True)),
)
add(
    "agrees",
    "each head with the other's keys twice",
    attend=lambda m, q, k, v, p: sum(
        F.scaled_dot_product_attention(q, t, v, is_causal=True) for t in (k, k[:, torch.tensor([2, 3, 0, 1])])
    ),
)
add(
    "agrees",
    "attention of attention",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v, is_causal=True
    ),
)
add(
    "agrees",
    "gate behind attention",
    merge=lambda m, y: y.transpose(1, 2).flatten(2) * torch.sigmoid(y.transpose(1, 2).flatten(2)),
)
add(
    "agrees",
    "norm of queries and keys",
    heads=lambda m, x: (
        *(F.rms_norm(f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2), (SIZE,), m.by_size, 1e-6) for f in (m.q, m.k)),
        m.v(x).unflatten(-1, (-1, SIZE)).transpose(1, 2),
    ),
)
add(
    "agrees",
    "norm of values",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, k, F.rms_norm(v, (SIZE,), m.by_size), is_causal=True
    ),
)
add(
    "agrees",
    "layer norm of outputs",
    attend=lambda m, q, k, v, p: F.layer_norm(
        F.scaled_dot_product_attention(q, k, v, is_causal=True), (SIZE,), m.by_size
    ),
)
add(
    "refused",
    "norm of keys over tokens",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, F.layer_norm(k.transpose(-1, -2), (k.shape[2],)).transpose(-1, -2), v, is_causal=True
    ),
)
add(
    "refused",
    "norm of keys over heads",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, F.layer_norm(k.transpose(1, -1), (HEADS,)).transpose(1, -1), v, is_causal=True
    ),
)
add("agrees", "keys and values of the first layer in both", layers=3, through=lambda m, x, p: shared(m, x, p, 0))
add("agrees", "keys and values of the input in both", layers=3, through=lambda m, x, p: shared(m, x, p, None))


def shared(m: Any, x: Tensor, places: Tensor, layer: int | None) -> Tensor:
    """All layers attend to the keys and values of one."""
    start, first = x, m.layers[0]
    kept: list[Tensor] = []
    for block in m.layers:
        q, k, v = block.heads(block.norm(x, block.first))
        if layer is None:
            _, k, v = first.heads(start)
        q, k, v = block.rope(q, k, v, places)
        kept = kept or [block.grouped(k), block.grouped(v)]
        x = x + block.o(block.merge(block.attend(q, *kept, places)))
        x = x + block.mlp(block.norm(x, block.second))
    assert x.shape[-1] == HIDDEN
    return x
