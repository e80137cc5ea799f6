"""A rule for attention written as matmul, softmax, matmul, recognized from its last operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import fx

from qcompile.passes.raising import token_bias, values
from qcompile.passes.raising.attention import Scores, build_attention
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.masks import HIDDEN, Mask, prove_mask
from qcompile.passes.raising.nodes import Arguments, both_orders, is_call, strip, unsupported
from qcompile.passes.raising.values import Value

VIEWS = ("view", "reshape", "_unsafe_view")


def written_attention(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """softmax(scores) @ v, where scores are q @ k^T scaled, soft-capped and masked in any order."""
    softmax = _unguarded(_unshaped(node.args[0]))
    if not is_call(softmax, "softmax", "_softmax") or softmax.args[1] not in (-1, softmax.meta["val"].dim() - 1):
        return None
    v = facts.value(node.args[1])
    if v is None or v.base is None:
        return None
    scores = _WrittenScores(facts, strip(softmax.args[0]))
    if scores.inputs is None:
        return None
    q, k = scores.inputs
    flattened = v.dims[0] == "BF"
    inputs = [_with_heads(value) for value in (q, k, v)]
    outer = _head_sizes(inputs)
    if outer is None:
        raise unsupported(node, "takes queries, keys or values that are not [batch, heads, tokens, features]")
    q, k, v = (_by_head(value, outer) for value in inputs)
    order = [
        values.permute(value, places) for value, places in ((q, (0, 2, 1, 3)), (k, (0, 3, 1, 2)), (v, (0, 2, 1, 3)))
    ]
    seen = prove_mask(facts, node, scores.masks, is_causal=False)
    for mask in (mask for mask in scores.masks if mask.source is not None):
        order[:2] = token_bias.extended(facts, build, node, mask, (order[0], order[1]), scores.scale)
    settings = Scores(scores.scale, seen.window, scores.softcap, key_bias=seen.key_bias, chunk=seen.chunk)
    made = values.permute(build_attention(facts, build, node, order, settings), (0, 2, 1, 3))
    if flattened:
        return Value(made.base, ("BF", "T", "F"), made.terms)
    return Value(made.base, ("B", *("F" for _ in outer), "T", "F"), made.terms.reshape(-1, *outer, made.sizes[1]))


def _unshaped(item: Any) -> Any:
    """The node behind casts, copies and views."""
    while is_call(item := strip(item), *VIEWS):
        item = item.args[0]
    return item


def _unguarded(item: Any) -> Any:
    """The softmax inside where(row is fully masked, 0, softmax); a causal mask has no such row."""
    if not is_call(item, "where") or not is_call(softmax := strip(item.args[2]), "softmax", "_softmax"):
        return item
    test, scores = item.args[0], strip(softmax.args[0])
    for name in ("logical_not", "any", "logical_not", "eq"):
        if not is_call(test, name):
            return item
        last, test = test, strip(test.args[0])
    return softmax if test is scores and last.args[1] == float("-inf") else item


def _with_heads(value: Value) -> Value:
    """A [B * H, ...] value as [B, H, ...]."""
    return Value(value.base, ("B", "F", *value.dims[1:]), value.terms) if value.dims[0] == "BF" else value


def _head_sizes(inputs: Sequence[Value]) -> tuple[int, ...] | None:
    """Sizes of the head dimensions of queries, keys and values [B, .., *, *]: one, none, or groups and heads."""
    each = []
    for value in inputs:
        if len(value.dims) < 3 or value.dims[0] != "B" or not set(value.dims[1:-2]) <= {"", "F"}:
            return None
        sizes = iter(value.sizes)
        each.append(tuple(next(sizes) if dim else 1 for dim in value.dims[1:-2]))
    if len({len(sizes) for sizes in each}) > 1:
        return None
    return np.broadcast_shapes(*each)


def _by_head(value: Value, outer: tuple[int, ...]) -> Value:
    """A value [B, .., *, *] as [B, H, *, *]: its head dimensions expanded to `outer` and merged."""
    missing = [1 + place for place, dim in enumerate(value.dims[1:-2]) if not dim]
    terms = np.expand_dims(value.terms, missing)
    rest = terms.shape[1 + len(outer) :]
    terms = np.broadcast_to(terms, (len(terms), *outer, *rest))
    return Value(value.base, ("B", "F", *value.dims[-2:]), terms.reshape(len(terms), math.prod(outer), *rest))


class _WrittenScores:
    """The operators between a softmax and its q @ k^T; `inputs` is None if one of them is unknown."""

    def __init__(self, facts: Facts, scores: Any) -> None:
        self.scale, self.softcap = 1.0, 0.0
        self.masks: list[Mask] = []
        self.inputs: tuple[Value, Value] | None = None
        self._facts = facts
        while not is_call(scores, "matmul", "bmm", "mm", "baddbmm"):
            inner = self._step(scores)
            if inner is None:
                return
            scores = strip(inner)
        first, second = scores.args[:2]
        if is_call(scores, "baddbmm"):
            first, second = scores.args[1:3]
            if not self._added(scores):
                return
        q, k = facts.value(first), facts.value(second)
        if q is not None and k is not None and q.base is not None and k.base is not None:
            self.inputs = q, k

    def _added(self, scores: Any) -> bool:
        """Record beta * bias + alpha * q @ k; False if it cannot be expressed, for instance under a soft cap."""
        beta, alpha = (self._facts.number(scores.kwargs.get(name, 1)) for name in ("beta", "alpha"))
        if alpha is None or beta != 1 or self.softcap:
            return False
        self.masks.append(Mask(scores.args[0], "added", self.scale))
        self.scale *= alpha
        return True

    def _step(self, scores: Any) -> Any:
        """Record the effect of the outermost operator on the scores and return its operand; None if unknown."""
        if is_call(scores, *VIEWS):
            return scores.args[0]
        if self.softcap:  # a mask inside would be capped along with the scores
            return self._scaling(scores)
        if is_call(scores, "masked_fill"):
            self.masks.append(Mask(scores.args[1], "hidden"))
            return scores.args[0] if self._hides(scores.args[2]) else None
        if is_call(scores, "where"):
            self.masks.append(Mask(scores.args[0], "seen"))
            return scores.args[1] if self._hides(scores.args[2]) else None
        if is_call(scores, "max", "maximum"):
            return scores.args[0] if len(scores.args) == 2 and self._hides(scores.args[1]) else None
        if is_call(scores, "add"):
            reads = self._facts.reads_token_ids
            for inner, mask in both_orders(scores):
                if reads(inner) and isinstance(mask, fx.Node) and not reads(mask):
                    self.masks.append(Mask(mask, "added", self.scale))
                    return inner
            for inner, mask in both_orders(scores):
                if reads(inner) and (source := token_bias.source_of(self._facts, mask)) is not None:
                    self.masks.append(Mask(mask, "added", self.scale, source))
                    return inner
        if is_call(scores, "mul") and self.masks:
            reads = self._facts.reads_token_ids
            for inner, mask in both_orders(scores):
                many = isinstance(mask, fx.Node) and mask.meta["val"].dim() > 1
                if many and reads(inner) and not reads(mask):
                    self.masks.append(Mask(mask, "kept"))
                    return inner
        return self._scaling(scores)

    def _hides(self, item: Any) -> bool:
        """Whether scores of the number `item` count as hidden once they are scaled."""
        number = self._facts.number(item)
        return number is not None and number * self.scale <= HIDDEN

    def _scaling(self, scores: Any) -> Any:
        """Record a factor of the scores, or a soft cap, and return the operand; None for other operators."""
        if is_call(scores, "div"):
            number = self._facts.number(scores.args[1])
            self.scale /= number or 1.0
            return scores.args[0] if number else None
        if not is_call(scores, "mul"):
            return None
        for inner, factor in both_orders(scores):
            number = self._facts.number(factor)
            if number is None:
                continue
            if is_call(inner, "tanh") and not self.softcap and self.scale == 1:
                return self._capped(strip(inner.args[0]), number)
            self.scale *= number
            return inner
        return None

    def _capped(self, inner: Any, cap: float) -> Any:
        """Record cap * tanh(scores / cap) and return the scores inside; further factors of them are matched later.

        The operator's cap is positive: for a negative one, the scores are negated twice.
        """
        self.softcap = abs(cap)
        self.scale *= cap
        before = self.scale
        operand = self._scaling(inner)
        return operand if self.scale != before else None
