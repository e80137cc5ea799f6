"""Variations of what attention sees: masks, windows, biases by distance, and what is done to probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.support.variations.decoder import LONGEST, SIZE, Part, Table

TABLE = Table()
add = TABLE.add


def far(places: Tensor) -> Tensor:
    """How far each key is behind each query."""
    return places[:, None] - places


def masked(mask: Part, **more: Any) -> Part:
    """SDPA with `mask` of the distances."""
    return lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(m, p), **more)


def written(change: Part) -> Part:
    """Attention in matmuls: `change` makes the probabilities of the scores and the causal mask."""
    return lambda m, q, k, v, p: change(m, q @ k.transpose(-1, -2) * SIZE**-0.5, far(p) >= 0) @ v


def hidden(s: Tensor, seen: Tensor) -> Tensor:
    return s.masked_fill(~seen, float("-inf"))


def added(bias: Part) -> Part:
    """SDPA with a float mask: minus infinity where nothing is seen, else `bias` of the distances."""
    return masked(lambda m, p: bias(m, far(p).float()).masked_fill(far(p) < 0, float("-inf")))


# ---- masks ---------------------------------------------------------------------------------------------

add("agrees", "causal by a mask", attend=masked(lambda m, p: far(p) >= 0))
add("refused", "not causal", attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v))
add("refused", "prefix of 3 tokens seen by all", attend=masked(lambda m, p: (far(p) >= 0) | (p < 3)))
add("refused", "causal without the diagonal", attend=masked(lambda m, p: (far(p) > 0) | (p == 0)))
add("refused", "one token ahead", attend=masked(lambda m, p: far(p) >= -1))
add("refused", "anticausal", attend=masked(lambda m, p: far(p) <= 0))
add("refused", "blocks of 4", attend=masked(lambda m, p: (far(p) >= 0) & (p[:, None] // 4 == p // 4)))
add(
    "refused",
    "blocks of 4 and the one before",
    attend=masked(lambda m, p: (far(p) >= 0) & (p[:, None] // 4 - p // 4 <= 1)),
)
add("refused", "every second", attend=masked(lambda m, p: (far(p) >= 0) & (far(p) % 2 == 0)))
add("refused", "window and the first token", attend=masked(lambda m, p: (far(p) >= 0) & ((far(p) < 5) | (p == 0))))
add("agrees", "window of 1", attend=masked(lambda m, p: far(p) == 0))
add("agrees", "window of 5", attend=masked(lambda m, p: (far(p) >= 0) & (far(p) < 5)))
add("agrees", "window one longer", attend=masked(lambda m, p: (far(p) >= 0) & (far(p) <= 5)))
add("agrees", "window from a tensor", attend=masked(lambda m, p: (far(p) >= 0) & (far(p) < torch.full((1,), 7))))
add("agrees", "window of the context less one", attend=masked(lambda m, p: (far(p) >= 0) & (far(p) < LONGEST - 1)))
add(
    "refused",
    "window of each head",
    attend=masked(lambda m, p: (far(p) >= 0) & (far(p) < torch.tensor([3, 4, 5, 6])[:, None, None])),
)
add(
    "refused",
    "window of the last head",
    attend=masked(lambda m, p: (far(p) >= 0) & (far(p) < torch.tensor([64, 64, 64, 6])[:, None, None])),
)
add("refused", "window from the length", attend=masked(lambda m, p: (far(p) >= 0) & (far(p) * 2 <= p.shape[0])))
add("refused", "window wider later", attend=masked(lambda m, p: (far(p) >= 0) & (far(p) <= 4 + p[:, None] // 8)))
add(
    "agrees",
    "window in every second layer",
    layers=2,
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, k, v, attn_mask=(far(p) >= 0) & (far(p) < (4 if m.index else 64))
    ),
)
add("agrees", "added mask", attend=added(lambda m, d: d * 0))
add("agrees", "added mask of -1e4", attend=masked(lambda m, p: torch.where(far(p) < 0, -1e4, 0.0)))
add("refused", "added mask of -5", attend=masked(lambda m, p: torch.where(far(p) < 0, -5.0, 0.0)))
add(
    "refused",
    "added mask of +inf",
    attend=masked(lambda m, p: torch.where(far(p) < 0, -1e9, 1.0).masked_fill(far(p) == 3, float("inf"))),
)
add("agrees", "bias by head", attend=added(lambda m, d: d * 0 + torch.tensor([1.0, 2, 3, 4])[:, None, None]))
add("agrees", "ALiBi", attend=added(lambda m, d: -d * torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None]))
add(
    "agrees",
    "ALiBi of the wrong sign",
    attend=added(lambda m, d: d * torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None]),
)
add(
    "agrees",
    "ALiBi by keys",
    attend=masked(lambda m, p: (p * torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None]).masked_fill(far(p) < 0, -1e9)),
)
add("refused", "ALiBi with a square", attend=added(lambda m, d: -d * d * 0.01))
add("refused", "ALiBi with a root", attend=added(lambda m, d: -d.abs().sqrt()))
add(
    "refused",
    "ALiBi by the length",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(
        q, k, v, attn_mask=(p / p.shape[0]).masked_fill(far(p) < 0, -1e9)
    ),
)
add("refused", "ALiBi with a window", attend=added(lambda m, d: (-d).masked_fill(d > 4, -1e9)))
add("refused", "learned bias by distance", attend=added(lambda m, d: m.by_size[(d.abs().long()) % SIZE]))
add(
    "agrees",
    "mask from the positions given",
    takes=2,
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v, attn_mask=p[..., :, None] >= p[..., None, :]),
)
add(
    "refused",
    "mask by token ids",
    whole=lambda m, ids, p: m.end(
        m.layers[0].o(
            F.scaled_dot_product_attention(
                *(t[:, None] for t in [m.embed(ids)] * 3),
                attn_mask=((far(p) >= 0) & (ids != 3)[:, None] | (far(p) == 0))[:, None],
            )[:, 0]
        )
    ),
)
add(
    "refused",
    "mask of new memory",
    attend=masked(lambda m, p: (far(p) >= 0) & (torch.empty(p.shape[0], p.shape[0]) > 1e30).logical_not()),
)
add(
    "agrees",
    "mask written into new memory",
    attend=masked(lambda m, p: torch.empty(p.shape[0], p.shape[0]).fill_(float("-inf")).triu_(1)),
)
add(
    "refused",
    "scores changed by a function",
    attend=lambda m, q, k, v, p: flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))
    ),
)
add("refused", "mask after softmax", attend=written(lambda m, s, seen: s.softmax(-1) * seen))
add(
    "refused",
    "masked and renormalised",
    attend=written(lambda m, s, seen: (s.softmax(-1) * seen) / (s.softmax(-1) * seen).sum(-1, keepdim=True)),
)
add("agrees", "masked fill", attend=written(lambda m, s, seen: hidden(s, seen).softmax(-1)))
add("agrees", "where", attend=written(lambda m, s, seen: torch.where(seen, s, -1e9).softmax(-1)))
add("refused", "where the other way", attend=written(lambda m, s, seen: torch.where(seen, -1e9, s).softmax(-1)))
add("refused", "masked with 0", attend=written(lambda m, s, seen: s.masked_fill(~seen, 0.0).softmax(-1)))
add("refused", "multiplied by the mask", attend=written(lambda m, s, seen: (s * seen).softmax(-1)))
add(
    "agrees",
    "mask added and multiplied",
    attend=written(lambda m, s, seen: (s + (1.0 - seen.float()) * -1e9).softmax(-1)),
)
add("refused", "mask subtracted", attend=written(lambda m, s, seen: (s - seen.float() * -1e9).softmax(-1)))
add("refused", "softmax over heads", attend=written(lambda m, s, seen: (s * seen).softmax(1)))
add("refused", "softmax over queries", attend=written(lambda m, s, seen: hidden(s, seen).softmax(-2)))
add(
    "refused",
    "softmax in bfloat16",
    attend=written(lambda m, s, seen: hidden(s, seen).softmax(-1, dtype=torch.bfloat16).float()),
)
add(
    "agrees",
    "softmax in float64",
    attend=written(lambda m, s, seen: hidden(s, seen).softmax(-1, dtype=torch.float64).float()),
)
add("refused", "scores in bfloat16", attend=written(lambda m, s, seen: hidden(s.bfloat16().float(), seen).softmax(-1)))
add(
    "refused",
    "probabilities in bfloat16",
    attend=written(lambda m, s, seen: hidden(s, seen).softmax(-1).bfloat16().float()),
)
add(
    "refused",
    "probabilities in float8",
    attend=written(lambda m, s, seen: hidden(s, seen).softmax(-1).to(torch.float8_e4m3fn).float()),
)
add("refused", "sigmoid attention", attend=written(lambda m, s, seen: hidden(s, seen).sigmoid()))
add(
    "refused",
    "softmax + 1",
    attend=written(lambda m, s, seen: hidden(s, seen).exp() / (1 + hidden(s, seen).exp().sum(-1, keepdim=True))),
)
add("refused", "probabilities scaled", attend=written(lambda m, s, seen: hidden(s, seen).softmax(-1) * 2.0))
add("refused", "probabilities squared", attend=written(lambda m, s, seen: hidden(s, seen).softmax(-1).square()))
add("refused", "log softmax", attend=written(lambda m, s, seen: s.masked_fill(~seen, -1e9).log_softmax(-1)))
add(
    "refused",
    "sinks in the numerator",
    attend=lambda m, q, k, v, p: (
        torch.cat(
            (
                m.by_head[:, None, None].expand(q.shape[0], -1, q.shape[2], 1),
                hidden(q @ k.transpose(-1, -2), far(p) >= 0),
            ),
            -1,
        ).softmax(-1)
        @ torch.cat((v[:, :, :1] * 0 + 1, v), 2)
    ),
)
add(
    "refused",
    "sinks in the denominator",
    attend=lambda m, q, k, v, p: (
        torch.cat(
            (
                m.by_head[:, None, None].expand(q.shape[0], -1, q.shape[2], 1),
                hidden(q @ k.transpose(-1, -2), far(p) >= 0),
            ),
            -1,
        ).softmax(-1)[..., 1:]
        @ v
    ),
)
add(
    "refused",
    "random dropout of probabilities",
    attend=written(lambda m, s, seen: F.dropout(hidden(s, seen).softmax(-1), 0.2)),
)
add(
    "refused",
    "random dropout in SDPA",
    attend=lambda m, q, k, v, p: F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2),
)
add(
    "agrees",
    "dropout that is off",
    attend=written(lambda m, s, seen: F.dropout(hidden(s, seen).softmax(-1), 0.2, m.training)),
)
