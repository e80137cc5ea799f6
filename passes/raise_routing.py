"""Handlers for mixtures of experts, and a few operators that occur only there.

The expected form is transformers' `batched_mm`: the weights of each chosen expert are gathered, [S, N, K] for S
pairs of token and slot, and multiplied by that pair's input. A dimension of pairs is "BTF", with slots as features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.passes import raise_aten, raise_patterns
from qcompile.passes import raise_tables as tables
from qcompile.passes import raise_values as values
from qcompile.passes.raise_aten import HANDLERS, handles
from qcompile.passes.raise_ops import LENGTHS, Arguments, Known, Opaque, Raiser, Weight, features
from qcompile.passes.raise_patterns import is_call, strip
from qcompile.passes.raise_values import POSITION, Value, identity

__all__ = ["HANDLERS"]

PAIRS = "BTF"
"""The dimension of a value that has one row per pair of token and slot."""


@dataclass(frozen=True)
class Chosen(Opaque):
    """The rows of `weight` [E, ...] selected by the choice `index` [B, T, k], one per pair."""

    weight: fx.Node
    index: fx.Node


def based(r: Raiser, item: Any) -> Value | None:
    """`item` as a Value if it holds features of a raised tensor, unmixed, times one constant; else None."""
    known = r.known.get(item) if isinstance(item, fx.Node) else None
    if not isinstance(known, Value) or not known.is_plain():
        return None
    return known if len(np.unique(known.terms["coef"])) == 1 else None


def kind_of(value: Value | None) -> str | None:
    """The operator that computed the base of `value`."""
    return None if value is None or value.base is None else ops.name_of(value.base.target)


def overridden(*names: str) -> Any:
    """Register a handler that is tried first; if it returns None, the previous handler is."""

    def register(handler: raise_aten.Handler) -> raise_aten.Handler:
        for name in names:
            before = HANDLERS.get(name)

            def both(r: Raiser, node: fx.Node, a: Arguments, before: Any = before) -> Known:
                found = handler(r, node, a)
                return found if found is not None or before is None else before(r, node, a)

            HANDLERS[name] = both
        return handler

    return register


# ---- routers ----------------------------------------------------------------------------------------


def _scores(r: Raiser, item: Any, dim: int) -> Value | None:
    """Scores [.., E], if `dim` is their last dimension and their only feature dimension."""
    value = based(r, item)
    if value is None or len(value.sizes) != 1 or value.dims[-1] != "F" or dim not in (-1, len(value.dims) - 1):
        return None
    return value


def _emitted(r: Raiser, value: Value, node: fx.Node) -> fx.Node:
    return r.emit(value, value.sizes, node)


@handles("softmax", "_softmax")
def _softmax(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = _scores(r, a.input_, a.dim)
    return value and identity(r.call("softmax", _emitted(r, value, node)), value.dims, value.sizes)


@handles("topk")
def _topk(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = _scores(r, a.input_, a.dim)
    if value is None or not a.largest or not isinstance(a.k, int):
        return None
    scores = _emitted(r, value, node)
    index = r.call("top_k", scores, a.k)
    picked = r.call("pick", scores, index)
    return [identity(made, value.dims, (a.k,)) for made in (picked, index)]


@handles("gather")
def _gather(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value, index = _scores(r, a.input_, a.dim), based(r, a.index)
    if value is None or kind_of(index) != "top_k" or index is None or index.dims != value.dims:
        return tables.gathered(r, node, a.input_, a.index) if a.dim == 1 else None
    assert index.base is not None
    picked = r.call("pick", _emitted(r, value, node), index.base)
    return identity(picked, value.dims, index.sizes)


@overridden("div", "true_divide")
def _normalized(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """w / max(sum(w) + eps, floor)."""
    w, divisor = strip(a.positional[0]), strip(a.positional[1])
    eps = floor = 0.0
    if is_call(divisor, "clamp", "clamp_min"):
        bounds = Arguments(divisor)
        floor = r.number(bounds.min) or 0.0
        if getattr(bounds, "max", None) is not None or floor <= 0:
            return None
        divisor = strip(divisor.args[0])
    if is_call(divisor, "add"):
        number = r.number(divisor.args[1])
        if number is None:
            return None
        eps, divisor = number, strip(divisor.args[0])
    if not is_call(divisor, "sum") or not raise_patterns.over_last(divisor) or strip(divisor.args[0]) is not w:
        return None
    value = _scores(r, w, -1)
    return value and identity(r.call("normalize", _emitted(r, value, node), eps, floor), value.dims, value.sizes)


@handles("masked_fill")
def _limited(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Scores with all but the best groups hidden; a no-op if all groups are kept."""
    value = _scores(r, a.input_, -1)
    found = None if value is None else _group_choice(r, a.mask, value.count)
    if value is None or found is None:
        return None
    best: Any = found[0]
    keep, groups = found[1], int(found[0].meta["val"].shape[-1])
    if keep == groups:
        return value
    runs, count = _group_scores(best)
    if runs is None:
        return None
    shape = r.shape(runs)
    if not is_call(runs, "view", "reshape") or shape[-2:] != [groups, value.count // groups]:
        return None
    if strip(runs.args[0]) is not strip(a.input_):
        return None
    if not _never_chosen(node, r.number(a.value), value, keep * value.count // groups):
        return None
    return identity(r.call("limit_groups", _emitted(r, value, node), groups, keep, count), value.dims, value.sizes)


def _group_scores(best: Any) -> tuple[Any, int]:
    """(scores by group, n) if `best` is the sum of the n best scores of each group; else (None, 0)."""
    if is_call(best, "amax") and Arguments(best).dim in ([-1], [2]):
        return strip(best.args[0]), 1
    if is_call(best, "getitem") and best.args[1] == 0 and is_call(best.args[0], "max"):
        most = Arguments(best.args[0])
        return (strip(most.input_), 1) if getattr(most, "dim", None) in (-1, 2) else (None, 0)
    if not is_call(best, "sum") or [d % 3 for d in best.args[1]] != [2]:
        return None, 0
    two: Any = best.args[0]
    inner: Any = two.args[0] if is_call(two, "getitem") and two.args[1] == 0 else None
    return (strip(inner.args[0]), 2) if _largest(inner, 3) == 2 else (None, 0)


def _largest(item: Any, rank: int) -> int | None:
    """k if `item` is a topk of the k largest along the last of `rank` dimensions."""
    if not is_call(item, "topk"):
        return None
    given = Arguments(item)
    return given.k if given.largest and given.dim in (-1, rank - 1) and isinstance(given.k, int) else None


def _never_chosen(node: fx.Node, hidden: float | None, scores: Value, left: int) -> bool:
    """Whether readers of the scores never pick one of those set to `hidden`, given that `left` others remain.

    Softmax outputs are positive, and nothing is below minus infinity.
    """
    if hidden == float("-inf"):
        return True
    positive = hidden == 0 and kind_of(scores) == "softmax" and bool((scores.terms["coef"] > 0).all())
    chosen: list[Any] = [user.args[1] if is_call(user, "topk") else left + 1 for user in node.users]
    return positive and all(isinstance(count, int) and count <= left for count in chosen)


def _group_choice(r: Raiser, mask: Any, experts: int) -> tuple[fx.Node, int] | None:
    """(group scores, number kept) of the complement of a mask that is 1 in the chosen groups of `experts`."""
    if not is_call(mask := strip(mask), "bitwise_not", "logical_not"):
        return None
    mask, steps = mask.args[0], []
    while is_call(mask, *_SPREADING) or strip(mask) is not mask:
        steps += [mask] if is_call(mask, *_SPREADING) else []
        mask = mask.args[0]
    if not is_call(mask, "scatter") or mask.args[1] not in (1, -1) or mask.args[3] not in (1, 1.0):
        return None
    zeros, chosen = strip(mask.args[0]), strip(mask.args[2])
    topk: Any = chosen.args[0] if is_call(chosen, "getitem") and chosen.args[1] == 1 else None
    if not is_call(zeros, "zeros_like") or (keep := _largest(topk, 2)) is None:
        return None
    best = strip(topk.args[0])
    if strip(zeros.args[0]) is not best or best.meta["val"].dim() != 2 or not _spreads_groups(r, mask, steps, experts):
        return None
    return best, keep


_SPREADING = ("view", "reshape", "unsqueeze", "expand")


def _spreads_groups(r: Raiser, mask: fx.Node, steps: list[fx.Node], experts: int) -> bool:
    """Whether `steps`, last first, repeat `mask` [tokens, groups] for the consecutive experts of each group."""
    groups = int(mask.meta["val"].shape[-1])
    found: Value | None = identity(mask, ("BT", "F"), (groups,))
    for step in reversed(steps):
        if found is None:
            return False
        if is_call(step, "unsqueeze"):
            found = values.unsqueeze(found, Arguments(step).dim % (len(found.dims) + 1))
        else:
            spread = values.expand if is_call(step, "expand") else values.reshape
            found = spread(found, r.shape(step), LENGTHS)
    if found is None or found.dims != ("BT", "F") or experts % groups:
        return False
    return np.array_equal(found.terms["index"].ravel(), np.arange(experts) // (experts // groups))


# ---- experts ----------------------------------------------------------------------------------------


@overridden("repeat_interleave")
def _repeat_tokens(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Each token repeated once per slot."""
    value, count, dim = r.value(a.positional[0]), a.positional[1], a.dim
    if value is None or not isinstance(count, int) or dim is None or value.dims[dim] != "BT":
        return None
    terms = np.repeat(np.expand_dims(value.terms, value.axis(dim)), count, value.axis(dim))
    return Value(value.base, (*value.dims[:dim], PAIRS, *value.dims[dim + 1 :]), terms)


@overridden("index")
def _chosen(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    if len(a.indices) != 1 or not isinstance(r.known.get(a.input_), Weight):
        return None
    index = based(r, a.indices[0])
    if kind_of(index) != "top_k" or index is None or index.dims != (PAIRS,) or index.base is None:
        return None
    whole = np.array_equal(index.terms["index"].ravel(), np.arange(features(index.base)[0]))
    return Chosen(node, a.input_, index.base) if whole else None


@overridden("bmm", "matmul")
def _expert_linear(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """weight[index] @ x or x @ weight[index], where x is a column or a row."""
    left, right = (r.known.get(item) for item in a.positional[:2])
    if isinstance(left, Chosen):
        chosen, x, order = left, a.positional[1], (PAIRS, "F", "")
    elif isinstance(right, Chosen):
        chosen, x, order = right, a.positional[0], (PAIRS, "", "F")
    else:
        return None
    value = r.require(x, f"expert linear {node}")
    slots = features(chosen.index)[0]
    if value.dims != order or value.sizes[0] != slots:
        raise r.unsupported(node, "multiplies the weights of chosen experts with something else than their inputs")
    same = all(np.array_equal(value.terms[:, 0], value.terms[:, slot]) for slot in range(slots))
    if same:
        value = Value(value.base, ("BT", "F"), value.terms[:, 0])
    weight = r.weight(chosen.weight) if order[1] == "F" else r.turned(chosen.weight)
    made = r.call("expert_linear", r.emit(value, value.sizes, node), chosen.index, weight)
    return identity(made, order, features(made))


@overridden("add")
def _expert_bias(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    for x, bias in (a.positional[:2], a.positional[1::-1]):
        value, chosen = r.known.get(x), r.known.get(bias)
        if not isinstance(chosen, Chosen) or not isinstance(value, Value) or kind_of(value) != "expert_linear":
            continue
        made: Any = value.base
        whole = value.is_plain() and np.array_equal(value.terms["index"].ravel(), np.arange(value.count))
        if (
            a.alpha in (None, 1)
            and whole
            and len(made.args) == 3
            and made.args[1] is chosen.index
            and value.dims == (PAIRS, "F")
        ):
            return identity(r.call("expert_linear", *made.args, r.weight(chosen.weight)), value.dims, value.sizes)
    return None


@overridden("mul", "multiply")
def _weighted(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """The outputs of a token's experts, each times its weight; or all features of a token times one number."""
    for x, factor in (a.positional[:2], a.positional[1::-1]):
        y, w = based(r, x), based(r, factor)
        if y is None or w is None or len(y.dims) != len(w.dims):
            continue
        if y.dims == (PAIRS, "F") and w.dims == (PAIRS, "") and w.sizes == y.sizes[:1]:
            made = r.call("scale_slots", _emitted(r, y, node), _emitted(r, w, node))
            return identity(made, y.dims, y.sizes)
        if w.count == 1 < y.count and len(y.sizes) == 1 and y.dims[:-1] == w.dims[:-1] and y.dims[-1] == "F":
            made = r.call("mul", _emitted(r, y, node), r.emit(w, (1,), node))
            return identity(made, y.dims, y.sizes)
    return None


@handles("sum")
def _sum(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """The sum over a token's slots."""
    value = based(r, a.input_)
    if value is None or len(value.sizes) != 2 or not isinstance(a.dim, (list, tuple)) or len(a.dim) != 1 or a.keepdim:
        return None
    dim = a.dim[0] % len(value.dims)
    slots = value.dims[dim] == "F" and value.axis(dim) == 1
    if not slots or kind_of(value) not in ("scale_slots", "expert_linear"):
        return None
    made: Any = _emitted(r, value, node)
    arguments = made.args if ops.name_of(made.target) == "scale_slots" else (made, None)
    return identity(r.call("combine", *arguments), value.dims[:dim] + value.dims[dim + 1 :], value.sizes[1:])


# ---- miscellaneous ----------------------------------------------------------------------------------


@handles("clamp", "clamp_min", "clamp_max")
def _clamp(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    low, high = getattr(a, "min", None), getattr(a, "max", None)
    value = based(r, a.input_)
    if value is not None and kind_of(value) == "top_k" and _within(value, low, high):
        return value
    if value is None or any(isinstance(bound, fx.Node) for bound in (low, high)) or not 1 <= len(value.sizes) <= 2:
        return None
    bounds = [None if bound is None else float(bound) for bound in (low, high)]
    return identity(r.call("clamp", _emitted(r, value, node), *bounds), value.dims, value.sizes)


def _within(choice: Value, low: Any, high: Any) -> bool:
    """Whether all indices that top_k can return are within the bounds."""
    assert choice.base is not None
    scores: Any = choice.base.args[0]
    least, most = (isinstance(bound, int) or bound is None for bound in (low, high))
    return least and most and (low or 0) <= 0 and (high is None or high >= features(scores)[0] - 1)


@overridden("add", "sub")
def _shift(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """A number added to features. For functions of the position it stays part of their table."""
    number, value = r.number(a.positional[1]), based(r, a.positional[0])
    if number is None or value is None or a.alpha not in (None, 1) or not 1 <= len(value.sizes) <= 2:
        return None
    sign = -1.0 if "sub" in str(node.target) else 1.0
    return identity(r.call("shift", _emitted(r, value, node), sign * number), value.dims, value.sizes)


@handles("copy")
def _copy(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """A tensor overwritten by another of its shape becomes that other tensor."""
    target, source = a.positional[:2]
    same = r.shape(target) == r.shape(source) and target.meta["val"].dtype == source.meta["val"].dtype
    return r.known.get(source) if same and isinstance(source.meta["val"], torch.Tensor) else None


# ---- decisions by sequence length ---------------------------------------------------------------------


@dataclass(frozen=True)
class Reach(Opaque):
    """The largest position plus `offset`: a number less than context + offset and at least `offset`."""

    offset: float


@dataclass(frozen=True)
class Decided(Opaque):
    """A condition that always has the value `value`."""

    value: bool


@handles("max", "amax")
def _max(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.known.get(a.input_)
    made = node.meta["val"]
    if not isinstance(value, Value) or value.base is not None or not isinstance(made, torch.Tensor) or made.dim():
        return None
    place = len(value.terms) == 1 and (value.terms["kind"] == POSITION).all() and (value.terms["coef"] == 1).all()
    return Reach(node, 0.0) if place else None


@overridden("add")
def _reach(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    known, number = r.known.get(a.positional[0]), r.number(a.positional[1])
    return Reach(node, known.offset + number) if isinstance(known, Reach) and number is not None else None


@handles("gt")
def _beyond(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Whether the sequence is longer than a number: never, once the context is limited accordingly."""
    known, number = r.known.get(a.positional[0]), r.number(a.positional[1])
    if not isinstance(known, Reach) or number is None or known.offset > number:
        return None
    r.limit(node, int(number - known.offset) + 1)
    return Decided(node, False)


@overridden("where")
def _where(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    test, yes, no = a.positional[:3]
    decided = r.known.get(test)
    if not isinstance(decided, Decided):
        return None
    chosen = yes if decided.value else no
    return r.known.get(chosen) if isinstance(chosen, fx.Node) and r.shape(chosen) == r.shape(node) else None
