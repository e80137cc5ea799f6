"""Rules for experts that compute their tokens in turn: pairs of token and slot are sorted by expert, and split by it.

Each row of a result belongs to one pair, so the order of rows does not matter. A sorted tensor is described by the
values of the pairs in their own order, (token, slot), until the model adds the rows back to pairs or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.experts import expert_input
from qcompile.passes.raising.facts import Constant, Facts, Known, Opaque
from qcompile.passes.raising.in_order import InOrder
from qcompile.passes.raising.nodes import Arguments, is_call, strip
from qcompile.passes.raising.routers import choice_of
from qcompile.passes.raising.scattered import uniform
from qcompile.passes.raising.slots import PAIRS
from qcompile.passes.raising.values import Value, identity


@dataclass(frozen=True)
class OfChoice(Opaque):
    """What is computed from the choice `choice` [B, T, k] alone.

    `kind` is "order": numbers of pairs sorted by expert; "tokens": of their tokens; "marks": 1 at chosen experts, for
    each token; "counts": how many tokens chose each; or "count": that of expert number `expert`.
    """

    choice: fx.Node
    kind: str
    expert: int = -1


@dataclass(frozen=True)
class Product(Opaque):
    """The linear of the rows `given` of one expert with its matrix of `weight` [E, N, K]."""

    understood: ClassVar[bool] = True
    given: InOrder
    weight: fx.Node


# ---- the order and the counts --------------------------------------------------------------------------


def sort(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """All pairs sorted by expert."""
    value = facts.plain(a.input_)
    choice = choice_of(value)
    if choice is None or value is None or value.dims != (PAIRS,) or a.descending or a.dim not in (0, -1):
        return None
    return [None, OfChoice(node, choice, "order")]


def tokens(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The tokens of pairs: their numbers divided by the number of slots."""
    order, rounding = facts.known.get(a.positional[0]), getattr(a, "rounding_mode", None)
    if not isinstance(order, OfChoice) or order.kind != "order" or rounding not in ("trunc", "floor"):
        return None
    whole = facts.number(a.positional[1]) == feature_sizes(order.choice)[0]
    return OfChoice(node, order.choice, "tokens") if whole else None


def marks(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """1 at the experts that a token chose, 0 elsewhere."""
    index = facts.plain(a.index)
    choice = choice_of(index)
    one = getattr(a, "reduce", None) is None and facts.number(getattr(a, "value", None)) == 1
    if choice is None or index is None or index.dims != ("BT", "F") or a.dim not in (1, -1) or not one:
        return None
    row, experts = facts.shape(a.input_), feature_sizes(ops.operand(choice, "x"))[0]
    same = row == [facts.shape(a.index)[0], experts] and uniform(facts, a.input_) == 0
    return OfChoice(node, choice, "marks") if same else None


def counts(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """How many tokens chose each expert."""
    source: Any = a.input_
    while is_call(source, "to", "_to_copy"):  # of 0 and 1, which all types have
        source = source.args[0]
    given, over = facts.known.get(source), getattr(a, "dim", None)
    if not isinstance(given, OfChoice) or given.kind != "marks" or a.keepdim:
        return None
    return OfChoice(node, given.choice, "counts") if list(over or ()) in ([0], [-2]) else None


def single_counts(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The count of each expert by itself."""
    given = facts.known.get(a.positional[0])
    if not isinstance(given, OfChoice) or given.kind != "counts":
        return None
    return [OfChoice(node, given.choice, "count", expert) for expert in range(len(node.meta["val"]))]


# ---- rows in the order -----------------------------------------------------------------------------------


def in_order(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Values of pairs, or of their tokens, sorted by expert."""
    order = facts.known.get(a.indices[0]) if len(a.indices) == 1 else None
    value = facts.plain(a.input_)
    if not isinstance(order, OfChoice) or value is None or not value.dims:
        return None
    if order.kind == "tokens" and value.dims[0] == "BT":
        slots = feature_sizes(order.choice)[0]
        terms = np.repeat(value.terms[:, None], slots, 1)
        return InOrder(node, Value(value.base, (PAIRS, *value.dims[1:]), terms), order.choice)
    own = value.dims[0] == PAIRS and value.sizes[0] == feature_sizes(order.choice)[0]
    return InOrder(node, value, order.choice) if order.kind == "order" and own else None


def parts(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The rows of each expert: as many as its count."""
    given, sizes = facts.known.get(a.positional[0]), a.positional[1]
    if not isinstance(given, InOrder) or given.expert >= 0 or a.dim != 0 or not isinstance(sizes, (list, tuple)):
        return None
    experts = feature_sizes(ops.operand(given.choice, "x"))[0]
    for expert, size in enumerate(sizes):
        count = facts.known.get(size.args[0]) if is_call(size, "item", "_local_scalar_dense") else None
        if count is None or not isinstance(count, OfChoice) or count.choice is not given.choice:
            return None
        if (count.kind, count.expert) != ("count", expert):
            return None
    if len(sizes) != experts:
        return None
    return [InOrder(node, given.value, given.choice, expert) for expert in range(experts)]


def product(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The linear of the rows of one expert with its own matrix."""
    given, matrix = facts.known.get(a.input), strip(a.weight)
    if not isinstance(given, InOrder) or given.expert < 0 or a.bias is not None or not is_call(matrix, "select"):
        return None
    weight, dim, expert = matrix.args[:3]
    whole = isinstance(facts.known.get(weight), Constant) and weight.meta["val"].dim() == 3 and dim == 0
    return Product(node, given, weight) if whole and expert == given.expert else None


def joined(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The linears of all experts, one below the other: those of all pairs, sorted."""
    made = [facts.known.get(piece) for piece in a.tensors]
    first = made[0]
    if not isinstance(first, Product) or (a.dim or 0) != 0:
        return None
    value, choice, weight = first.given.value, first.given.choice, first.weight
    for expert, one in enumerate(made):
        same = isinstance(one, Product) and one.given.value is value and one.given.choice is choice
        if not same or one.weight is not weight or one.given.expert != expert:  # type: ignore[union-attr]
            return None
    experts = feature_sizes(ops.operand(choice, "x"))[0]
    if len(made) != experts or weight.meta["val"].shape[0] != experts or value.dims != (PAIRS, "F"):
        return None
    x = expert_input(build, value, feature_sizes(choice)[0], node)
    linear = build.call("expert_linear", x, choice, build.weight(weight))
    return InOrder(node, identity(linear, value.dims, feature_sizes(linear)), choice)


def add_back(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Sorted rows added to zeros at their pairs, or at their tokens: the sum over slots."""
    order, given = facts.known.get(a.index), facts.known.get(a.source)
    if not isinstance(order, OfChoice) or not isinstance(given, InOrder) or given.expert >= 0 or a.dim != 0:
        return None
    value = given.value
    if order.choice is not given.choice or a.alpha != 1 or uniform(facts, a.input_) != 0 or value.dims != (PAIRS, "F"):
        return None
    if order.kind == "order":
        return value
    if order.kind != "tokens":
        return None
    made = build.emit(value, value.sizes, node)
    arguments = made.args if ops.name_of(made.target) == "scale_slots" else (made, None)
    return identity(build.call("combine", *arguments), ("BT", "F"), value.sizes[1:])
