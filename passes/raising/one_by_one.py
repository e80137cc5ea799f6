"""Rules for routers that choose experts one after another: the best, then the best of the remaining ones, and so on.

Together these choices are one `top_k`: its first slots do not depend on the number of slots. The weight of an expert
may be its share in a softmax over the remaining scores that are near its own (`near_share`), as in sparse mixers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.facts import Facts, Known, Opaque
from qcompile.passes.raising.nodes import Arguments, is_call, operator_name, strip
from qcompile.passes.raising.values import Value, operator_of

HIDDEN = float("-inf")


@dataclass(frozen=True)
class Left(Opaque):
    """The scores `x` [B, T, E], seen as `value`, without those of their `count` best, which are minus infinity."""

    understood: ClassVar[bool] = True
    value: Value
    x: fx.Node
    count: int


@dataclass(frozen=True)
class Near(Opaque):
    """`left` without those far from the best left, see near_share; or, if they are `shares`, their softmax."""

    understood: ClassVar[bool] = True
    left: Left
    tolerance: float
    shares: bool = False


def hide_chosen(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Scores without the best one of them: minus infinity is written there."""
    left, index = _left(facts, build, node, a.input_), facts.plain(a.index)
    hidden = getattr(a, "reduce", None) is None and facts.number(getattr(a, "value", None)) == HIDDEN
    last = a.dim in (-1, len(facts.shape(node)) - 1)
    if left is None or not hidden or not last or not _is_choice(index, left):
        return None
    return replace(left, node=node, count=left.count + 1)


def best_left(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The best of the scores that are left, and its index."""
    left = facts.known.get(a.input_)
    over = getattr(a, "dim", None)
    if operator_name(node) != "max" or not isinstance(left, Left) or not isinstance(over, int) or not a.keepdim:
        return None
    if over % len(left.value.dims) != len(left.value.dims) - 1 or left.count >= feature_sizes(left.x)[0]:
        return None
    index = build.call("top_k", left.x, left.count + 1)
    terms = values.make_terms((1,), left.count)
    return [Value(made, left.value.dims, terms) for made in (build.call("pick", left.x, index), index)]


def hide_far(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Scores left without those for which (m - x) / max(|x|, m) > tolerance, where m is the best left."""
    mask, left = strip(a.mask), _left(facts, build, node, a.input_)
    tolerance = facts.number(mask.args[1]) if is_call(mask, "gt") else None
    quotient: Any = strip(mask.args[0]) if tolerance is not None else None
    if left is None or tolerance is None or facts.number(a.value) != HIDDEN or not is_call(quotient, "div"):
        return None
    difference, divisor = strip(quotient.args[0]), strip(quotient.args[1])
    if not is_call(difference, "sub") or not is_call(divisor, "clamp", "clamp_min", "maximum"):
        return None
    bounds = Arguments(divisor)
    size, least = divisor.args[0], divisor.args[1]
    if getattr(bounds, "max", None) is not None or not is_call(strip(size), "abs"):
        return None
    scores = (difference.args[1], strip(size).args[0])
    best = (difference.args[0], least)
    if not all(_is_whole(facts, item, left) for item in scores) or tolerance < 0:
        return None
    return Near(node, left, tolerance) if all(_is_best(facts.plain(item), left) for item in best) else None


def shares(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The softmax over scores near the best."""
    near = facts.known.get(a.input_)
    if not isinstance(near, Near) or near.shares or a.dim not in (-1, len(near.left.value.dims) - 1):
        return None
    return replace(near, node=node, shares=True)


def share_of_best(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The share of the best of the scores that are left."""
    near, index = facts.known.get(a.input_), facts.plain(a.index)
    if not isinstance(near, Near) or not near.shares or not _is_choice(index, near.left):
        return None
    if a.dim not in (-1, len(near.left.value.dims) - 1):
        return None
    chosen = build.call("top_k", near.left.x, near.left.count + 1)
    made = build.call("near_share", near.left.x, chosen, near.tolerance)
    return Value(made, near.left.value.dims, values.make_terms((1,), near.left.count))


def join_slots(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Experts chosen one after another, or their weights, as one choice of several."""
    pieces = [facts.plain(piece) for piece in a.tensors]
    longest: Any = None
    for piece in pieces:
        choice = None if piece is None else _choice_behind(piece)
        if piece is None or choice is None:
            return None
        if longest is None or feature_sizes(choice) > feature_sizes(longest):
            longest = choice
    bases = [_with_choice(build, piece, longest) for piece in pieces if piece is not None]
    if any(base is not bases[0] for base in bases):
        return None
    alike = [replace(piece, base=base) for piece, base in zip(pieces, bases, strict=True) if piece is not None]
    return values.concatenate(alike, (a.dim or 0) % len(alike[0].dims))


def _choice_behind(value: Value) -> fx.Node | None:
    """The choice of experts, if `value` holds experts or weights of its slots; None if it holds something else."""
    base: Any = value.base
    if operator_of(value) == "top_k":
        return value.base
    index: Any = ops.operand(base, "index") if operator_of(value) in ("pick", "near_share") else None
    return index if index is not None and ops.name_of(index.target) == "top_k" else None


def _with_choice(build: Builder, value: Value, choice: fx.Node) -> fx.Node | None:
    """The base of `value`, computed for `choice` in place of its own choice of fewer slots.

    None if the two choices are not by the same scores: then their first slots may differ.
    """
    base: Any = value.base
    own: Any = _choice_behind(value)
    if ops.operand(own, "x") is not ops.operand(choice, "x"):
        return None
    if own is base:
        return choice
    return build.call(str(ops.name_of(base.target)), base.args[0], choice, *base.args[2:])


def _left(facts: Facts, build: Builder, node: fx.Node, item: Any) -> Left | None:
    """Scores of which some may be hidden; None if `item` is something else."""
    known, value = facts.known.get(item), facts.plain(item)
    if isinstance(known, Left):
        return known
    if value is None or not value.dims or value.dims[-1] != "F" or len(value.sizes) != 1:
        return None
    return Left(node, value, build.emit(value, value.sizes, node), 0)


def _is_choice(index: Value | None, left: Left) -> bool:
    """Whether `index` is that of the best score of `left`."""
    made: Any = None if index is None else index.base
    return operator_of(index) == "top_k" and ops.operand(made, "x") is left.x and _is_slot(index, left)


def _is_best(best: Value | None, left: Left) -> bool:
    """Whether `best` is the best score of `left`."""
    made: Any = None if best is None else best.base
    if operator_of(best) != "pick" or ops.operand(made, "x") is not left.x or not _is_slot(best, left):
        return False
    index = ops.operand(made, "index")
    return ops.name_of(index.target) == "top_k" and ops.operand(index, "x") is left.x


def _is_slot(value: Value | None, left: Left) -> bool:
    """Whether `value` is the slot of a choice that comes after those chosen before `left`."""
    if value is None or value.count != 1 or value.dims != left.value.dims:
        return False
    term = value.terms.ravel()[0]
    return bool(term["index"] == left.count and term["coef"] == 1)


def _is_whole(facts: Facts, item: Any, left: Left) -> bool:
    """Whether `item` is all scores of `left`, the hidden ones included."""
    value = facts.plain(item)
    alike = value is not None and value.base is left.value.base and value.dims == left.value.dims
    return alike and value is not None and np.array_equal(value.terms, left.value.terms)
