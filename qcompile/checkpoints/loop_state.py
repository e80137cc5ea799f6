"""The update of a state by one token of a loop, matched to that of qcompile's linear recurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qcompile.checkpoints.loop_forms import BATCH, Factor, Forms, NotLinear, Term
from qcompile.checkpoints.loop_numbers import refused


@dataclass(frozen=True)
class StateUpdate:
    """The parts of `state = decay * state + key (gain * (value - key^T (decay * state)))^T`, by the state's axes.

    `row` is the axis that reads sum over, `heads` and `columns` are the others; decay and gain, and keys, may differ by
    head. decay and value are sums of terms, key and gain products. Without `delta` there is no gain, nor what is
    subtracted from the value.
    """

    row: int | None
    heads: list[int]
    columns: list[int]
    decay: list[Term]
    key: list[Factor]
    value: list[Term]
    gain: list[Factor]
    gain_number: float
    delta: bool


def match(forms: Forms, state: Factor, row: int | None) -> StateUpdate:
    """The update of a state, in the axes of the factor `state`. Raises UnsupportedError if it is of another kind."""
    try:
        form = forms.update(state.ref)
    except NotLinear as error:
        raise refused(f"has a state that it does not update linearly, because of {error.step.name}") from error
    if len(form.dims) != len(state.axes):
        raise refused("has a state that changes its shape")
    names = {new: old for new, old in zip(form.dims, state.axes, strict=True) if new is not None and old is not None}
    own, mixed, added = _sorted([term.renamed(names) for term in form.terms], state)
    axes = [axis for axis in state.axes if axis is not None and axis != BATCH]
    if any(term.axes - {BATCH, *axes} for term in (*own, *added)):
        raise refused("sums in the update of its state over what is not in the state")
    if not own or not added or len(mixed) > 1:
        raise refused("does not both multiply its state by a decay and add to it")
    key, value = _split(added, row)
    gain: list[Factor] = []
    gain_number = 1.0
    if mixed:
        gain, gain_number = _gain(mixed[0], own, key, state, row)
        value = [Term(term.number / gain_number, tuple(_without(term.factors, gain))) for term in value]
    by_head = {axis for term in own for axis in term.axes} | {axis for f in (*key, *gain) for axis in f.axes}
    columns = [axis for axis in axes if axis != row and axis not in by_head]
    if row is None:  # a state of single numbers
        columns = []
    heads = [axis for axis in axes if axis != row and axis not in columns]
    return StateUpdate(row, heads, columns, own, key, value, gain, gain_number, bool(mixed))


def _sorted(terms: Sequence[Term], state: Factor) -> tuple[list[Term], list[Term], list[Term]]:
    """Terms that multiply the state, without it; those that sum over an axis of it; and those without a state."""
    own, mixed, added = [], [], []
    for term in terms:
        if not term.states:
            added.append(term)
            continue
        (read,) = term.states
        if (read.ref.kind, read.ref.number, read.ref.item) != ("before", state.ref.number, state.ref.item):
            raise refused("has a state that depends on another state")
        if read.axes == state.axes:
            own.append(Term(term.number, tuple(factor for factor in term.factors if not factor.state)))
        else:
            mixed.append(term)
    return own, mixed, added


def _split(added: Sequence[Term], row: int | None) -> tuple[list[Factor], list[Term]]:
    """The key by which all terms are multiplied, and what is left of them."""
    keys = [[factor for factor in term.factors if row is not None and row in factor.axes] for term in added]
    if any(sorted(map(repr, key)) != sorted(map(repr, keys[0])) for key in keys):
        raise refused("adds products with different keys to its state")
    value = [Term(t.number, tuple(_without(t.factors, key))) for t, key in zip(added, keys, strict=True)]
    return keys[0], value


def _gain(
    mixed: Term, own: Sequence[Term], key: Sequence[Factor], state: Factor, row: int | None
) -> tuple[list[Factor], float]:
    """The gain of a delta rule, which subtracts what the decayed state returns for the key."""
    (read,) = mixed.states
    differ = [(a, b) for a, b in zip(state.axes, read.axes, strict=True) if a != b]
    if len(differ) != 1 or differ[0][0] != row or row is None or differ[0][1] is None or len(own) != 1:
        raise refused("updates its state by more than a decay and a delta rule")
    inner: Mapping[int, int] = {row: differ[0][1]}
    factors = [factor for factor in mixed.factors if not factor.state]
    gone = [*key, *(factor.renamed(inner) for factor in (*key, *own[0].factors))]
    left = _without(factors, gone)
    number = -mixed.number / own[0].number
    if len(left) + len(gone) != len(factors) or any({row, *inner.values()} & set(f.axes) for f in left) or number == 0:
        raise refused("subtracts something else from its state than what the decayed state returns for the key")
    return left, number


def _without(factors: Sequence[Factor], gone: Sequence[Factor]) -> list[Factor]:
    """`factors` less one of each in `gone`."""
    left = list(factors)
    for factor in gone:
        if factor not in left:
            raise refused("multiplies what it adds to its state by other factors than what it subtracts")
        left.remove(factor)
    return left
