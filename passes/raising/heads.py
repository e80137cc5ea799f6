"""Norms of heads: a separate norm for each head, or a norm after the rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.passes.raising import attention, patterns, values
from qcompile.passes.raising.aten import HANDLERS
from qcompile.passes.raising.nodes import Arguments
from qcompile.passes.raising.raiser import Known, Raiser, Weight
from qcompile.passes.raising.routing import overridden
from qcompile.passes.raising.values import Value, identity

__all__ = ["HANDLERS"]

NORMS = ("rms_norm", "layer_norm")


@overridden("cat", "concat")
def _norms_of_heads(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Heads of one value that pass through separate norms become one norm with different weights per head."""
    pieces = [r.known.get(piece) for piece in a.tensors]
    found = [piece for piece in pieces if isinstance(piece, Value) and _is_whole_norm(piece)]
    dim = (a.dim or 0) % len(node.meta["val"].shape)
    if len(found) < 2 or len(found) != len(pieces) or found[0].dims[dim] not in ("", "F"):
        return None
    norms: list[Any] = [piece.base for piece in found]
    parts = [_columns(norm.args[0]) for norm in norms]
    source, start, _ = parts[0]
    size = found[0].sizes[-1]
    in_order = all(part == (source, start + i * size, start + (i + 1) * size) for i, part in enumerate(parts))
    like = {(norm.target, norm.args[-1], *(w is None for w in norm.args[1:-1])) for norm in norms}
    if not in_order or len(like) > 1 or any(piece.count != size or piece.dims != found[0].dims for piece in found):
        return None
    heads = len(norms)
    dims = tuple("F" if place == dim else axes for place, axes in enumerate(found[0].dims))
    sizes = [length for length, axes in zip(r.shape(node), dims, strict=True) if axes == "F"]
    index = np.arange(start, start + heads * size)
    x = r.shaped(r.select_features(source, index, node), (heads, size))
    weights = [_joined(r, [norm.args[place] for norm in norms]) for place in range(1, len(norms[0].args) - 1)]
    made = r.call(str(ops.name_of(norms[0].target)), x, *weights, norms[0].args[-1])
    return identity(made, dims, sizes)


def _is_whole_norm(value: Value) -> bool:
    """Whether `value` is the unchanged, complete result of one norm, with its features last."""
    if value.base is None or ops.name_of(value.base.target) not in NORMS or not value.is_plain():
        return False
    index = value.terms["index"].ravel()
    return np.array_equal(index, np.arange(len(index))) and value.dims[-1] == "F" and _coefs_are_one(value)


def _coefs_are_one(value: Value) -> bool:
    return bool((value.terms["coef"] == 1).all())


def _columns(x: Any) -> tuple[fx.Node, int, int]:
    """(source, start, stop): the columns of a value [.., F] that `x` holds, whether or not split into heads."""
    if ops.name_of(x.target) == "split_heads":
        x = x.args[0]
    if ops.name_of(x.target) == "slice_features":
        return x.args
    return x, 0, int(np.prod(x.meta["val"].shape[2:]))


def _joined(r: Raiser, weights: Sequence[fx.Node | None]) -> fx.Node | None:
    """Weights [D] of the heads concatenated to one [H * D]."""
    names = [str(weight.target) for weight in weights if weight is not None]
    if not names:
        return None
    key, store = ("heads", *names), r.out.weights
    if key not in r.made:
        name, size = f"{names[0]}.heads{len(r.made)}", sum(store.entries[n].shape[0] for n in names)
        store.add(name, (size,), torch.float32, lambda: torch.cat([store[n].float() for n in names]))
        r.made[key] = r.read(name)
    return r.made[key]


def behind_rotation(r: Raiser, node: fx.Node, value: Value, eps: float) -> Value | None:
    """An rms_norm without weight of rotated heads. Rotation keeps the norm, so it is the rotation of the norm."""
    if value.base is None or len(value.sizes) not in (1, 2):
        return None
    shape = (1, *value.sizes)[-2:]
    turned = attention.rotation(value.terms.reshape(len(value.terms), *shape), r.source.info.max_position)
    if turned is None or turned[2] != 1.0:
        return None
    source = turned[0]
    x = r.emit(Value(value.base, value.dims, values.make_terms(shape, source)), shape, node)
    made = r.call("rms_norm", x, None, float(eps))
    place = np.full(int(source.max()) + 1, -1)
    place[source.ravel()] = np.arange(source.size)
    terms = value.terms.copy()
    terms["index"] = np.where(terms["index"] >= 0, place[terms["index"]], -1)
    return Value(made, value.dims, terms)


@overridden("add")
def _spread_bias(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """A bias that is expanded over batch and tokens before it is added."""
    for x, bias in (a.positional[:2], a.positional[1::-1]):
        value = r.known.get(x) if isinstance(x, fx.Node) else None
        if not isinstance(value, Value) or value.base is None or a.alpha not in (None, 1):
            continue
        if not patterns.is_call(bias, "expand", "expand_as") or not isinstance(r.known.get(bias.args[0]), Weight):
            continue
        if bias.args[0].meta["val"].dim() == 1 and r.shape(bias) == r.shape(x):
            return patterns.with_weight(r, "add", x, bias.args[0])
    return None
