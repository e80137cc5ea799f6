"""Rules for routers of experts: scores, the choice of the best, their weights, and choices limited to groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.facts import LENGTHS, Facts, Known
from qcompile.passes.raising.nodes import (
    TRANSPARENT,
    Arguments,
    is_call,
    is_over_last,
    operator_name,
    strip,
    unsupported,
)
from qcompile.passes.raising.values import Value, identity, operator_of

SPREADING = ("view", "reshape", "unsqueeze", "expand")
"""Operators that repeat the mask of groups for the experts of each group."""


def softmax(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Softmax over all features: the scores of experts."""
    value = _scores(facts, a.input_, a.dim)
    return value and identity(build.call("softmax", _emitted(build, value, node)), value.dims, value.sizes)


def topk(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The best scores and their indices."""
    value = _scores(facts, a.input_, a.dim)
    if value is None or not a.largest or not isinstance(a.k, int):
        return None
    scores = _emitted(build, value, node)
    index = build.call("top_k", scores, a.k)
    picked = build.call("pick", scores, index)
    return [identity(made, value.dims, (a.k,)) for made in (picked, index)]


def best(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The best score, its index, or both: a choice of one expert."""
    over = getattr(a, "dim", None)
    dim = over[0] if isinstance(over, (list, tuple)) and len(over) == 1 else over
    value = _scores(facts, a.input_, dim) if isinstance(dim, int) else None
    if value is None:
        return None
    scores = _emitted(build, value, node)
    index = build.call("top_k", scores, 1)
    results = [identity(made, value.dims, (1,)) for made in (build.call("pick", scores, index), index)]
    if not a.keepdim:
        results = [Value(one.base, one.dims[:-1], one.terms[:, 0]) for one in results]
    name = operator_name(node)
    return results if name == "max" else results[name == "argmax"]


def pick(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The scores at the indices of a choice."""
    value, index = _scores(facts, a.input_, a.dim), _scores(facts, a.index, -1)
    chosen = choice_of(index)
    if value is None or chosen is None or index is None or index.dims != value.dims:
        return None
    picked = build.call("pick", _emitted(build, value, node), chosen)
    return identity(picked, value.dims, index.sizes)


def normalize(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """w / max(sum(w) + eps, floor)."""
    if getattr(a, "rounding_mode", None) is not None:
        return None
    w, divisor = strip(a.positional[0]), strip(a.positional[1])
    eps = floor = 0.0
    if is_call(divisor, "clamp", "clamp_min"):
        bounds = Arguments(divisor)
        floor = facts.number(bounds.min) or 0.0
        if getattr(bounds, "max", None) is not None or floor <= 0:
            return None
        divisor = strip(divisor.args[0])
    if is_call(divisor, "add"):
        number = facts.number(divisor.args[1])
        if number is None:
            return None
        eps, divisor = number, strip(divisor.args[0])
    value = _scores(facts, w, -1)
    if not _is_sum(divisor, w) and not (_is_absolute_sum(divisor, w) and _is_positive(value)):
        return None
    return value and identity(
        build.call("normalize", _emitted(build, value, node), eps, floor), value.dims, value.sizes
    )


def _is_sum(item: Any, w: Any) -> bool:
    """Whether `item` is the sum of w over the last dimension, which is kept."""
    return is_call(item, "sum") and is_over_last(item) and strip(item.args[0]) is w


def _is_absolute_sum(item: Any, w: Any) -> bool:
    """Whether `item` is the sum of magnitudes of w over the last dimension, which is kept."""
    if not is_call(item, "linalg_vector_norm"):
        return False
    given = Arguments(item)
    over = [dim % item.meta["val"].dim() for dim in given.dim or ()] == [item.meta["val"].dim() - 1]
    return given.ord == 1 and over and bool(given.keepdim) and strip(given.input_) is w


def _is_positive(value: Value | None) -> bool:
    """Whether `value` holds outputs of a softmax, or some of them."""
    if value is None or (value.terms["coef"] <= 0).any():
        return False
    made: Any = value.base
    made = ops.operand(made, "x") if ops.name_of(made.target) == "pick" else made
    return ops.name_of(made.target) == "softmax"


def clamp_choice(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Indices of a choice, bounded to the number of experts, which changes none of them, or to fewer."""
    low, high = getattr(a, "min", None), getattr(a, "max", None)
    value = facts.plain(a.input_)
    chosen = choice_of(value)
    if chosen is None or not all(isinstance(bound, int) or bound is None for bound in (low, high)):
        return None
    experts = feature_sizes(ops.operand(chosen, "x"))[0]
    if (low or 0) > 0 or (isinstance(high, int) and high < 0):
        return None
    if high is None or high >= experts - 1:
        return value
    assert value is not None
    return Value(build.call("bound_choice", chosen, high), value.dims, value.terms)


def choice_of(value: Value | None, bounded: bool = False) -> fx.Node | None:
    """The top_k, or bound_choice if `bounded`, of which `value` is all slots in their order; else None."""
    if value is None or value.base is None or (value.terms["coef"] != 1).any():
        return None
    if operator_of(value) != "top_k" and not (bounded and operator_of(value) == "bound_choice"):
        return None
    whole = np.array_equal(value.terms["index"].ravel(), np.arange(feature_sizes(value.base)[0]))
    return value.base if whole else None


def _scores(facts: Facts, item: Any, dim: int) -> Value | None:
    """Scores [.., E], if `dim` is their last dimension and their only feature dimension."""
    value = facts.plain(item)
    if value is None or not value.dims or dim not in (-1, len(value.dims) - 1):
        return None
    if value.dims[-1] == "" and facts.shape(item)[-1] == 1:  # the score of the only expert, or of the only one chosen
        value = values.as_features(value, len(value.dims) - 1)
    return value if len(value.sizes) == 1 and value.dims[-1] == "F" else None


def _emitted(build: Builder, value: Value, node: fx.Node) -> fx.Node:
    return build.emit(value, value.sizes, node)


# ---- groups of experts ---------------------------------------------------------------------------------


def limit_groups(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Scores with all but the best groups hidden; the same scores if all groups are kept."""
    value = _scores(facts, a.input_, -1)
    choice = None if value is None else _group_choice(facts, a.mask, value.count)
    if value is None or choice is None:
        return None
    best: Any = choice[0]
    keep, groups = choice[1], int(best.meta["val"].shape[-1])
    if keep == groups:
        return value
    runs, count = _group_scores(best)
    if runs is None:
        return None
    shape = facts.shape(runs)
    if not is_call(runs, "view", "reshape") or shape[-2:] != [groups, value.count // groups]:
        return None
    if strip(runs.args[0]) is not strip(a.input_):
        return None
    if not _never_chosen(node, facts.number(a.value), value, keep * value.count // groups):
        return None
    made = build.call("limit_groups", _emitted(build, value, node), groups, keep, count)
    return identity(made, value.dims, value.sizes)


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

    Softmax outputs are positive, and nothing is below minus infinity. Raises UnsupportedError if more than `left` of
    scores that are minus infinity otherwise are picked: torch does not say which of equal ones.
    """
    if hidden == float("-inf"):
        chosen = [user for user in _readers(node) if is_call(user, "topk")]
        more = next((user for user in chosen if not _at_most(user.args[1], left)), None)
        if more is not None:
            raise unsupported(more, f"chooses {more.args[1]} experts, and the best groups have {left}")
        return True
    positive = hidden == 0 and operator_of(scores) == "softmax" and bool((scores.terms["coef"] > 0).all())
    return positive and all(is_call(user, "topk") and _at_most(user.args[1], left) for user in node.users)


def _at_most(count: Any, left: int) -> bool:
    return isinstance(count, int) and count <= left


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operators that read `node`, or a copy of it."""
    for user in node.users:
        if operator_name(user) in TRANSPARENT:
            yield from _readers(user)
        else:
            yield user


def _group_choice(facts: Facts, mask: Any, experts: int) -> tuple[fx.Node, int] | None:
    """(group scores, number kept) of the complement of a mask that is 1 in the chosen groups of `experts`."""
    if not is_call(mask := strip(mask, booleans=True), "bitwise_not", "logical_not"):
        return None
    mask, steps = mask.args[0], []
    while is_call(mask, *SPREADING) or strip(mask, booleans=True) is not mask:
        steps += [mask] if is_call(mask, *SPREADING) else []
        mask = mask.args[0]
    if not is_call(mask, "scatter") or mask.args[1] not in (1, -1) or mask.args[3] not in (1, 1.0):
        return None
    zeros, chosen = strip(mask.args[0]), strip(mask.args[2])
    topk: Any = chosen.args[0] if is_call(chosen, "getitem") and chosen.args[1] == 1 else None
    if not is_call(zeros, "zeros_like") or (keep := _largest(topk, 2)) is None:
        return None
    best = strip(topk.args[0])
    if strip(zeros.args[0]) is not best or best.meta["val"].dim() != 2:
        return None
    return (best, keep) if _spreads_groups(facts, mask, steps, experts) else None


def _spreads_groups(facts: Facts, mask: fx.Node, steps: list[fx.Node], experts: int) -> bool:
    """Whether `steps`, last first, repeat `mask` [tokens, groups] for the consecutive experts of each group."""
    groups = int(mask.meta["val"].shape[-1])
    value: Value | None = identity(mask, ("BT", "F"), (groups,))
    for step in reversed(steps):
        if value is None:
            return False
        if is_call(step, "unsqueeze"):
            value = values.unsqueeze(value, Arguments(step).dim % (len(value.dims) + 1))
        else:
            spread = values.expand if is_call(step, "expand") else values.reshape
            value = spread(value, facts.shape(step), LENGTHS)
    if value is None or value.dims != ("BT", "F") or experts % groups:
        return False
    return np.array_equal(value.terms["index"].ravel(), np.arange(experts) // (experts // groups))
