"""Rules for the experts of a mixture: weights selected by a router's choice, their linears, and the sum of results.

The expected form is transformers' `batched_mm`: the weights of each chosen expert are gathered, [S, N, K] for S pairs
of token and slot, and multiplied by that pair's input. A dimension of pairs is "BTF", with slots as features. If one
expert is chosen, the ATen tensors have no slots, and pairs are tokens: "BT"; see passes/raising/slots.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, feature_sizes, working_sizes
from qcompile.passes.raising.facts import Constant, Facts, Known, Opaque
from qcompile.passes.raising.nodes import Arguments, unsupported
from qcompile.passes.raising.routers import choice_of
from qcompile.passes.raising.slots import PAIRS, is_one_slot
from qcompile.passes.raising.values import Value, identity, operator_of


@dataclass(frozen=True)
class Chosen(Opaque):
    """The rows of `weight` [E, ...] selected by the choice `index` [B, T, k], one per pair; `dims` run over pairs."""

    weight: fx.Node
    index: fx.Node
    dims: tuple[str, ...]

    @property
    def slots(self) -> int:
        """Number of experts of each token."""
        return feature_sizes(self.index)[0]


def repeat_tokens(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Each token repeated once per slot."""
    value, count, dim = facts.value(a.positional[0]), a.positional[1], a.dim
    if value is None or not isinstance(count, int) or dim is None:
        return None
    if count == 1 or value.dims[dim] != "BT":
        return value if count == 1 else None
    terms = np.repeat(np.expand_dims(value.terms, value.axis(dim)), count, value.axis(dim))
    return Value(value.base, (*value.dims[:dim], PAIRS, *value.dims[dim + 1 :]), terms)


