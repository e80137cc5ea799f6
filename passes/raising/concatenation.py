"""Rules that assemble a value from features of one or several raised tensors: cat, stack, pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.nodes import Arguments
from qcompile.passes.raising.values import Terms, Value


def cat(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """torch.cat of features of one raised tensor, or of functions of the position."""
    pieces = _pieces(facts, a.tensors)
    return pieces and values.concatenate(pieces, (a.dim or 0) % len(pieces[0].dims))


def cat_several(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """torch.cat of features of several raised tensors."""
    pieces = [known for piece in a.tensors if isinstance(known := facts.known.get(piece), Value)]
    alike = len(pieces) == len(a.tensors) and len({len(piece.dims) for piece in pieces}) == 1
    pieces = [piece for piece in pieces if piece.count] or pieces  # as parts of heads that are not rotated
    return concatenated(build, pieces, (a.dim or 0) % len(pieces[0].dims)) if alike else None


def stack(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """torch.stack of features of one or several raised tensors, or of functions of the position."""
    pieces = _pieces(facts, a.tensors)
    if pieces is None:
        return None
    dim = (a.dim or 0) % (len(pieces[0].dims) + 1)
    return concatenated(build, [values.unsqueeze(piece, dim) for piece in pieces], dim)


def pad(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Features with zeros before or after them."""
    value = facts.plain(a.input_)
    zeros = getattr(a, "mode", "constant") == "constant" and a.value in (None, 0)
    if value is None or not zeros or len(a.pad) != 2 or value.dims[-1] != "F" or min(a.pad) < 0 or _has_pairs(value):
        return None
    assert value.base is not None
    flat = build.flat(value.base)
    count = feature_sizes(flat)[0]
    like = value.terms.ravel()[0].copy()
    like["index"] = count  # the zero after all features
    terms = np.pad(value.terms, [(0, 0)] * len(value.sizes) + [tuple(a.pad)], constant_values=like)
    return Value(build.gather([flat], np.append(np.arange(count), -1)), value.dims, terms)


def concatenated(build: Builder, pieces: Sequence[Value], dim: int) -> Value | None:
    """torch.cat of features of one raised tensor, or of several through a gather."""
    whole = values.concatenate(pieces, dim)
    bases = list(dict.fromkeys(piece.base for piece in pieces))
    if whole is not None or len(bases) < 2 or any(_has_pairs(piece) for piece in pieces):
        return whole
    if any(base is None for base in bases):
        return None
    if len({float(abs(coef)) for piece in pieces for coef in np.unique(piece.terms["coef"])}) > 1:
        pieces = [_unscaled(build, piece) for piece in pieces]
        bases = list(dict.fromkeys(piece.base for piece in pieces))
    flat = [build.flat(base) for base in bases if base is not None]
    starts = np.cumsum([0, *(feature_sizes(base)[0] for base in flat)])
    like = [
        replace(piece, base=flat[0], terms=_shifted(piece, int(starts[bases.index(piece.base)]))) for piece in pieces
    ]
    whole = values.concatenate(like, dim)
    return whole and replace(whole, base=build.gather(flat, np.arange(starts[-1])))


def _unscaled(build: Builder, piece: Value) -> Value:
    """`piece` with its constant factor applied, so that features of other factors can stand beside it."""
    factors = np.unique(piece.terms["coef"])
    if not piece.is_plain() or len(factors) > 1 or factors[0] == 1:
        return piece
    assert piece.base is not None
    return replace(piece.scaled(1 / factors[0]), base=build.call("scale", piece.base, float(factors[0])))


def _pieces(facts: Facts, tensors: Sequence[fx.Node]) -> list[Value] | None:
    """All `tensors` as Values; None if one is none."""
    pieces = [value for tensor in tensors if (value := facts.value(tensor)) is not None]
    return pieces if len(pieces) == len(tensors) else None


def _shifted(value: Value, start: int) -> Terms:
    """The terms of `value` when its base's features start at `start`."""
    terms = value.terms.copy()
    terms["index"] = np.where(terms["index"] >= 0, terms["index"] + start, terms["index"])
    return terms


def _has_pairs(value: Value) -> bool:
    """Whether a dimension of `value` runs over tokens and features at once."""
    return any("BT" in dim and "F" in dim for dim in value.dims)
