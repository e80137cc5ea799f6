"""Tensors of one token in a loop over tokens, as sums of products that are linear in a state.

A `Form` gives each dimension of a tensor an axis, which is the number of an index, as a letter is in einsum. Each of
its terms is a number times factors: tensors that do not depend on the state, and at most one state. A term is summed
over the axes that are not dimensions of the form. So the form of `(state * key).sum(1)` says which axis of the state is
contracted with which axis of the key, in whatever way the code computes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qcompile.checkpoints.loop_body import Body, Ref, Step
from qcompile.checkpoints.loop_numbers import refused

BATCH = 0
"""The axis of sequences, the first of every tensor of a token."""
Axes = tuple[int | None, ...]
"""The axes of a tensor's dimensions; None for one of size 1, or along which all elements are equal."""


class NotLinear(Exception):
    """A tensor that depends on a state is no sum of products with it; `step` is the step that makes it."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.name)
        self.step = step


@dataclass(frozen=True)
class Factor:
    """The tensor `ref`, by its axes. With `state`, it is a state, before ("before") or after ("own") its update."""

    ref: Ref
    axes: Axes
    state: bool = False

    def renamed(self, names: Mapping[int, int]) -> Factor:
        """This factor with other numbers of axes."""
        return replace(self, axes=tuple(None if axis is None else names.get(axis, axis) for axis in self.axes))


@dataclass(frozen=True)
class Term:
    """`number` times the product of `factors`."""

    number: float
    factors: tuple[Factor, ...]

    @property
    def states(self) -> list[Factor]:
        """The factors that are states."""
        return [factor for factor in self.factors if factor.state]

    @property
    def axes(self) -> set[int]:
        """All axes of the factors."""
        return {axis for factor in self.factors for axis in factor.axes if axis is not None}

    def renamed(self, names: Mapping[int, int]) -> Term:
        """This term with other numbers of axes."""
        return Term(self.number, tuple(factor.renamed(names) for factor in self.factors))


@dataclass(frozen=True)
class Form:
    """A sum of terms, by the axes of its dimensions."""

    dims: Axes
    terms: tuple[Term, ...]


class Forms:
    """Forms of the tensors of `body`. The states are its carried results, and `updated` those after their update."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.sizes: dict[int, int] = {}
        self._numbers = itertools.count(BATCH + 1)
        self._stateful: dict[Ref, bool] = {}

    # ---- tensors -------------------------------------------------------------------------------

    def step(self, ref: Ref) -> Step:
        """The step that makes `ref`, of this token or the one before."""
        return self.body.steps[ref.number]

    def shape(self, ref: Ref) -> tuple[Any, ...]:
        """The shape of a tensor in the body."""
        if ref.kind == "outside":
            return tuple(self.body.outside[ref.number].shape)
        return self.step(ref).shapes[ref.item]

    def is_stateful(self, ref: Ref) -> bool:
        """Whether a tensor depends on a state."""
        if ref not in self._stateful:
            reads = self.step(ref).reads if ref.kind == "own" else []
            self._stateful[ref] = ref.kind == "before" or any(self.is_stateful(read) for read in reads)
        return self._stateful[ref]

    def update(self, ref: Ref) -> Form:
        """The form of the new value of a state, of `ref`, in states before their update."""
        return self._of(Ref("own", ref.number, ref.item), updated=False)

    def read(self, ref: Ref) -> Form:
        """The form of a result in states after their update."""
        return self._of(ref, updated=True)

    def _of(self, ref: Ref, updated: bool) -> Form:
        """A form with axes of its own."""
        updates = updated and not self.body.block and Ref("before", ref.number, ref.item) in self.body.carried
        if ref.kind == "before" or updates:
            return self._atom(ref, True)
        if ref.kind == "outside":
            return self._atom(ref)
        step = self.step(ref)
        stateful = self.is_stateful(ref)
        rule = RULES.get(step.name) if ref.item == 0 and len(step.shapes) == 1 else None
        if rule is not None and (stateful or step.name in OF_FACTORS) and not self._rounds(step):
            made = rule(self, step, lambda item: self._of(item, updated))
            if made is not None and (stateful or not any(term.axes - {*made.dims} for term in made.terms)):
                return made
        if stateful:
            raise NotLinear(step)
        return self._atom(ref)

    def _rounds(self, step: Step) -> bool:
        """Whether a step changes the floating-point type of what it reads."""
        given = {self._dtype(ref) for ref in step.reads}
        return any(dtype.is_floating_point and dtype != step.dtypes[0] for dtype in given)

    def _dtype(self, ref: Ref) -> torch.dtype:
        if ref.kind == "outside":
            return self.body.outside[ref.number].dtype
        return self.step(ref).dtypes[ref.item]

    def _atom(self, ref: Ref, state: bool = False) -> Form:
        shape = self.shape(ref)
        by_sequence = bool(shape) and repr(shape[0]) == repr(self.body.batch)
        if state and not by_sequence:
            raise refused("has a state without the sequences as its first dimension")
        axes = (*([BATCH] if by_sequence else []), *(self.axis(size) for size in shape[by_sequence:]))
        return Form(axes, (Term(1.0, (Factor(ref, axes, state),)),))

    def axis(self, size: Any) -> int | None:
        """A new axis of `size`; None for size 1."""
        if not isinstance(size, int):
            raise refused("has a tensor with several dimensions of sequences or tokens")
        if size == 1:
            return None
        number = next(self._numbers)
        self.sizes[number] = size
        return number

    def fresh(self, form: Form) -> Form:
        """`form` with other numbers for the axes that its terms sum over, so that no two terms share one."""
        kept = {axis for axis in form.dims if axis is not None} | {BATCH}
        terms = []
        for term in form.terms:
            names = {axis: next(self._numbers) for axis in sorted(term.axes - kept)}
            self.sizes |= {new: self.sizes[old] for old, new in names.items()}
            terms.append(term.renamed(names))
        return Form(form.dims, tuple(terms))

    # ---- sums and products ---------------------------------------------------------------------

    def aligned(self, one: Form, other: Form) -> tuple[Axes, Form, Form]:
        """The dimensions of a broadcast of two forms, and both with the same axes in the same dimensions."""
        rank = max(len(one.dims), len(other.dims))
        left, right = ((None,) * (rank - len(form.dims)) + form.dims for form in (one, other))
        names = {b: a for a, b in zip(left, right, strict=True) if a is not None and b is not None}
        if any(self.sizes.get(a) != self.sizes.get(b) or (a == BATCH) != (b == BATCH) for b, a in names.items()):
            raise refused("multiplies or adds tensors with dimensions that do not match")
        other = Form(
            tuple(names.get(d, d) if d is not None else None for d in right),
            tuple(t.renamed(names) for t in other.terms),
        )
        dims = tuple(b if a is None else a for a, b in zip(left, other.dims, strict=True))
        return dims, Form(left, one.terms), other

    def product(self, one: Form, other: Form, step: Step) -> Form:
        """one * other, element by element."""
        dims, one, other = self.aligned(self.fresh(one), self.fresh(other))
        terms = tuple(Term(a.number * b.number, a.factors + b.factors) for a in one.terms for b in other.terms)
        if any(len(term.states) > 1 for term in terms):
            raise NotLinear(step)
        return Form(dims, terms)

    def total(self, one: Form, other: Form, sign: float) -> Form:
        """one + sign * other."""
        dims, one, other = self.aligned(self.fresh(one), self.fresh(other))
        return Form(dims, one.terms + tuple(Term(sign * term.number, term.factors) for term in other.terms))

    def summed(self, form: Form, dims: Sequence[int], keep: bool) -> Form:
        """`form` summed over dimensions."""
        gone = {dim % len(form.dims) for dim in dims}
        terms = list(form.terms)
        for dim in gone:
            axis = form.dims[dim]
            if axis == BATCH:
                raise refused("sums over sequences")
            if axis is not None:
                terms = [t if axis in t.axes else Term(t.number * self.sizes[axis], t.factors) for t in terms]
        left = [None if at in gone else axis for at, axis in enumerate(form.dims) if keep or at not in gone]
        return Form(tuple(left), tuple(terms))


