"""Variations of rotary embeddings and other uses of the position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.variations.decoder import HEADS, HIDDEN, LONGEST, SIZE, Part, Table

TABLE = Table()
add = TABLE.add


def halves(x: Tensor) -> Tensor:
    """x with its halves exchanged, one of them negated."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def pairs(x: Tensor) -> Tensor:
    """x with neighbours exchanged, one of them negated."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def angles(change: Part) -> Part:
    """Cos and sin of `change` of positions and frequencies."""

    def made(m: Any, p: Tensor) -> tuple[Tensor, Tensor]:
        angle = change(m, p.float()[:, None], m.frequencies())
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    return made


def partial(start: int, stop: int) -> Part:
    """Only features `start` to `stop` turn."""

    def turn(m: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        head, part, tail = x[..., :start], x[..., start:stop], x[..., stop:]
        cos, sin = (torch.cat([t[..., : (stop - start) // 2]] * 2, -1) for t in (cos, sin))
        return torch.cat((head, part * cos + halves(part) * sin, tail), -1)

    return turn


def mixed(of_q: Part | None, of_k: Part | None, of_v: Part | None = None) -> Part:
    """Each of q, k and v turned in its own way, or not."""

    def rope(m: Any, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        cos, sin = m.part("angles", p)
        return tuple(t if f is None else f(t, cos, sin) for t, f in ((q, of_q), (k, of_k), (v, of_v)))

    return rope


def usual(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + halves(x) * sin


def places(change: Part) -> Part:
    """Rotary embedding at changed positions."""
    return lambda m, q, k, v, p: m.rope(q, k, v, change(p))


def complex_turn(m: Any, x: Tensor, turn: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def complex_rope(change: Part) -> Part:
    def rope(m: Any, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        angle = p.float()[:, None] * m.frequencies()
        turn = change(torch.polar(torch.ones_like(angle), angle))
        return complex_turn(m, q, turn), complex_turn(m, k, turn), v

    return rope


add("agrees", "the usual turn")
add(
    "agrees",
    "positions given",
    takes=2,
    angles=lambda m, p: tuple(
        torch.cat([f(p.float()[..., None] * m.frequencies())] * 2, -1) for f in (torch.cos, torch.sin)
    ),
)
add("agrees", "no turn", rope=mixed(None, None))
add("agrees", "queries alone turn", rope=mixed(usual, None))
add("agrees", "keys alone turn", rope=mixed(None, usual))
add("agrees", "values turn as well", rope=mixed(usual, usual, usual))
add("agrees", "values alone turn", rope=mixed(None, None, usual))
add(
    "agrees", "keys turn twice as far", rope=lambda m, q, k, v, p: (m.rope(q, k, v, p)[0], m.rope(q, k, v, p * 2)[1], v)
)
add("agrees", "keys turn backwards", rope=lambda m, q, k, v, p: (m.rope(q, k, v, p)[0], m.rope(q, k, v, -p)[1], v))
add("refused", "turned twice", rope=lambda m, q, k, v, p: m.rope(*m.rope(q, k, v, p), p))
add(
    "agrees",
    "interleaved",
    turn=lambda m, x, cos, sin: (
        x * cos[..., : SIZE // 2].repeat_interleave(2, -1) + pairs(x) * sin[..., : SIZE // 2].repeat_interleave(2, -1)
    ),
)
add(
    "agrees",
    "queries interleaved, keys by halves",
    rope=mixed(
        lambda x, cos, sin: (
            x * cos[..., :4].repeat_interleave(2, -1) + pairs(x) * sin[..., :4].repeat_interleave(2, -1)
        ),
        usual,
    ),
)
add("refused", "pairs interleaved, frequencies by halves", turn=lambda m, x, cos, sin: x * cos + pairs(x) * sin)
add(
    "refused",
    "pairs by halves, frequencies interleaved",
    turn=lambda m, x, cos, sin: (
        x * cos[..., :4].repeat_interleave(2, -1) + halves(x) * sin[..., :4].repeat_interleave(2, -1)
    ),
)
add("refused", "cos and sin swapped", turn=lambda m, x, cos, sin: x * sin + halves(x) * cos)
add("agrees", "sin negated", turn=lambda m, x, cos, sin: x * cos - halves(x) * sin)
add("agrees", "cos negated", turn=lambda m, x, cos, sin: -x * cos + halves(x) * sin)
add("agrees", "both negated", turn=lambda m, x, cos, sin: -x * cos - halves(x) * sin)
add(
    "refused",
    "neither half negated",
    turn=lambda m, x, cos, sin: x * cos + torch.cat((x[..., 4:], x[..., :4]), -1) * sin,
)
add(
    "agrees",
    "the other half negated",
    turn=lambda m, x, cos, sin: x * cos + torch.cat((x[..., 4:], -x[..., :4]), -1) * sin,
)
add(
    "refused",
    "halves not exchanged",
    turn=lambda m, x, cos, sin: x * cos + torch.cat((-x[..., :4], x[..., 4:]), -1) * sin,
)
add("refused", "sin alone", turn=lambda m, x, cos, sin: x + halves(x) * sin)
add("refused", "cos alone", turn=lambda m, x, cos, sin: x * cos)
add("refused", "sin doubled", turn=lambda m, x, cos, sin: x * cos + halves(x) * sin * 2)
add("agrees", "all doubled", turn=lambda m, x, cos, sin: x * cos * 2 + halves(x) * sin * 2)
add(
    "agrees",
    "one half doubled",
    turn=lambda m, x, cos, sin: (x * cos + halves(x) * sin) * torch.tensor([2.0] * 4 + [1.0] * 4),
)
add("agrees", "the first 4 turn", turn=partial(0, 4))
add("agrees", "the last 4 turn", turn=partial(4, 8))
add("agrees", "the middle 4 turn", turn=partial(2, 6))
add(
    "refused",
    "the last 4 of keys, the first 4 of queries",
    rope=lambda m, q, k, v, p: (partial(0, 4)(m, q, *m.angles(p)), partial(4, 8)(m, k, *m.angles(p)), v),
)
add(
    "agrees",
    "partial and doubled",
    turn=lambda m, x, cos, sin: torch.cat((partial(0, 4)(m, x[..., :4], cos, sin) * 2, x[..., 4:]), -1),
)
add("agrees", "the first 2 turn", turn=partial(0, 2))
add(
    "refused",
    "frequencies of each head",
    angles=lambda m, p: tuple(
        torch.cat([f(p.float()[:, None] * m.frequencies() * torch.tensor([1.0, 0.5])[:, None, None])] * 2, -1)
        for f in (torch.cos, torch.sin)
    ),
    rope=lambda m, q, k, v, p: (q, m.turn(k, *m.part("angles", p)), v),
)
add(
    "refused",
    "a turning and a still head",
    rope=lambda m, q, k, v, p: (m.rope(q, k, v, p)[0], torch.cat((m.rope(q, k, v, p)[1][:, :1], k[:, 1:]), 1), v),
)
add("agrees", "positions doubled", rope=places(lambda p: p * 2))
add("agrees", "positions by 8", rope=places(lambda p: p / 8))
add("refused", "positions by 2, rounded down", rope=places(lambda p: p // 2))
add("refused", "positions modulo 8", rope=places(lambda p: p % 8))
add("refused", "positions limited to 9", rope=places(lambda p: p.clamp(max=9)))
add("refused", "positions from the end", rope=places(lambda p: p.flip(0)))
add("refused", "positions from the length down", rope=places(lambda p: p.shape[0] - 1 - p))
add("refused", "positions by the length", rope=places(lambda p: p * 10 / p.shape[0]))
add("refused", "positions from 1", rope=places(lambda p: p + 1))
add("agrees", "positions negated", rope=places(lambda p: -p))
add("refused", "positions squared", rope=places(lambda p: p * p))
add("refused", "positions in bfloat16", rope=places(lambda p: p.bfloat16().float()))
add("refused", "positions counted in float16", rope=places(lambda p: torch.arange(p.shape[0], dtype=torch.float16)))
add(
    "refused",
    "positions counted in bfloat16",
    rope=places(lambda p: torch.arange(p.shape[0], dtype=torch.bfloat16) + 0.0),
)
add("agrees", "positions counted in float64", rope=places(lambda p: torch.arange(p.shape[0], dtype=torch.float64)))
add("refused", "positions counted in steps of 2", rope=places(lambda p: torch.arange(0, 2 * p.shape[0], 2)))
add("refused", "positions counted by ones", rope=places(lambda p: torch.ones_like(p).cumsum(0) - 1))
add("refused", "positions as bytes", rope=places(lambda p: p.to(torch.uint8) * 30))
add("refused", "random positions", rope=places(lambda p: torch.rand(()) * p))
add("refused", "angles in bfloat16", angles=angles(lambda m, p, f: (p * f).bfloat16().float()))
add(
    "refused",
    "frequencies in bfloat16, times positions in bfloat16",
    angles=lambda m, p: tuple(
        torch.cat(
            [f(torch.arange(p.shape[0], dtype=torch.bfloat16)[:, None] * m.frequencies().bfloat16()).float()] * 2, -1
        )
        for f in (torch.cos, torch.sin)
    ),
)
add("agrees", "frequencies rounded to bfloat16", angles=angles(lambda m, p, f: p * f.bfloat16().float()))
add("refused", "cos and sin in bfloat16", angles=lambda m, p: tuple(t.bfloat16().float() for t in m.angles(p)))
add("refused", "angles of 2 pi less", angles=angles(lambda m, p, f: p * f % 6.28))
add("refused", "angles shifted", angles=angles(lambda m, p, f: p * f + 0.5))
add("agrees", "frequencies negated", angles=angles(lambda m, p, f: -p * f))
add("agrees", "frequencies of 0", angles=angles(lambda m, p, f: p * f * torch.tensor([1.0, 1, 0, 0])))
add("agrees", "frequencies all alike", angles=angles(lambda m, p, f: p * torch.full((SIZE // 2,), 0.3)))
add("agrees", "high frequencies", angles=angles(lambda m, p, f: p * f * 5.0))
add("agrees", "learned frequencies", angles=angles(lambda m, p, f: p * m.by_size[:4]))
add("refused", "frequencies of the tokens", rope=lambda m, q, k, v, p: (q * q.cos(), k, v))
add(
    "agrees",
    "tan of angles",
    rope=lambda m, q, k, v, p: (q, k, v),
    start=lambda m, i, p: m.embed(i) * (p * 0.01).tanh()[:, None],
)
add("agrees", "complex", rope=complex_rope(lambda t: t))
add("refused", "complex, backwards", rope=complex_rope(lambda t: t.conj()))
add("agrees", "complex, doubled", rope=complex_rope(lambda t: t * 2.0))
add("refused", "complex, times i", rope=complex_rope(lambda t: t * 1j))
add("refused", "complex, rounded", rope=complex_rope(lambda t: t.to(torch.complex32).to(torch.complex64)))
add(
    "refused",
    "complex, absolute",
    rope=lambda m, q, k, v, p: (torch.view_as_complex(q.unflatten(-1, (-1, 2))).abs().repeat(1, 1, 1, 2), k, v),
)

# ---- tables --------------------------------------------------------------------------------------------


def tabled(change: Part) -> Part:
    """Tables of cos and sin computed ahead for all positions, read by `change`."""

    def made(m: Any, p: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.outer(torch.arange(2.0 * LONGEST), m.frequencies())
        angle = torch.cat((angle, angle), -1)
        return tuple(change(t, p) for t in (angle.cos(), angle.sin()))  # type: ignore[return-value]

    return made


add("agrees", "table cut to the length", angles=tabled(lambda t, p: t[: p.shape[0]]))
add("agrees", "table read at positions", angles=tabled(lambda t, p: t[p]))
add("refused", "table read at positions plus 2", angles=tabled(lambda t, p: t[p + 2]))
add("refused", "table cut from 3 on", angles=tabled(lambda t, p: t[3 : p.shape[0] + 3]))
add("refused", "table read at twice the positions", angles=tabled(lambda t, p: t[p * 2]))
add("refused", "every other row of the table", angles=tabled(lambda t, p: t[: 2 * p.shape[0] : 2]))
add("refused", "table flipped", angles=tabled(lambda t, p: t[: p.shape[0]].flip(0)))
add("refused", "last rows of the table", angles=tabled(lambda t, p: t[-p.shape[0] :]))
add("refused", "table rolled", angles=tabled(lambda t, p: t[: p.shape[0]].roll(1, 0)))
add("refused", "table rounded to bfloat16", angles=tabled(lambda t, p: t.bfloat16().float()[: p.shape[0]]))
add("refused", "rows of the table rounded to bfloat16", angles=tabled(lambda t, p: t[: p.shape[0]].bfloat16().float()))
add(
    "refused",
    "table with noise",
    angles=tabled(lambda t, p: (t + 1e-4 * torch.linspace(-1, 1, 2 * LONGEST)[:, None])[: p.shape[0]]),
)
add("agrees", "learned positions", start=lambda m, i, p: m.embed(i) + m.learned(p))
add("agrees", "learned positions from 2 on", start=lambda m, i, p: m.embed(i) + m.learned(p + 2))
add("refused", "learned positions in reverse", start=lambda m, i, p: m.embed(i) + m.learned(p.flip(0)))
add("refused", "learned positions at twice the place", start=lambda m, i, p: m.embed(i) + m.learned(p * 2))
add("refused", "learned positions by token", start=lambda m, i, p: m.embed(i) + m.learned(i + p))
add("agrees", "learned positions of tokens", start=lambda m, i, p: m.embed(i) + m.learned(i) * m.learned(p))
add(
    "agrees",
    "learned positions given",
    takes=2,
    start=lambda m, i, p: m.embed(i) + m.learned(p)[:, 0],
    rope=mixed(None, None),
)
add(
    "agrees",
    "learned positions scaled and normed",
    start=lambda m, i, p: F.layer_norm(m.embed(i) * 3 + m.learned(p) * 0.5, (HIDDEN,)),
)
add("agrees", "learned positions subtracted", start=lambda m, i, p: m.embed(i) - m.learned.weight[: p.shape[0]])
add("agrees", "learned positions times tokens", start=lambda m, i, p: m.embed(i) * m.learned(p))
add(
    "agrees",
    "sines added",
    start=lambda m, i, p: (
        m.embed(i)
        + torch.cat(
            [f(torch.outer(torch.arange(128.0), 10.0 ** -torch.arange(16.0) * 2)) for f in (torch.sin, torch.cos)], -1
        )[p]
    ),
)
add(
    "refused",
    "sines added, computed on the fly",
    start=lambda m, i, p: (
        m.embed(i)
        + torch.cat([f(torch.outer(p.float(), 10.0 ** -torch.arange(16.0) * 2)) for f in (torch.sin, torch.cos)], -1)
    ),
)
add(
    "refused",
    "positions concatenated",
    start=lambda m, i, p: torch.cat((m.embed(i)[..., 1:], p[None, :, None].float().expand(i.shape[0], -1, -1)), -1),
)
add("refused", "positions added", start=lambda m, i, p: m.embed(i) + p[:, None])
add("refused", "positions multiplied", start=lambda m, i, p: m.embed(i) * (1 + p * 0.01)[:, None])
add(
    "agrees",
    "positions multiplied, by parity",
    start=lambda m, i, p: m.embed(i) * torch.where(p > 5, 1.0, 0.5)[:, None],
)
add(
    "refused",
    "multiplied by the place in the batch",
    start=lambda m, i, p: m.embed(i) * torch.arange(i.shape[0])[:, None, None],
)
add("refused", "multiplied by the length", start=lambda m, i, p: m.embed(i) * i.shape[1])
add("refused", "multiplied by the tokens", start=lambda m, i, p: m.embed(i) * i[..., None])
add("agrees", "one segment for all", start=lambda m, i, p: m.embed(i) + m.learned(torch.zeros((), dtype=torch.int64)))
add("refused", "segments of zeros like the tokens", start=lambda m, i, p: m.embed(i) + m.learned(torch.zeros_like(i)))
assert HEADS and nn