def chosen_weights(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """weight[index], the weights of the chosen experts."""
    if len(a.indices) != 1 or not isinstance(facts.known.get(a.input_), Constant):
        return None
    index = facts.plain(a.indices[0])
    if operator_of(index) not in ("top_k", "bound_choice") or index is None:
        return None
    if len(facts.shape(a.input_)) == 1 and (choice := choice_of(index, bounded=True)) is not None:
        return identity(build.call("pick", build.weight(a.input_), choice), index.dims, index.sizes)
    chosen = choice_of(index, bounded=True)
    pairs = [(PAIRS,)] if index.count > 1 else [("BT",), ("B", "T")]
    if chosen is None or index.dims not in pairs:
        raise unsupported(node, "selects weights by another index than all chosen experts of each token, in order")
    experts = a.input_.meta["val"].shape[0]
    if ops.name_of(chosen.target) == "bound_choice" and ops.operand(chosen, "last") != experts - 1:
        raise unsupported(node, "selects weights by an index that is bounded to other experts than they have")
    return Chosen(node, a.input_, chosen, index.dims)


def expert_linear(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """weight[index] @ x or x @ weight[index], where x is a column or a row."""
    left, right = (facts.known.get(item) for item in a.positional[:2])
    if isinstance(left, Chosen):
        chosen, x, order = left, a.positional[1], (*left.dims, "F", "")
    elif isinstance(right, Chosen):
        chosen, x, order = right, a.positional[0], (*right.dims, "", "F")
    else:
        return None
    value = facts.require(x, f"expert linear {node}")
    if value.dims != order or value.sizes[:-1] != (chosen.slots,) * (chosen.slots > 1):
        raise unsupported(node, "multiplies the weights of chosen experts by other values than their inputs")
    weight = build.weight(chosen.weight) if order[-2] == "F" else build.transposed_experts(chosen.weight)
    made = build.call("expert_linear", expert_input(build, value, chosen.slots, node), chosen.index, weight)
    return identity(made, order, feature_sizes(made) if chosen.slots > 1 else feature_sizes(made)[1:])


def expert_input(build: Builder, value: Value, slots: int, node: fx.Node) -> fx.Node:
    """The input of an expert linear: [B, T, K] if all slots of a token have the same, else [B, T, k, K]."""
    if slots == 1:
        return build.emit(value, (1, value.count) if is_one_slot(value.base) else value.sizes, node)
    if all(np.array_equal(value.terms[:, 0], value.terms[:, slot]) for slot in range(slots)):
        value = Value(value.base, ("BT", "F"), value.terms[:, 0])
    return build.emit(value, value.sizes, node)


def expert_bias(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The biases of the chosen experts, added to their linear."""
    for x, bias in (a.positional[:2], a.positional[1::-1]):
        value, chosen = facts.known.get(x), facts.known.get(bias)
        if not isinstance(chosen, Chosen) or not isinstance(value, Value) or operator_of(value) != "expert_linear":
            continue
        made: Any = value.base
        given = ops.operands(made)
        whole = np.array_equal(value.terms["index"].ravel(), np.arange(math.prod(feature_sizes(made))))
        once = value.is_plain() and bool((value.terms["coef"] == 1).all()) and a.alpha in (None, 1)
        alike = value.dims in ((*chosen.dims, "F"), (*chosen.dims, ""))  # "" if there is one output
        if once and whole and given.bias is None and given.index is chosen.index and alike:
            biased = build.call("expert_linear", given.x, given.index, given.weight, build.weight(chosen.weight))
            return identity(biased, value.dims, value.sizes)
    return None


def scale_slots(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The outputs of a token's experts, each times its weight; or all features of a token times one number."""
    for x, factor in (a.positional[:2], a.positional[1::-1]):
        y, w = facts.plain(x), facts.plain(factor)
        if y is None or w is None or len(y.dims) != len(w.dims):
            continue
        if y.dims == (PAIRS, "F") and w.dims == (PAIRS, "") and w.sizes == y.sizes[:1]:
            y, w = _scaled_once(build, y, w, node)
            made = build.call("scale_slots", build.emit(y, y.sizes, node), build.emit(w, w.sizes, node))
            return identity(made, y.dims, y.sizes)
        y, w = values.without_units(y), values.without_units(w)
        if w.count == 1 < y.count and len(y.sizes) == 1 and y.dims[:-1] == w.dims[:-1] and y.dims[-1] == "F":
            sizes = working_sizes(y)
            name = "mul" if sizes == y.sizes else "scale_slots"
            made = build.call(name, build.emit(y, sizes, node), build.emit(w, (1,), node))
            return identity(made, y.dims, y.sizes)
    return None


def _scaled_once(build: Builder, y: Value, w: Value, node: fx.Node) -> tuple[Value, Value]:
    """`y` and its weights `w`; if `y` has weights already, what these multiply, and the product of all weights."""
    base: Any = y.base
    whole = np.array_equal(y.terms["index"].ravel(), np.arange(y.count)) and (y.terms["coef"] == 1).all()
    if operator_of(y) != "scale_slots" or not whole or feature_sizes(base) != y.sizes:
        return y, w
    factors = build.call("mul", ops.operand(base, "factor"), build.emit(w, w.sizes, node))
    return identity(ops.operand(base, "y"), y.dims, y.sizes), identity(factors, w.dims, w.sizes)


def sum_slots(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The sum over a token's slots."""
    value, over = facts.plain(a.input_), getattr(a, "dim", None)
    if value is None or not isinstance(over, (list, tuple)) or len(over) != 1 or a.keepdim:
        return None
    dim = over[0] % len(value.dims)
    if is_one_slot(value.base) and facts.shape(a.input_)[dim] == 1:
        value = values.without_units(value)
        made = build.emit(value, (value.count,), node)
        return identity(made, value.dims[:dim] + value.dims[dim + 1 :], value.sizes)
    if len(value.sizes) != 2:
        return None
    slots = value.dims[dim] == "F" and value.axis(dim) == 1
    if not slots or operator_of(value) not in ("scale_slots", "expert_linear"):
        return None
    made = build.emit(value, value.sizes, node)
    arguments = made.args if ops.name_of(made.target) == "scale_slots" else (made, None)
    return identity(build.call("combine", *arguments), value.dims[:dim] + value.dims[dim + 1 :], value.sizes[1:])
