"""Rules for models in which each expert computes all tokens, times a score that is 0 where a token did not choose it.

Such a router writes the scores of its choice into a row with an entry for each expert. All other entries hold one
number, called the rest, which is 0 at first. What is computed from such a row also has a rest, which the rules here
follow. If the rest of an expert's input is 0, and the expert has no biases, then the rest of its result is 0, and the
sum over all experts equals the sum over the chosen ones. So such models are compiled as if each expert computed only
the tokens that chose it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.aliasing import run
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.facts import Constant, Facts, Known, Opaque
from qcompile.passes.raising.nodes import POINTWISE, Arguments, operator_name, strip
from qcompile.passes.raising.routers import choice_of
from qcompile.passes.raising.slots import is_one_slot
from qcompile.passes.raising.values import Value, identity

LAYOUT = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t"),
    *("mT", "numpy_T", "swapaxes", "contiguous", "clone", "alias", "detach", "to", "_to_copy", "type_as", "dropout"),
    *("chunk", "split", "split_with_sizes", "slice", "narrow"),
}
"""Operators that only move elements."""


@dataclass(frozen=True)
class Scattered(Opaque):
    """A tensor with `experts` experts along dimension `dim`: `chosen` at those of the choice `index`, else `rest`.

    `chosen` has the slots of `index` [B, T, k] in the place of the experts, as a feature axis of its own.
    """

    understood: ClassVar[bool] = True
    chosen: Value
    dim: int
    index: fx.Node
    experts: int
    rest: float

    @property
    def axis(self) -> int:
        """The axis of the terms of `chosen` that holds the slots."""
        return self.chosen.axis(self.dim)

    @property
    def slots(self) -> int:
        """Number of experts of each token."""
        return feature_sizes(self.index)[0]


def scatter(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The scores of a choice in a row of all experts that has one number elsewhere."""
    row, chosen, index = facts.shape(a.input_), facts.plain(getattr(a, "src", None)), facts.plain(a.index)
    choice, rest = choice_of(index), uniform(facts, a.input_)
    last = a.dim % len(row) == len(row) - 1
    adds = getattr(a, "reduce", None) is not None
    if chosen is None or index is None or choice is None or rest is None or not last or adds:
        return None
    experts = feature_sizes(ops.operand(choice, "x"))[0]
    slots = feature_sizes(choice)
    if chosen.dims[-1:] == ("",) and slots == (1,):
        chosen, index = (values.as_features(one, len(one.dims) - 1) for one in (chosen, index))
    alike = chosen.dims == index.dims and chosen.sizes == index.sizes == slots
    if not alike or chosen.dims[-1] != "F" or row[-1] != experts or experts == 1:
        return None
    return Scattered(node, chosen, len(row) - 1, choice, experts, rest)


def uniform(facts: Facts, item: Any) -> float | None:
    """The number that all elements of `item` are."""
    if operator_name(strip(item)) in ("zeros", "zeros_like", "new_zeros"):
        return 0.0
    table = facts.known.get(item)
    if not isinstance(table, Value) or table.base is not None or len(table.terms) != 1:
        return None
    numbers = np.unique(table.terms["coef"])
    return float(numbers[0]) if len(numbers) == 1 and (table.terms["kind"] == values.ONE).all() else None


# ---- what is computed from such values -----------------------------------------------------------------


def lifted(facts: Facts, node: fx.Node, apply_rules: Callable[[], Known]) -> Known:
    """What the rules make of an operator on scattered values, applied to the chosen ones; None if it does not apply."""
    given = [known for source in node.all_input_nodes if isinstance(known := facts.known.get(source), Scattered)]
    name = operator_name(node)
    if not given or name not in LAYOUT | POINTWISE:
        return None
    first, sources = given[0], [s for s in node.all_input_nodes if isinstance(facts.known.get(s), Scattered)]
    if name in LAYOUT:
        return _moved(first, replaced(facts, {sources[0]: _numbered(first)}, apply_rules))
    others = [item for item in node.args if isinstance(item, fx.Node) and item not in sources]
    alike = all((one.index, one.dim, one.chosen.dims) == (first.index, first.dim, first.chosen.dims) for one in given)
    if not alike or any(facts.number(item) is None for item in others):
        return None
    result = replaced(facts, {s: k.chosen for s, k in zip(sources, given, strict=True)}, apply_rules)
    if not isinstance(result, Value) or result.dims != first.chosen.dims:
        return None
    return replace(first, node=node, chosen=result, rest=_rest(facts, node))


def replaced(facts: Facts, meanings: dict[fx.Node, Value], apply_rules: Callable[[], Known]) -> Known:
    """The result of `apply_rules()` while nodes have other meanings."""
    kept = {source: facts.known[source] for source in meanings}
    facts.known.update(meanings)
    try:
        return apply_rules()
    finally:
        facts.known.update(kept)


def _rest(facts: Facts, node: fx.Node) -> float:
    """What the operator `node` makes of the rests of its operands."""

    def value_of(source: fx.Node) -> Tensor:
        known = facts.known[source]
        number = known.rest if isinstance(known, Scattered) else facts.number(source)
        assert number is not None, source
        return torch.tensor(number, dtype=torch.float32)

    return float(run(node, value_of))


