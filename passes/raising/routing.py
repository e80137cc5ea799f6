"""Handlers for mixtures of experts, and a few operators that occur only there.

The expected form is transformers' `batched_mm`: the weights of each chosen expert are gathered, [S, N, K] for S pairs
of token and slot, and multiplied by that pair's input. A dimension of pairs is "BTF", with slots as features. If one
expert is chosen, torch has no slots, and pairs are tokens: "BT". passes/raising/slots.py says what becomes of their
slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.passes.raising import aten, patterns, tables, values
from qcompile.passes.raising.aten import HANDLERS, handles, working_sizes
from qcompile.passes.raising.nodes import Arguments, operator_name
from qcompile.passes.raising.patterns import is_call, strip
from qcompile.passes.raising.raiser import LENGTHS, Known, Opaque, Raiser, Weight, features
from qcompile.passes.raising.slots import is_one_slot
from qcompile.passes.raising.values import POSITION, Value, identity

__all__ = ["HANDLERS"]

PAIRS = "BTF"
"""The dimension of a value that has one row per pair of token and slot, if there are several slots."""


@dataclass(frozen=True)
class Chosen(Opaque):
    """The rows of `weight` [E, ...] selected by the choice `index` [B, T, k], one per pair; `dims` run over pairs."""

    weight: fx.Node
    index: fx.Node
    dims: tuple[str, ...]

    @property
    def slots(self) -> int:
        """Number of experts of each token."""
        return features(self.index)[0]


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

    def register(handler: aten.Handler) -> aten.Handler:
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
    if value is None or not value.dims or dim not in (-1, len(value.dims) - 1):
        return None
    if value.dims[-1] == "" and r.shape(item)[-1] == 1:  # the score of the only expert, or of the only one chosen
        value = values.as_features(value, len(value.dims) - 1)
    return value if len(value.sizes) == 1 and value.dims[-1] == "F" else None


def _choice(value: Value | None) -> fx.Node | None:
    """The choice of which `value` is all slots in their order; else None."""
    if value is None or value.base is None or kind_of(value) != "top_k" or (value.terms["coef"] != 1).any():
        return None
    whole = np.array_equal(value.terms["index"].ravel(), np.arange(features(value.base)[0]))
    return value.base if whole else None


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
    value, index = _scores(r, a.input_, a.dim), _scores(r, a.index, -1)
    chosen = _choice(index)
    if value is None or chosen is None or index is None or index.dims != value.dims:
        return tables.gathered(r, node, a.input_, a.index) if a.dim == 1 else None
    picked = r.call("pick", _emitted(r, value, node), chosen)
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
    if not is_call(divisor, "sum") or not patterns.over_last(divisor) or strip(divisor.args[0]) is not w:
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
    if not is_call(mask := strip(mask, booleans=True), "bitwise_not", "logical_not"):
        return None
    mask, steps = mask.args[0], []
    while is_call(mask, *_SPREADING) or strip(mask, booleans=True) is not mask:
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
    if value is None or not isinstance(count, int) or dim is None:
        return None
    if count == 1 or value.dims[dim] != "BT":
        return value if count == 1 else None
    terms = np.repeat(np.expand_dims(value.terms, value.axis(dim)), count, value.axis(dim))
    return Value(value.base, (*value.dims[:dim], PAIRS, *value.dims[dim + 1 :]), terms)


@overridden("index")
def _chosen(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    if len(a.indices) != 1 or not isinstance(r.known.get(a.input_), Weight):
        return None
    index = based(r, a.indices[0])
    if kind_of(index) != "top_k" or index is None:
        return None
    chosen = _choice(index)
    pairs = [(PAIRS,)] if index.count > 1 else [("BT",), ("B", "T")]
    if chosen is None or index.dims not in pairs:
        raise r.unsupported(node, "selects weights by something else than all chosen experts of each token, in order")
    return Chosen(node, a.input_, chosen, index.dims)


@overridden("bmm", "matmul")
def _expert_linear(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """weight[index] @ x or x @ weight[index], where x is a column or a row."""
    left, right = (r.known.get(item) for item in a.positional[:2])
    if isinstance(left, Chosen):
        chosen, x, order = left, a.positional[1], (*left.dims, "F", "")
    elif isinstance(right, Chosen):
        chosen, x, order = right, a.positional[0], (*right.dims, "", "F")
    else:
        return None
    value = r.require(x, f"expert linear {node}")
    if value.dims != order or value.sizes[:-1] != (chosen.slots,) * (chosen.slots > 1):
        raise r.unsupported(node, "multiplies the weights of chosen experts with something else than their inputs")
    weight = r.weight(chosen.weight) if order[-2] == "F" else r.turned(chosen.weight)
    made = r.call("expert_linear", _expert_input(r, value, chosen.slots, node), chosen.index, weight)
    return identity(made, order, features(made) if chosen.slots > 1 else features(made)[1:])


def _expert_input(r: Raiser, value: Value, slots: int, node: fx.Node) -> fx.Node:
    """The input of an expert linear: [B, T, K] if all slots of a token have the same, else [B, T, k, K]."""
    if slots == 1:
        return r.emit(value, (1, value.count) if is_one_slot(value.base) else value.sizes, node)
    if all(np.array_equal(value.terms[:, 0], value.terms[:, slot]) for slot in range(slots)):
        value = Value(value.base, ("BT", "F"), value.terms[:, 0])
    return r.emit(value, value.sizes, node)


@overridden("add")
def _expert_bias(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    for x, bias in (a.positional[:2], a.positional[1::-1]):
        value, chosen = r.known.get(x), r.known.get(bias)
        if not isinstance(chosen, Chosen) or not isinstance(value, Value) or kind_of(value) != "expert_linear":
            continue
        made: Any = value.base
        whole = np.array_equal(value.terms["index"].ravel(), np.arange(math.prod(features(made))))
        once = value.is_plain() and bool((value.terms["coef"] == 1).all()) and a.alpha in (None, 1)
        alike = value.dims in ((*chosen.dims, "F"), (*chosen.dims, ""))  # "" if there is one output
        if once and whole and len(made.args) == 3 and made.args[1] is chosen.index and alike:
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
        y, w = values.without_units(y), values.without_units(w)
        if w.count == 1 < y.count and len(y.sizes) == 1 and y.dims[:-1] == w.dims[:-1] and y.dims[-1] == "F":
            sizes = working_sizes(y)
            made = r.call("mul" if sizes == y.sizes else "scale_slots", r.emit(y, sizes, node), r.emit(w, (1,), node))
            return identity(made, y.dims, y.sizes)
    return None


@handles("sum")
def _sum(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """The sum over a token's slots."""
    value, over = based(r, a.input_), getattr(a, "dim", None)
    if value is None or not isinstance(over, (list, tuple)) or len(over) != 1 or a.keepdim:
        return None
    dim = over[0] % len(value.dims)
    if is_one_slot(value.base) and r.shape(a.input_)[dim] == 1:
        value = values.without_units(value)
        made = r.emit(value, (value.count,), node)
        return identity(made, value.dims[:dim] + value.dims[dim + 1 :], value.sizes)
    if len(value.sizes) != 2:
        return None
    slots = value.dims[dim] == "F" and value.axis(dim) == 1
    if not slots or kind_of(value) not in ("scale_slots", "expert_linear"):
        return None
    made = _emitted(r, value, node)
    arguments = made.args if ops.name_of(made.target) == "scale_slots" else (made, None)
    return identity(r.call("combine", *arguments), value.dims[:dim] + value.dims[dim + 1 :], value.sizes[1:])


