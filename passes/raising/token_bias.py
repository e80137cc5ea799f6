"""Biases of attention scores that the key's own token computes: more features of keys, beside constants of queries.

A query's score of a key is then scale * (q . k + c * bias / (c * scale)), so attention needs no operand for the bias.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.concatenation import concatenated
from qcompile.passes.raising.evaluation import PositionEvaluator
from qcompile.passes.raising.facts import LENGTHS, Facts
from qcompile.passes.raising.masks import HIDDEN, Mask, lengths_tried
from qcompile.passes.raising.nodes import TRANSPARENT, operator_name, unsupported
from qcompile.passes.raising.values import Value, identity

MOVES = (TRANSPARENT - {"dropout"}) | {"view", "reshape", "_unsafe_view", "unsqueeze", "transpose", "permute", "slice"}
"""Operators that move or repeat elements and change none."""
FEW = 64
"""Tokens up to which two sequences are run, so that a mask of another sequence shows."""
HEAD, ROW = 4, 32
"""Kernels for GPUs take heads with sizes that are multiples of HEAD, and rows of all heads in whole blocks of ROW.
Copies of the feature that each have their share of the bias make them so."""


def source_of(facts: Facts, mask: Any) -> fx.Node | None:
    """The features of tokens that are all that `mask` has of the sequence, moved or hidden by position; else None.

    Every element of the mask is then an element of the source, or a number, whatever the values of the source are.
    """
    reads = facts.reads_token_ids
    while isinstance(mask, fx.Node):
        value, name = facts.known.get(mask), operator_name(mask)
        if isinstance(value, Value) and value.is_plain() and _is_of_tokens(value):
            return mask
        first: Any = mask.args[0] if mask.args else None
        filled = name == "masked_fill" and facts.number(mask.args[2]) is not None and not reads(mask.args[1])
        if filled or (name in MOVES and mask.meta["val"].dtype == first.meta["val"].dtype):
            mask = first
        elif name == "where" and not reads(mask.args[0]) and facts.number(mask.args[2]) is not None:
            mask = mask.args[1]
        else:
            return None
    return None


def _is_of_tokens(value: Value) -> bool:
    """Whether one dimension of `value` runs over sequences, one over tokens, and at most one over features."""
    names = sorted(dim for dim in value.dims if dim)
    return names in (["B", "T"], ["B", "F", "T"])


def heads_read(facts: Facts, mask: Mask, heads: int) -> list[int]:
    """The feature of the source that each of `heads` adds to its scores of the key in its place.

    Raises UnsupportedError if a head adds anything else than one feature of the key's token to a score it shows. The
    mask moves elements of its source by position alone, so one run with different elements shows where each goes.
    """
    assert mask.source is not None
    chosen: list[int] = []
    for length in lengths_tried(facts):
        batch = 2 if length <= FEW else 1
        given, each = _different(facts, mask.source, batch, length)
        made = PositionEvaluator(facts, length, batch, {mask.source: given}).value(mask.node)
        made = made.expand(batch, heads, length, length)
        own = [(each[0, -1] == row[-1, -1]).nonzero() for row in made[0]]
        here = [int(each[0]) if len(each) else -1 for each in own]
        chosen = chosen or here
        wanted = each.transpose(1, 2)[:, chosen, None]
        if chosen != here or -1 in here or not bool(((made == wanted) | (made <= HIDDEN)).all()):
            raise unsupported(mask.node, "adds more to its scores than one feature of the key's token")
    return chosen


def _different(facts: Facts, source: fx.Node, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """A tensor for `source` with a different number above 0 for every token and feature; the same as [B, T, F]."""
    value = facts.value(source)
    assert value is not None
    each = torch.arange(1.0, 1.0 + batch * length * value.count).view(batch, length, value.count)
    names = [dim for dim in value.dims if dim]
    moved = each.permute(*("BTF".index(name) for name in names)) if "F" in names else each[..., 0]
    moved = moved.t() if names == ["T", "B"] else moved
    sizes = {LENGTHS["B"]: batch, LENGTHS["T"]: length}
    shape = [sizes.get(size, size) for size in facts.shape(source)]
    alone = [size if dim else 1 for size, dim in zip(shape, value.dims, strict=True)]
    return moved.reshape(alone).expand(shape).clone(), each


def extended(
    facts: Facts, build: Builder, node: fx.Node, mask: Mask, inputs: tuple[Value, Value], scale: float
) -> tuple[Value, Value]:
    """Queries and keys [B, T, H, D] with the features that make scores of `scale` add the bias of `mask`.

    Raises UnsupportedError naming `node` if they cannot have one more.
    """
    query, heads, bias = inputs[0], inputs[0].sizes[0], facts.value(mask.source)
    if bias is None or query.base is None or not scale:
        raise unsupported(node, "adds a bias of keys to scores that have no scale")
    multiple = max(HEAD, ROW // math.gcd(ROW, heads))
    copies = multiple - query.sizes[1] % multiple
    terms = bias.terms.reshape(len(bias.terms), -1)[:, heads_read(facts, mask, heads), None]
    zeros = build.gather([build.flat(query.base)], np.full(heads * copies, -1))
    constant = build.call("shift", zeros, mask.factor / scale / copies)
    dims = ("B", "T", "F", "F")
    more = identity(constant, dims, (heads, copies)), Value(bias.base, dims, np.repeat(terms, copies, 2))
    made = [concatenated(build, [one, other], 3) for one, other in zip(inputs, more, strict=True)]
    if made[0] is None or made[1] is None:
        raise unsupported(node, "adds a bias of keys to scores of queries or keys that are not features of tokens")
    return made[0], made[1]
