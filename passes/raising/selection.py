"""Rules for operators that select, split or repeat features."""

from __future__ import annotations

import numpy as np
from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import WHOLE, Constant, Facts, Known
from qcompile.passes.raising.nodes import Arguments
from qcompile.passes.raising.values import Value


def slice_(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.slice along features; along any dimension, if the slice is the whole tensor."""
    if facts.shape(node) == facts.shape(a.input_):
        return facts.known[a.input_]
    value = facts.value(a.input_)
    if value is None or not all(isinstance(n, (int, type(None))) for n in (a.start, a.end, a.step)):
        return None
    return values.cut(value, a.dim % len(value.dims), slice(a.start, a.end, a.step))


def narrow(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.narrow along features."""
    value = facts.value(a.input_)
    if value is None or not isinstance(a.start, int) or not isinstance(a.length, int):
        return None
    dim = a.dim % len(value.dims)
    start = a.start + facts.shape(a.input_)[dim] if a.start < 0 else a.start
    return values.cut(value, dim, slice(start, start + a.length))


def select(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.select of one feature."""
    value = facts.value(a.input_)
    if value is None or not isinstance(a.index, int):
        return None
    return values.select(value, a.dim % len(value.dims), a.index)


def split(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Operators that split the features of one dimension into several tensors."""
    value = facts.value(a.positional[0])
    if value is None:
        return None
    dim = (a.dim or 0) % len(value.dims)
    if "unbind" in str(node.target):
        return [values.select(value, dim, i) for i in range(len(node.meta["val"]))]
    sizes = [facts.length(piece.shape[dim]) for piece in node.meta["val"]]
    stops = np.cumsum(sizes).tolist()
    return [values.cut(value, dim, slice(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]


def getitem(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """One of several results."""
    pieces = facts.known.get(node.args[0])  # type: ignore[arg-type]
    if isinstance(pieces, (list, tuple)) and isinstance(node.args[1], int):
        piece: Known = pieces[node.args[1]]
        return piece
    return None


def index_select(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.index_select of features by constant indices."""
    chosen = facts.known.get(a.index)
    value = facts.value(a.input_) if isinstance(chosen, Constant) else None
    if value is None or not isinstance(chosen, Constant):
        return None
    return values.take(value, a.dim % len(value.dims), facts.evaluate(chosen.node).numpy())


def index(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """tensor[..., index, ...] with one constant vector of indices, along features."""
    given = [(dim, each) for dim, each in enumerate(a.indices) if each is not None]
    if len(given) != 1 or given[0][1].meta["val"].dtype not in WHOLE or given[0][1].meta["val"].dim() != 1:
        return None
    dim, chosen = given[0][0], facts.known.get(given[0][1])
    value = facts.value(a.input_) if isinstance(chosen, Constant) else None
    if value is None or not isinstance(chosen, Constant):
        return None
    return values.take(value, dim, facts.evaluate(chosen.node).numpy())


def repeat_interleave(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.repeat_interleave: each feature several times in a row."""
    value, count = facts.value(a.positional[0]), a.positional[1]
    if value is None or not isinstance(count, int) or a.dim is None:
        return None
    return values.repeat(value, a.dim % len(value.dims), count, inner=True)


def repeat(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.repeat along features, or over the batch or the tokens where the tensor does not depend on them."""
    value: Value | None = facts.value(a.positional[0])
    counts = a.positional[1]
    if value is None or not all(isinstance(c, (int, fx.Node)) for c in counts):
        return None
    value = Value(value.base, ("",) * (len(counts) - len(value.dims)) + value.dims, value.terms)
    for dim, count in enumerate(counts):
        if value is not None and count != 1:
            missing = value.dims[dim] == "" and isinstance(count, fx.Node)
            value = value if missing else values.repeat(value, dim, int(count), inner=False)
    return value
