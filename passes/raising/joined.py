"""Values assembled from several raised tensors: concatenated, or copied piecewise into new memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.passes import gather
from qcompile.passes.gather import Index
from qcompile.passes.raising import values
from qcompile.passes.raising.aten import HANDLERS, handles
from qcompile.passes.raising.heads import HANDLERS as _WITH_HEADS
from qcompile.passes.raising.nodes import Arguments, is_in_place, operator_name
from qcompile.passes.raising.raiser import LENGTHS, Known, Opaque, Raiser, features
from qcompile.passes.raising.routing import based, overridden
from qcompile.passes.raising.values import Value

__all__ = ["HANDLERS"]

assert _WITH_HEADS is HANDLERS  # the handler that joins norms of heads must be registered first


# ---- concatenation ----------------------------------------------------------------------------------


def joined(r: Raiser, pieces: Sequence[Value], dim: int) -> Value | None:
    """torch.cat of features of one raised tensor, or of several through a gather."""
    found = values.concatenate(pieces, dim)
    bases = list(dict.fromkeys(piece.base for piece in pieces))
    if found is not None or len(bases) < 2 or any("BT" in d and "F" in d for piece in pieces for d in piece.dims):
        return found
    if any(base is None for base in bases):
        return None
    flat = [r.flat(base) for base in bases if base is not None]
    starts = np.cumsum([0, *(features(base)[0] for base in flat)])
    like = [
        replace(piece, base=flat[0], terms=_shifted(piece, int(starts[bases.index(piece.base)]))) for piece in pieces
    ]
    found = values.concatenate(like, dim)
    return found and replace(found, base=_gather(r, flat, np.arange(starts[-1])))


def _shifted(value: Value, start: int) -> values.Terms:
    """The terms of `value` when its base's features start at `start`."""
    terms = value.terms.copy()
    terms["index"] = np.where(terms["index"] >= 0, terms["index"] + start, terms["index"])
    return terms


def _gather(r: Raiser, sources: Sequence[fx.Node], index: Index) -> fx.Node:
    return r.call("gather_features", list(sources), r.constant("gather", torch.from_numpy(index)))


def gathered(r: Raiser, base: fx.Node, index: Index, node: Any) -> fx.Node:
    """The features `index` of `base` [B, T, F] as a gather that reads no more of each source than it needs."""
    table = gather.table_of(r.out)

    def cut(source: fx.Node, used: Index) -> tuple[fx.Node, Index]:
        in_order = np.array_equal(used, np.arange(used[0], used[0] + len(used)))
        if in_order or (ops.name_of(source.target) == "linear" and source.args[1].op == "get_attr"):  # type: ignore[union-attr]
            return r.select_features(source, used, node), np.arange(len(used))
        least = int(used.min())
        return r.select_features(source, np.arange(least, used.max() + 1), node), used - least

    sources, index = gather.flattened([base], index, table)
    sources, index = gather.trimmed(sources, index, cut)
    whole = len(sources) == 1 and np.array_equal(index, np.arange(features(sources[0])[0]))
    return sources[0] if whole else _gather(r, sources, index)


_cat_of_one = HANDLERS["cat"]