Rule = Callable[[Forms, Step, Callable[[Ref], Form]], Form | None]


# ---- rules of functions --------------------------------------------------------------------------------


def _multiply(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    a, b = step.args[:2]
    if isinstance(a, Ref) and isinstance(b, Ref):
        return forms.product(of(a), of(b), step)
    ref, number = (a, b) if isinstance(a, Ref) else (b, a)
    if type(number) not in (int, float) or step.kwargs:
        return None
    form = of(ref)
    return Form(form.dims, tuple(Term(term.number * number, term.factors) for term in form.terms))


def _divide(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    ref, number = step.args[:2]
    if not isinstance(ref, Ref) or type(number) not in (int, float) or not number or step.kwargs:
        return None
    form = of(ref)
    return Form(form.dims, tuple(Term(term.number / number, term.factors) for term in form.terms))


def _negate(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    form = of(step.args[0])
    return Form(form.dims, tuple(Term(-term.number, term.factors) for term in form.terms))


def _add(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    sign = -1.0 if "sub" in step.name else 1.0
    a, b = step.args[:2]
    if not isinstance(a, Ref) or not isinstance(b, Ref) or step.kwargs:
        zero = a if isinstance(b, Ref) else b
        return of(b if isinstance(b, Ref) else a) if type(zero) in (int, float) and zero == 0 and sign == 1 else None
    if step.name in ("rsub", "__rsub__"):
        a, b = b, a
    return forms.total(of(a), of(b), sign)


def _sum(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    given = dict(zip(("dim", "keepdim"), step.args[1:], strict=False)) | dict(step.kwargs)
    dims = given.pop("dim", None)
    keep = given.pop("keepdim", False)
    if dims is None or given:
        return None
    return forms.summed(of(step.args[0]), [dims] if isinstance(dims, int) else list(dims), keep)


def _matmul(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    a, b = step.args[:2]
    if not isinstance(a, Ref) or not isinstance(b, Ref):
        return None
    one, other = of(a), of(b)
    if min(len(one.dims), len(other.dims)) < 2:
        return None
    one = Form((*one.dims, None), one.terms)  # [.., N, K, 1] * [.., 1, K, M]
    other = Form((*other.dims[:-2], None, *other.dims[-2:]), other.terms)
    return forms.summed(forms.product(one, other, step), [-2], False)


def _einsum(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    equation, *given = step.args
    refs = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    letters = sorted({letter for letter in inputs if letter != ","})
    made: Form | None = None
    for spelled, ref in zip(inputs.split(","), refs, strict=True):
        form = of(ref)
        if len(set(spelled)) < len(spelled):
            return None
        form = Form(tuple(form.dims[spelled.index(x)] if x in spelled else None for x in letters), form.terms)
        made = form if made is None else forms.product(made, form, step)
    assert made is not None
    gone = [at for at, letter in enumerate(letters) if letter not in output]
    made = forms.summed(made, gone, False)
    kept = [letter for letter in letters if letter in output]
    return Form(tuple(made.dims[kept.index(letter)] for letter in output), made.terms)


def _same(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    return of(step.args[0])


def _permute(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    form, given = of(step.args[0]), step.args[1:]
    rank = len(form.dims)
    order = list(range(rank))
    if step.name == "permute":
        order = list(given[0] if isinstance(given[0], (list, tuple)) else given)
    else:
        one, other = (-1, -2) if step.name in ("t", "mT", "adjoint") else given
        order[one], order[other] = order[other], order[one]
    if step.kwargs or (step.name == "t" and rank != 2):
        return None
    return Form(tuple(form.dims[dim] for dim in order), form.terms)


def _view(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    """A view that adds or removes dimensions of size 1 alone, by the shape of its result."""
    form, shape = of(step.args[0]), step.shapes[0]
    wide = [axis for axis in form.dims if axis is not None]
    given = forms.shape(step.args[0])
    if [repr(size) for size in shape if repr(size) != "1"] != [repr(size) for size in given if repr(size) != "1"]:
        return None
    if len(wide) != sum(repr(size) != "1" for size in shape):  # it was expanded
        return None
    axes = iter(wide)
    return Form(tuple(None if repr(size) == "1" else next(axes) for size in shape), form.terms)


def _index(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    where = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
    if not all(item is None or item is Ellipsis or item == slice(None) for item in where):
        return None
    form = of(step.args[0])
    taken = sum(isinstance(item, slice) for item in where)
    dims: list[int | None] = []
    left = list(form.dims)
    for item in (*where, *([] if Ellipsis in [i for i in where if i is Ellipsis] else [Ellipsis])):
        if item is None:
            dims.append(None)
        elif item is Ellipsis:
            count = len(form.dims) - taken
            dims, left = dims + left[:count], left[count:]
        else:
            dims.append(left.pop(0))
    return Form(tuple(dims), form.terms)


def _expand(forms: Forms, step: Step, of: Callable[[Ref], Form]) -> Form | None:
    form, shape = of(step.args[0]), step.shapes[0]
    dims = (None,) * (len(shape) - len(form.dims)) + form.dims
    pairs = zip(dims, shape, strict=True)
    if any(axis is None and not isinstance(size, int) for axis, size in pairs):
        return None
    return Form(tuple(forms.axis(s) if a is None else a for a, s in zip(dims, shape, strict=True)), form.terms)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), _multiply),
    **dict.fromkeys(("div", "__truediv__", "divide", "true_divide"), _divide),
    **dict.fromkeys(("neg", "__neg__", "negative"), _negate),
    **dict.fromkeys(("add", "__add__", "__radd__", "sub", "__sub__", "rsub", "__rsub__", "subtract"), _add),
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _matmul),
    **dict.fromkeys(("to", "type", "float", "type_as", "contiguous", "clone", "detach"), _same),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "t", "adjoint"), _permute),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"), _view),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "sum": _sum,
    "einsum": _einsum,
    "__getitem__": _index,
}
"""The rules of functions; each returns None if its arguments are not of the kind that it knows."""

OF_FACTORS = {
    *("mul", "__mul__", "__rmul__", "multiply", "neg", "__neg__", "to", "type", "float", "contiguous", "clone"),
    *("permute", "transpose", "swapaxes", "unsqueeze", "squeeze", "__getitem__", "view", "reshape", "expand"),
    *("matmul", "__matmul__", "bmm", "einsum", "t", "mT", "unflatten", "flatten"),
}
"""Functions of tensors without a state that keep a product a product of the same factors. The results of all other
functions become new factors."""
