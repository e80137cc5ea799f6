"""Rules for memory that is allocated and then written: it is known once all of it is filled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.concatenation import concatenated
from qcompile.passes.raising.facts import LENGTHS, Facts, Known, Opaque
from qcompile.passes.raising.nodes import Arguments, is_in_place, operator_name, unsupported
from qcompile.passes.raising.values import Value


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


def empty(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """New memory."""
    return Room(node, node)


def alias(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """All of new memory, as a slice of whole dimensions gives it."""
    room = facts.known.get(a.input_)
    return room if isinstance(room, Room) else None


def part(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Some features of new memory."""
    room = facts.known.get(a.input_)
    if not isinstance(room, Room) or facts.shape(node) == facts.shape(a.input_):
        return room if isinstance(room, Room) else None
    length, start, step = facts.shape(node), a.start or 0, getattr(a, "step", 1)
    dim = a.dim % len(length)
    sized = isinstance(room.root.meta["val"].shape[dim], int)
    if room.dim >= 0 or not sized or not isinstance(start, int) or start < 0 or step not in (1, None):
        return None
    return Room(node, room.root, room.pieces, dim, start, start + length[dim])


def overwrite(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A tensor overwritten by another of its shape and type becomes that other tensor."""
    target, source = a.positional[:2]
    same = facts.shape(target) == facts.shape(source) and target.meta["val"].dtype == source.meta["val"].dtype
    return facts.known.get(source) if same and isinstance(source.meta["val"], torch.Tensor) else None


def scatter(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """slice_scatter: the contents of new memory with one more piece, in another tensor."""
    room, value = facts.known.get(a.input_), facts.value(a.src)
    length, start = facts.shape(node), a.start or 0
    dim = a.dim % len(length)
    sized = isinstance(room, Room) and isinstance(room.root.meta["val"].shape[dim], int)
    if not isinstance(room, Room) or value is None or not sized or room.dim >= 0 or a.step not in (1, None):
        return None
    piece = Room(node, node, dict(room.pieces), dim, start, start + facts.shape(a.src)[dim])
    if not isinstance(start, int) or start < 0 or any(_may_overlap(piece, place) for place in piece.pieces):
        return None
    piece.pieces[dim, piece.start, piece.stop] = value
    return _whole(facts, build, piece) or Room(node, node, piece.pieces)


def fill(facts: Facts, build: Builder, node: fx.Node) -> Known:
    """The effect of copy_ into new memory, which becomes known once it is filled. None for other nodes.

    No node can have read the memory before, since its value was unknown. Raises UnsupportedError if a place is written
    twice.
    """
    copies = is_in_place(node) and operator_name(node) == "copy"
    room = facts.known.get(node.args[0]) if copies else None  # type: ignore[arg-type]
    if not isinstance(room, Room):
        return None
    target: Any = node.args[0]
    source: Any = node.args[1]
    value = facts.require(source, f"copy {node}")
    fits = values.expand(value, facts.shape(target), LENGTHS)
    if fits is None or target.meta["val"].dtype != source.meta["val"].dtype:
        raise unsupported(node, "copies another shape or type into new memory than features that fit")
    if isinstance(facts.known[room.root], Value) or any(_may_overlap(room, place) for place in room.pieces):
        raise unsupported(node, "changes a tensor in place where it was written before")
    room.pieces[room.dim, room.start, room.stop] = fits
    whole = _whole(facts, build, room)
    if whole is not None:
        facts.known[room.root] = whole
    return fits


def rewrite_same(facts: Facts, node: fx.Node) -> Known:
    """The value of a copy_ that overwrites features by equal ones, or overwrites none, and so has no effect.

    Rotary embeddings with a position for each axis of an image do this: for text, all axes have the same position.
    """
    if not is_in_place(node) or operator_name(node) != "copy":
        return None
    target, source = node.args[:2]
    one, other = (facts.known.get(each) for each in (target, source))  # type: ignore[arg-type]
    if not isinstance(one, Value) or not isinstance(other, Value):
        return None
    if not one.count:
        return one
    same_type = target.meta["val"].dtype == source.meta["val"].dtype  # type: ignore[union-attr]
    fits = values.expand(other, facts.shape(target), LENGTHS)  # type: ignore[arg-type]
    if fits is None or not same_type or one.base is not fits.base or one.dims != fits.dims:
        return None
    return one if np.array_equal(one.terms, fits.terms) else None


def _may_overlap(room: Room, place: tuple[int, int, int]) -> bool:
    """Whether `place` overlaps `room`, or may do so because it lies along another dimension."""
    dim, start, stop = place
    return dim != room.dim or dim < 0 or (start < room.stop and room.start < stop)


def _whole(facts: Facts, build: Builder, room: Room) -> Value | None:
    """The concatenation of all pieces once they leave no gap, else None."""
    if room.dim < 0:
        return room.pieces[-1, 0, 0]
    places = sorted(room.pieces)
    length = facts.shape(room.root)[room.dim]
    if [start for _, start, _ in places] + [length] != [0, *(stop for _, _, stop in places)]:
        return None
    return concatenated(build, [room.pieces[place] for place in places], room.dim)