@handles("cat", "concat")
def _cat(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Concatenations that other handlers do not know, as features of several raised tensors."""
    found = _cat_of_one(r, node, a)
    if found is not None:
        return found
    pieces = [known for piece in a.tensors if isinstance(known := r.known.get(piece), Value)]
    alike = len(pieces) == len(a.tensors) and len({len(piece.dims) for piece in pieces}) == 1
    return joined(r, pieces, (a.dim or 0) % len(pieces[0].dims)) if alike else None


@handles("pad", "constant_pad_nd")
def _padded(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Features with zeros before or after them."""
    value = based(r, a.input_)
    zeros = getattr(a, "mode", "constant") == "constant" and a.value in (None, 0)
    if value is None or not zeros or len(a.pad) != 2 or value.dims[-1] != "F" or min(a.pad) < 0:
        return None
    if any("BT" in dim and "F" in dim for dim in value.dims):
        return None
    assert value.base is not None
    flat = r.flat(value.base)
    count = features(flat)[0]
    like = value.terms.ravel()[0].copy()
    like["index"] = count  # the zero after all features
    terms = np.pad(value.terms, [(0, 0)] * len(value.sizes) + [tuple(a.pad)], constant_values=like)
    return Value(_gather(r, [flat], np.append(np.arange(count), -1)), value.dims, terms)


# ---- memory filled piecewise ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Room(Opaque):
    """New, uninitialized memory, or its features `start` to `stop` along dimension `dim` (-1: all of it).

    `root` is the node that allocated the memory. `pieces` maps (dim, start, stop) to the Value copied there.
    """

    root: fx.Node
    pieces: dict[tuple[int, int, int], Value] = field(default_factory=dict, compare=False)
    dim: int = -1
    start: int = 0
    stop: int = 0


@handles("new_empty", "empty", "empty_like")
def _empty(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    return Room(node, node)


@overridden("slice", "narrow")
def _slice(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Some features of new memory."""
    room = r.known.get(a.input_)
    if not isinstance(room, Room) or r.shape(node) == r.shape(a.input_):
        return room if isinstance(room, Room) else None
    length, start, step = r.shape(node), a.start or 0, getattr(a, "step", 1)
    dim = a.dim % len(length)
    sized = isinstance(room.root.meta["val"].shape[dim], int)
    if room.dim >= 0 or not sized or not isinstance(start, int) or start < 0 or step not in (1, None):
        return None
    return Room(node, room.root, room.pieces, dim, start, start + length[dim])


def filled(r: Raiser, node: fx.Node) -> Known:
    """The effect of copy_ into new memory, which becomes known once it is filled. None for other nodes.

    Nothing can have read the memory before, since its value was unknown. No place may be written twice.
    """
    copies = is_in_place(node) and operator_name(node) == "copy"
    room = r.known.get(node.args[0]) if copies else None  # type: ignore[arg-type]
    if not isinstance(room, Room):
        return None
    target: Any = node.args[0]
    source: Any = node.args[1]
    value = r.require(source, f"copy {node}")
    fits = values.expand(value, r.shape(target), LENGTHS)
    if fits is None or target.meta["val"].dtype != source.meta["val"].dtype:
        raise r.unsupported(node, "puts something else into new memory than features of its shape and type")
    if isinstance(r.known[room.root], Value) or any(_may_overlap(room, place) for place in room.pieces):
        raise r.unsupported(node, "changes a tensor in place where it was written before")
    room.pieces[room.dim, room.start, room.stop] = fits
    whole = _concatenated(r, room)
    if whole is not None:
        r.known[room.root] = whole
    return fits


@handles("slice_scatter")
def _scattered(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """The functional counterpart: the old contents with one more piece."""
    room, value = r.known.get(a.input_), r.value(a.src)
    length, start = r.shape(node), a.start or 0
    dim = a.dim % len(length)
    sized = isinstance(room, Room) and isinstance(room.root.meta["val"].shape[dim], int)
    if not isinstance(room, Room) or value is None or not sized or room.dim >= 0 or a.step not in (1, None):
        return None
    part = Room(node, node, dict(room.pieces), dim, start, start + r.shape(a.src)[dim])
    if not isinstance(start, int) or start < 0 or any(_may_overlap(part, place) for place in part.pieces):
        return None
    part.pieces[dim, part.start, part.stop] = value
    return _concatenated(r, part) or Room(node, node, part.pieces)


def _may_overlap(room: Room, place: tuple[int, int, int]) -> bool:
    """Whether `place` overlaps `room`, or may do so because it lies along another dimension."""
    dim, start, stop = place
    return dim != room.dim or dim < 0 or (start < room.stop and room.start < stop)


def _concatenated(r: Raiser, room: Room) -> Value | None:
    """The concatenation of all pieces once they leave no gap, else None."""
    if room.dim < 0:
        return room.pieces[-1, 0, 0]
    places = sorted(room.pieces)
    length = r.shape(room.root)[room.dim]
    if [start for _, start, _ in places] + [length] != [0, *(stop for _, _, stop in places)]:
        return None
    return joined(r, [room.pieces[place] for place in places], room.dim)
