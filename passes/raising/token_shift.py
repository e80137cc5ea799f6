"""Rules for tokens that read the token before them: all but the last tokens behind zeros, as pad writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import LENGTHS, Facts, Known
from qcompile.passes.raising.nodes import Arguments, is_call, strip
from qcompile.passes.raising.values import identity

TOKENS = 1
"""The dimension of tokens: of all that these rules take, the second."""


def padded(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """pad(x, (..., n, -n)) of x [B, T, ...]."""
    before, cut = _zeros_before(facts, node)
    return _shifted(facts, build, node, a.input_, before) if before and cut == before else None


def cut_padded(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """pad(x, (..., n, 0))[:, :T] of x [B, T, ...]."""
    given = _first_tokens(facts, node)
    before, cut = _zeros_before(facts, given) if is_call(given, "pad", "constant_pad_nd") else (0, 0)
    if not before or cut or facts.shape(node)[TOKENS] != LENGTHS["T"]:
        return None
    return _shifted(facts, build, node, Arguments(given).input_, before)


def _shifted(facts: Facts, build: Builder, node: fx.Node, source: fx.Node, n: int) -> Known:
    """Of `source` [B, T, ...], the token `n` before: a convolution that reads that one; None without features."""
    value = facts.value(source)
    if value is None or value.base is None or value.dims[:2] != ("B", "T") or set(value.dims[2:]) != {"F"}:
        return None
    flat = build.flat(build.emit(value, value.sizes, node))
    taps = torch.zeros(value.count, n + 1)
    taps[:, 0] = 1.0
    made = build.call("causal_conv", flat, build.constant("token_before", taps))
    return identity(build.shaped(made, value.sizes), value.dims, value.sizes)


def _zeros_before(facts: Facts, node: fx.Node) -> tuple[int, int]:
    """(tokens of zeros that a pad puts first, tokens that it cuts off at the end); (0, 0) for other pads."""
    given = Arguments(node)
    zeros = getattr(given, "mode", "constant") == "constant" and given.value in (None, 0)
    sizes = list(given.pad) if zeros and all(isinstance(size, int) for size in given.pad) else []
    whole = [0] * (2 * (len(facts.shape(node)) - TOKENS - 1))
    if len(sizes) < len(whole) + 2 or sizes[: len(whole)] != whole or any(sizes[len(whole) + 2 :]):
        return 0, 0
    before, after = sizes[len(whole) : len(whole) + 2]
    return (before, -after) if before > 0 and -after in (0, before) else (0, 0)


def _first_tokens(facts: Facts, item: Any) -> Any:
    """x for x[:, :m], with whole slices of other dimensions around it or inside; `item` itself if it is no slice."""
    cut = False
    while is_call(item := strip(item), "slice", "narrow"):
        given = Arguments(item)
        same = facts.shape(item) == facts.shape(given.input_)
        first = given.dim % len(facts.shape(item)) == TOKENS and given.start in (None, 0)
        if not same and (cut or not first or getattr(given, "step", 1) not in (None, 1)):
            return item
        cut, item = cut or not same, given.input_
    return item