def _numbered(given: Scattered) -> Value:
    """The numbers of the elements of `given`, in its shape."""
    sizes = list(given.chosen.sizes)
    sizes[given.axis - 1] = given.experts
    return replace(given.chosen, terms=values.make_terms(sizes, np.arange(np.prod(sizes)).reshape(sizes)))


def _moved(given: Scattered, places: Known) -> Known:
    """`given` with its elements moved: `places` has the number of the element for each place, see `_numbered`.

    For several results, one each.
    """
    if isinstance(places, (list, tuple)):
        return [_moved(given, one) for one in places]
    if not isinstance(places, Value) or len(places.terms) != 1:
        return None
    numbers = places.terms["index"][0]
    inner = int(np.prod(given.chosen.sizes[given.axis :]))
    expert, other = numbers // inner % given.experts, numbers // (inner * given.experts) * inner + numbers % inner
    for axis, size in enumerate(numbers.shape):
        order = np.arange(size).reshape([-1 if a == axis else 1 for a in range(numbers.ndim)])
        if size == given.experts and (expert == order).all() and (other == other.take([0], axis)).all():
            break
    else:
        return None
    terms = np.moveaxis(given.chosen.terms, given.axis, 1)
    terms = terms.reshape(*terms.shape[:2], -1)[:, :, other.take(0, axis)]
    dim = [d for d, axes in enumerate(places.dims) if "F" in axes][axis]
    return replace(given, chosen=Value(given.chosen.base, places.dims, np.moveaxis(terms, 1, 1 + axis)), dim=dim)


# ---- experts -------------------------------------------------------------------------------------------


def scaled_inputs(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A token's features for all experts, each times its score: those of the chosen experts, and 0 elsewhere."""
    for item, factor in (a.positional[:2], a.positional[1::-1]):
        x, given = facts.plain(item), facts.known.get(factor)
        if x is None or not isinstance(given, Scattered) or given.rest != 0 or len(x.dims) != len(given.chosen.dims):
            continue
        one = _alike_for_experts(x, given)
        dims = (*given.chosen.dims[:-1], "F")
        if one is None or given.chosen.count != given.slots or given.dim == len(dims) - 1 or given.chosen.dims[-1]:
            continue
        row, scores = build.emit(one, one.sizes, node), build.emit(given.chosen, (given.slots,), node)
        sizes = (given.slots, one.count)
        made = row
        if given.slots == 1:
            made = build.call("mul", row, scores)
        else:
            slots = [build.call("slice_features", scores, slot, slot + 1) for slot in range(given.slots)]
            made = build.gather([build.call("mul", row, slot) for slot in slots], np.arange(given.slots * one.count))
        return replace(given, node=node, chosen=identity(made, dims, sizes))
    return None


def _alike_for_experts(x: Value, given: Scattered) -> Value | None:
    """The features of a token in `x`, which are the same for each expert of `given`; None if they are not."""
    own = x.dims[given.dim]
    if own.startswith("F"):
        axis = x.axis(given.dim)
        if x.terms.shape[axis] != given.experts or (x.terms != x.terms.take([0], axis)).any():
            return None
        own, terms = own.removeprefix("F"), x.terms.take([0], axis).squeeze(axis)
        x = Value(x.base, (*x.dims[: given.dim], own, *x.dims[given.dim + 1 :]), terms)
    wanted = tuple(axes.replace("F", "") for axes in given.chosen.dims[:-1])
    return x if x.dims == (*wanted, "F") else None


def repeat_for_experts(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """All tokens several times in a row, once for each expert."""
    value, counts = facts.plain(a.positional[0]), a.positional[1]
    if value is None or value.dims[:1] != ("BT",) or len(counts) != len(value.dims):
        return None
    if not isinstance(counts[0], int) or any(count != 1 for count in counts[1:]):
        return None
    if value.count * counts[0] > values.MOST_FEATURES:
        return None
    terms = np.repeat(value.terms[:, None], counts[0], 1)
    return Value(value.base, ("FBT", *value.dims[1:]), terms)


def expert_linear(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """x @ weight for all experts, [E, tokens, K] @ [E, K, N], of inputs that are 0 for experts that are not chosen."""
    given, weight = facts.known.get(a.positional[0]), a.positional[1]
    if not isinstance(given, Scattered) or not isinstance(facts.known.get(weight), Constant) or given.rest != 0:
        return None
    value, shape = given.chosen, weight.meta["val"].shape
    if value.dims != ("F", "BT", "F") or given.dim != 0 or shape[:2] != (given.experts, value.sizes[1]):
        return None
    alone = given.slots == 1 and not is_one_slot(value.base)
    x = build.emit(value, (value.count,) if alone else value.sizes, node)
    made = build.call("expert_linear", x, given.index, build.transposed_experts(weight))
    return replace(given, node=node, chosen=identity(made, value.dims, feature_sizes(made)))


def sum_experts(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The sum over all experts, of values that are 0 for those that are not chosen."""
    given = facts.known.get(a.input_)
    over = getattr(a, "dim", None)
    if not isinstance(given, Scattered) or not isinstance(over, (list, tuple)) or a.keepdim or given.rest != 0:
        return None
    value = given.chosen
    if [dim % len(value.dims) for dim in over] != [given.dim] or len(value.sizes) != 2 or given.axis != 1:
        return None
    made = build.call("combine", build.emit(value, value.sizes, node), None)
    dims = (*value.dims[: given.dim], *value.dims[given.dim + 1 :])
    return identity(made, dims, value.sizes[1:])
