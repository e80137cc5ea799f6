"""Rules for operators that copy or rearrange a tensor: casts, views, expansions and permutations."""

from __future__ import annotations

from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import LENGTHS, WHOLE, Constant, Facts, Known, Opaque, Spread
from qcompile.passes.raising.nodes import Arguments


def copy(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A copy, or a cast to a type that holds all values of its operand: floating point, or between wide integers."""
    source = a.positional[0]
    known = facts.known.get(source)
    if isinstance(known, Opaque):
        return known if source is facts.token_ids and not node.meta["val"].is_floating_point() else None
    given, made = source.meta["val"].dtype, node.meta["val"].dtype
    holds = made.is_floating_point or made == given or (made in WHOLE and not given.is_floating_point)
    return known if holds else None


def view(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.view and its relatives, also of token ids in their own shape."""
    known = facts.known.get(a.positional[0])
    if node.meta["val"].dtype != a.positional[0].meta["val"].dtype:  # view(dtype) reinterprets the bits
        return None
    if isinstance(known, Opaque) and known.node is facts.token_ids and facts.shape(node) == facts.shape(known.node):
        return known
    if isinstance(known, Spread):
        return known if facts.shape(node) == facts.shape(known.node) else None
    value = facts.value(a.positional[0])
    return value and values.reshape(value, facts.shape(node), LENGTHS)


def expand(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.expand; a constant that is repeated over the batch stays known as such."""
    source, shape = a.positional[0], facts.shape(node)
    if isinstance(facts.known.get(source), Constant) and shape == [LENGTHS["B"], *facts.shape(source)]:
        return Spread(node, source)
    value = facts.value(source)
    return value and values.expand(value, shape, LENGTHS)


def unsqueeze(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.unsqueeze."""
    value = facts.value(a.input_)
    return value and values.unsqueeze(value, a.dim % (len(value.dims) + 1))


def permute(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.permute."""
    value = facts.value(a.input_)
    return value and values.permute(value, a.dims)


def transpose(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.transpose of two given dimensions."""
    value = facts.value(a.positional[0])
    if value is None:
        return None
    order = list(range(len(value.dims)))
    first, second = (d % len(order) for d in a.positional[1:3])
    order[first], order[second] = second, first
    return values.permute(value, order)


def transpose_last(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.t and Tensor.mT: the last two dimensions change places."""
    value = facts.value(a.positional[0])
    return value and values.permute(value, [*range(len(value.dims) - 2), -1, -2])
