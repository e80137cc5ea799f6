"""Rules for conditions on the sequence length: the context is limited so that they always have one value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Facts, Known, Opaque
from qcompile.passes.raising.nodes import Arguments
from qcompile.passes.raising.values import POSITION, Value


@dataclass(frozen=True)
class Reach(Opaque):
    """The largest position plus `offset`: a number less than context + offset and at least `offset`."""

    offset: float


@dataclass(frozen=True)
class Decided(Opaque):
    """A condition that always has the value `value`."""

    value: bool


def largest_position(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The maximum over all positions."""
    value = facts.known.get(a.input_)
    made = node.meta["val"]
    if not isinstance(value, Value) or value.base is not None or not isinstance(made, torch.Tensor) or made.dim():
        return None
    place = len(value.terms) == 1 and (value.terms["kind"] == POSITION).all() and (value.terms["coef"] == 1).all()
    return Reach(node, 0.0) if place else None


def add_to_largest(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The largest position plus a number."""
    known, number = facts.known.get(a.positional[0]), facts.number(a.positional[1])
    if not isinstance(known, Reach) or number is None or a.alpha not in (None, 1):
        return None
    return Reach(node, known.offset + number)


def is_longer(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Whether the sequence is longer than a number: never, once the context is limited accordingly."""
    known, number = facts.known.get(a.positional[0]), facts.number(a.positional[1])
    if not isinstance(known, Reach) or number is None or known.offset > number:
        return None
    build.limit_context(node, int(number - known.offset) + 1)
    return Decided(node, False)


def within(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A value that is right for sequences of some length only, which the context is limited to."""
    build.limit_context(node, a.longest)
    return facts.known.get(a.x)


def decided_where(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """where with a condition that always has the same value."""
    test, yes, no = a.positional[:3]
    decided = facts.known.get(test)
    if not isinstance(decided, Decided):
        return None
    chosen = yes if decided.value else no
    return facts.known.get(chosen) if isinstance(chosen, fx.Node) and facts.shape(chosen) == facts.shape(node) else None
