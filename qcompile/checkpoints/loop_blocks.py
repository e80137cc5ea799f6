"""Loops over blocks of tokens, such as those of lightning attention: a recurrence, if blocks of any size agree with it.

A loop over blocks of at most `size` tokens is recorded as one over tokens, with blocks of one token. That shows which
recurrence it may be. Whether longer blocks compute the same depends on tables of decays among the weights, so the trace
gets a proof: the loop's own code on random inputs over several blocks, and the recurrence on the same inputs. It is
computed when the weights are loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from qcompile.checkpoints.loop_body import Body, Ref
from qcompile.checkpoints.loop_numbers import sized

MOST = 1 << 14
"""Tokens of a block at most."""
SEQUENCES = 2
"""Sequences of a proof: more than one, so that code that mixes sequences shows."""


def block_size(count: Any, tokens: Any) -> int | None:
    """The number of tokens of the blocks of which `count` is the number, for any number `tokens`.

    None if `count` is another number, or that of blocks of one token.
    """
    if not isinstance(count, torch.SymInt) or not isinstance(tokens, torch.SymInt):
        return None
    expression, symbol = count.node.expr, tokens.node.expr
    if expression.free_symbols != {symbol}:
        return None

    def blocks(length: int) -> int:
        return int(expression.subs(symbol, length))

    low, high = 1, MOST
    if blocks(1) != 1 or blocks(MOST) < 2:
        return None
    while low + 1 < high:  # low has one block, high more
        middle = (low + high) // 2
        low, high = (middle, high) if blocks(middle) == 1 else (low, middle)
    lengths = {*range(1, 40), *(low * n + d for n in (1, 2, 3, 7, 50) for d in (-1, 0, 1) if low * n + d > 0)}
    return low if low > 1 and all(blocks(length) == -(-length // low) for length in lengths) else None


def run_blocks(body: Body, result: Ref, dim: int, length: int) -> Tensor:
    """The results of the loop's own code for `length` tokens of SEQUENCES sequences, joined along `dim`.

    `body` is one of `with_random`.
    """
    assert body.block is not None
    carried: dict[Ref, Tensor] = {}
    joined = []
    for start in range(0, length, body.block):
        values = _block(body, carried, start, min(body.block, length - start))
        carried = {Ref("before", number, item): made for (number, item), made in values.items()}
        joined.append(values[result.number, result.item])
    return torch.cat(joined, dim)


def _block(body: Body, carried: dict[Ref, Tensor], start: int, count: int) -> dict[tuple[int, int], Tensor]:
    """The results of all steps for one block, by number of step and item."""
    values: dict[tuple[int, int], Tensor] = {}

    def fill(item: Any) -> Any:
        if isinstance(item, Ref):
            if item.kind == "outside":
                return body.outside[item.number]
            if item.kind == "own":
                return values[item.number, item.item]
            return carried[item] if carried else torch.zeros([_known(size) for size in body.shape(item)])
        return SEQUENCES if isinstance(item, torch.SymInt) else sized(item, count)

    for number, step in enumerate(body.steps):
        if step.token is not None:
            made = fill(step.args[0]).narrow(step.token, start, count)
        else:
            made = step.func(*tree_map(fill, step.args), **tree_map(fill, dict(step.kwargs)))
        for item, one in enumerate([made] if isinstance(made, Tensor) else made):
            values[number, item] = one
    return values


def _known(size: Any) -> int:
    """`size`, or SEQUENCES for the number of sequences."""
    return size if isinstance(size, int) else SEQUENCES


def with_random(body: Body, length: int) -> Body:
    """`body` with random numbers for what it takes parts of by token: `length` tokens of SEQUENCES sequences."""
    taken = {step.args[0].number: step.token for step in body.steps if step.token is not None}
    outside = dict(body.outside)
    generator = torch.Generator().manual_seed(0)
    with torch.utils._python_dispatch._disable_current_modes():
        for number, dim in taken.items():
            shape = [length if place == dim else _known(size) for place, size in enumerate(outside[number].shape)]
            outside[number] = torch.randn(shape, generator=generator)
    return replace(body, outside=outside, batch=SEQUENCES, tokens=length)