# ---- miscellaneous ----------------------------------------------------------------------------------


@handles("clamp", "clamp_min", "clamp_max")
def _clamp(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    low, high = getattr(a, "min", None), getattr(a, "max", None)
    value = based(r, a.input_)
    if value is not None and _choice(value) is not None and _within(value, low, high):
        return value
    if value is None or any(isinstance(bound, fx.Node) for bound in (low, high)) or not 1 <= len(value.sizes) <= 2:
        return None
    bounds = [None if bound is None else float(bound) for bound in (low, high)]
    return identity(r.call("clamp", r.emit(value, working_sizes(value), node), *bounds), value.dims, value.sizes)


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
    return identity(r.call("shift", r.emit(value, working_sizes(value), node), sign * number), value.dims, value.sizes)


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


@overridden("max", "amax", "argmax")
def _best(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """The best score, its index, or both: a choice of one expert."""
    over = getattr(a, "dim", None)
    dim = over[0] if isinstance(over, (list, tuple)) and len(over) == 1 else over
    value = _scores(r, a.input_, dim) if isinstance(dim, int) else None
    if value is None:
        return None
    scores = _emitted(r, value, node)
    index = r.call("top_k", scores, 1)
    found = [identity(made, value.dims, (1,)) for made in (r.call("pick", scores, index), index)]
    if not a.keepdim:
        found = [Value(one.base, one.dims[:-1], one.terms[:, 0]) for one in found]
    name = operator_name(node)
    return found if name == "max" else found[name == "argmax"]


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
