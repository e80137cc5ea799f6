"""The meaning of an ATen tensor: a linear combination of the features of one raised tensor.

Views, transposes, slices, concatenations, expansions and rotary embeddings are linear in the features of one tensor,
and their coefficients depend on the position only. There are many ways to write each of them in ATen. So raising does
not match the operators: it computes a table of terms for each tensor. Feature f is

    sum over terms of  coef * kind(position) * base[index]

where kind is one of 1, position, cos(freq * position), sin(freq * position), and index -1 stands for the constant 1.
A table without a base is a function of the position, such as a rotary table. The argument of its cos and sin is linear
in the position, because only linear operations produce kind `POSITION`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from qcompile import ops

ONE, POSITION, COS, SIN = range(4)
MOST_FEATURES = 1 << 24
"""Most features of a value. A size computed from the stand-in numbers of batch and tokens (LENGTHS) is far larger."""
TERM = np.dtype([("index", np.int64), ("coef", np.float64), ("kind", np.int8), ("freq", np.float64)])
Terms = NDArray[np.void]


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor with features of the raised tensor `base`, or, if `base` is None, a function of the position.

    `dims` has one string per dimension with the axes that the dimension runs over, outermost first: "B" for batch, "T"
    for tokens, "F" for features, "BT" for two flattened axes, "" for size 1 or no dependence. A dimension holds at most
    one "F" axis. `terms` [terms, *feature sizes] has the feature axes in the order of `dims`.
    """

    base: fx.Node | None
    dims: tuple[str, ...]
    terms: Terms

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the feature axes, in order of appearance."""
        return tuple(self.terms.shape[1:])

    @property
    def count(self) -> int:
        """Number of features."""
        return math.prod(self.sizes)

    def scaled(self, factor: float) -> Value:
        """This value times a constant."""
        terms = self.terms.copy()
        terms["coef"] *= factor
        return replace(self, terms=terms)

    def divided(self, number: float) -> Value:
        """This value over a number. Coefficients that equal the number become exactly 1, unlike in a product."""
        terms = self.terms.copy()
        terms["coef"] /= number
        return replace(self, terms=terms)

    def axis(self, dim: int) -> int:
        """The axis of `terms` that holds the features of dimension `dim`."""
        return 1 + sum("F" in d for d in self.dims[:dim])

    def is_plain(self) -> bool:
        """Whether every element is one unmixed element of `base`, up to a factor."""
        term = self.terms[0]
        alone = self.base is not None and len(self.terms) == 1
        return bool(alone and (term["kind"] == ONE).all() and (term["index"] >= 0).all())


def make_terms(
    sizes: Sequence[int], index: NDArray[np.int64] | int = -1, coef: NDArray[np.float64] | float = 1.0, kind: int = ONE
) -> Terms:
    """One term over features of `sizes`."""
    terms = np.zeros((1, *sizes), TERM)
    terms["index"], terms["coef"], terms["kind"] = index, coef, kind
    return terms


def operator_of(value: Value | None) -> str | None:
    """The qcompile operator that computed the base of `value`; None if there is no base."""
    return None if value is None or value.base is None else ops.name_of(value.base.target)


def identity(base: fx.Node, dims: Sequence[str], sizes: Sequence[int]) -> Value:
    """All features of `base`, shaped as `sizes`."""
    return Value(base, tuple(dims), make_terms(sizes, np.arange(math.prod(sizes)).reshape(sizes)))


# ---- layout ------------------------------------------------------------------------------------------


def permute(value: Value, order: Sequence[int]) -> Value:
    """Tensor.permute."""
    order = [d % len(value.dims) for d in order]
    axes = [value.axis(d) for d in order if "F" in value.dims[d]]
    return Value(value.base, tuple(value.dims[d] for d in order), value.terms.transpose(0, *axes))


def reshape(value: Value, target: Sequence[int], lengths: dict[str, int]) -> Value | None:
    """Tensor.reshape to `target`; None if a dimension of `target` is not made of whole axes or of parts of features.

    `lengths` are the sizes that stand for batch and tokens: large primes, so that a product shows its factors.
    """
    if not value.count:
        names = {size: axis for axis, size in lengths.items()} | {1: ""}
        features = [size for size in target if size not in names]
        return Value(value.base, tuple(names.get(size, "F") for size in target), make_terms(features))
    sizes = iter(value.sizes)
    atoms = [(axis, next(sizes) if axis == "F" else lengths[axis]) for dim in value.dims for axis in dim]
    queue = [atom for atom in atoms if atom[1] > 1]
    dims: list[str] = []
    features = []
    for size in target:
        dim, count = "", 1
        while size > 1:
            if not queue:
                return None
            axis, have = queue.pop(0)
            if axis == "F" and have > size and have % size == 0:
                queue.insert(0, ("F", have // size))
                have = size
            elif size % have:
                return None
            size //= have
            if axis == "F":
                if "F" in dim and dim[-1] != "F":
                    return None
                count *= have
                dim = dim if dim.endswith("F") else dim + "F"
            else:
                dim += axis
        dims.append(dim)
        if "F" in dim:
            features.append(count)
    if queue:
        return None
    return Value(value.base, tuple(dims), value.terms.reshape(len(value.terms), *features))


def expand(value: Value, target: Sequence[int], lengths: dict[str, int]) -> Value | None:
    """Tensor.expand to `target`: adds dimensions on the left and repeats those of size 1. None: too many features."""
    dims = ("",) * (len(target) - len(value.dims)) + value.dims
    terms, axis, made = value.terms, 1, []
    names = {size: name for name, size in lengths.items()}
    for dim, size in zip(dims, target, strict=True):
        if dim == "" and size in names:
            dim = names[size]
        elif dim in ("", "F") and size > 1:
            terms = terms if dim else np.expand_dims(terms, axis)
            if terms.size * size > MOST_FEATURES and terms.shape[axis] == 1:
                return None
            terms = np.repeat(terms, size, axis) if terms.shape[axis] == 1 else terms
            dim = "F"
        axis += "F" in dim
        made.append(dim)
    return Value(value.base, tuple(made), terms)


def cut(value: Value, dim: int, where: slice) -> Value | None:
    """value[..., where, ...] along a feature dimension; None if the dimension holds anything else."""
    if value.dims[dim] != "F":
        return None
    return replace(value, terms=value.terms[(slice(None),) * value.axis(dim) + (where,)])


def take(value: Value, dim: int, index: NDArray[np.int64]) -> Value | None:
    """Tensor.index_select along a feature dimension; None if the dimension holds anything else."""
    if value.dims[dim] != "F":
        return None
    return replace(value, terms=value.terms.take(index, value.axis(dim)))


def select(value: Value, dim: int, index: int) -> Value | None:
    """value[..., index, ...]: one feature of a dimension, which is removed."""
    if value.dims[dim] == "":
        return replace(value, dims=value.dims[:dim] + value.dims[dim + 1 :])
    if value.dims[dim] != "F":
        return None
    terms = value.terms.take([index], value.axis(dim)).squeeze(value.axis(dim))
    return Value(value.base, value.dims[:dim] + value.dims[dim + 1 :], terms)


def unsqueeze(value: Value, dim: int) -> Value:
    """Tensor.unsqueeze: a dimension of size 1 before dimension `dim`."""
    return replace(value, dims=(*value.dims[:dim], "", *value.dims[dim:]))


def repeat(value: Value, dim: int, count: int, inner: bool) -> Value | None:
    """Each feature `count` times in a row (`inner`), or the whole dimension `count` times; None if that is unknown."""
    if value.dims[dim] == "":
        value = as_features(value, dim)
    if value.dims[dim] != "F" or value.count * count > MOST_FEATURES:
        return None
    axis = value.axis(dim)
    size = value.terms.shape[axis]
    order = np.arange(size).repeat(count) if inner else np.tile(np.arange(size), count)
    return take(value, dim, order)


def as_features(value: Value, dim: int) -> Value:
    """`value` with dimension `dim` of size 1 turned into a feature axis of one element."""
    dims = (*value.dims[:dim], "F", *value.dims[dim + 1 :])
    return Value(value.base, dims, np.expand_dims(value.terms, value.axis(dim)))


def without_units(value: Value) -> Value:
    """`value` without its feature axes of one element; the dimensions stay, with size 1."""
    sizes = iter(value.sizes)
    dims = tuple(d.replace("F", "") if "F" in d and next(sizes) == 1 else d for d in value.dims)
    return Value(value.base, dims, value.terms.reshape(len(value.terms), *(n for n in value.sizes if n > 1)))


def concatenate(values: Sequence[Value], dim: int) -> Value | None:
    """torch.cat along a feature dimension, of values with one base."""
    values = [as_features(v, dim) if v.dims[dim] == "" else v for v in values]
    first = values[0]
    bases = {v.base for v in values if v.base is not None}
    dims = tuple(_join(d) for d in zip(*(v.dims for v in values), strict=True))
    if len(bases) > 1 or first.dims[dim] != "F" or None in dims:
        return None
    if any(tuple("F" in d for d in v.dims) != tuple("F" in d for d in dims) for v in values):  # type: ignore[operator]
        return None
    most = max(len(v.terms) for v in values)
    padded = [np.concatenate((v.terms, np.zeros((most - len(v.terms), *v.sizes), TERM))) for v in values]
    return Value(next(iter(bases), None), dims, np.concatenate(padded, first.axis(dim)))  # type: ignore[arg-type]


def _join(dims: Sequence[str]) -> str | None:
    """The dimension to which `dims` broadcast; None if they do not."""
    wide = {d for d in dims if d}
    return None if len(wide) > 1 else next(iter(wide), "")


# ---- arithmetic --------------------------------------------------------------------------------------


def align(a: Value, b: Value) -> tuple[tuple[str, ...], Terms, Terms] | None:
    """Broadcast two values: the common dims, and the terms of each over the common features."""
    rank = max(len(a.dims), len(b.dims))
    padded = [("",) * (rank - len(v.dims)) + v.dims for v in (a, b)]
    dims = tuple(_join(pair) for pair in zip(*padded, strict=True))
    if None in dims:
        return None
    spread = []
    for value, own in zip((a, b), padded, strict=True):
        terms, axis = value.terms, 1
        for mine, common in zip(own, dims, strict=True):
            if "F" in common:  # type: ignore[operator]
                terms = terms if "F" in mine else np.expand_dims(terms, axis)
                axis += 1
        spread.append(terms)
    try:
        sizes = np.broadcast_shapes(*(t.shape[1:] for t in spread))
    except ValueError:
        return None
    if math.prod(sizes) > MOST_FEATURES:
        return None
    first, second = (np.broadcast_to(t, (len(t), *sizes)) for t in spread)
    return dims, first, second  # type: ignore[return-value]


def add(a: Value, b: Value) -> Value | None:
    """a + b; None if two different bases are involved."""
    aligned = align(a, b)
    if aligned is None or (a.base is not None and b.base is not None and a.base is not b.base):
        return None
    dims, left, right = aligned
    return Value(a.base or b.base, dims, _simplified(np.concatenate((left, right))))


def multiply(a: Value, b: Value) -> Value | None:
    """a * b where one is a function of the position; None if the product is outside the algebra."""
    aligned = align(a, b)
    if aligned is None or (a.base is not None and b.base is not None):
        return None
    dims, left, right = aligned
    sizes = left.shape[1:]
    left, right = left[:, None], right[None]
    product = np.zeros((left.shape[0], right.shape[1], *sizes), TERM)
    product["coef"] = left["coef"] * right["coef"]
    both = (left["kind"] != ONE) & (right["kind"] != ONE) & (product["coef"] != 0)
    if both.any() or ((left["index"] >= 0) & (right["index"] >= 0) & (product["coef"] != 0)).any():
        return None
    product["kind"] = np.where(left["kind"] != ONE, left["kind"], right["kind"])
    product["freq"] = np.where(left["kind"] != ONE, left["freq"], right["freq"])
    product["index"] = np.maximum(left["index"], right["index"])
    return Value(a.base or b.base, dims, _simplified(product.reshape(-1, *sizes)))


def trigonometric(value: Value, kind: int) -> Value | None:
    """cos or sin of a value that is linear in the position, or constant."""
    if value.base is not None or len(value.terms) != 1 or not np.isin(value.terms["kind"], (ONE, POSITION)).all():
        return None
    terms = np.zeros(value.terms.shape, TERM)
    moving = value.terms["kind"] == POSITION
    fixed = (np.cos if kind == COS else np.sin)(value.terms["coef"])
    terms["index"] = -1
    terms["kind"] = np.where(moving, kind, ONE)
    terms["freq"] = np.where(moving, value.terms["coef"], 0.0)
    terms["coef"] = np.where(moving, 1.0, fixed)
    return replace(value, terms=terms)


def _simplified(terms: Terms) -> Terms:
    """Terms of the same kind added up and zero terms dropped; at least one term remains."""
    kept: list[Terms] = []
    for term in terms:
        if not term["coef"].any():
            continue
        twin = next((k for k in kept if all((k[f] == term[f]).all() for f in ("index", "kind", "freq"))), None)
        if twin is None:
            kept.append(term.copy())
        else:
            twin["coef"] += term["coef"]
    return np.stack(kept) if kept else terms[:1].copy()
