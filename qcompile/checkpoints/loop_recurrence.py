"""Writes a loop over tokens, given as the body for one token, with operators that compute all tokens at once.

What does not depend on a state is computed for all tokens at once, as if each token were a sequence of its own. This is
right because the body computes each sequence by itself. A state must be a linear recurrence, by its form
(loop_forms.py); it becomes qcompile's operator `linear_recurrence`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from qcompile import ops
from qcompile.checkpoints.loop_blocks import run_blocks, with_random
from qcompile.checkpoints.loop_body import Body, Ref, Step
from qcompile.checkpoints.loop_forms import BATCH, Factor, Form, Forms, NotLinear, Term
from qcompile.checkpoints.loop_numbers import refused, sized
from qcompile.checkpoints.loop_state import StateUpdate, match


class Recurrence:
    """The results of all tokens of `body`, as tensors of the trace."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.forms = Forms(body)
        self.is_trial = False
        self._values: dict[Ref, Tensor] = {}

    def stacked(self, ref: Ref, dim: int) -> Tensor:
        """The result `ref` of each token, stacked along a new dimension `dim`."""
        value = self._by_token(ref)
        return _moved(value, 1, dim)

    def joined(self, ref: Ref, dim: int) -> Tensor:
        """The result `ref` of each token, concatenated along the dimension `dim`, in which it has size 1."""
        dim %= len(self.forms.shape(ref))
        if dim == 0 or repr(self.forms.shape(ref)[dim]) != "1":
            raise refused("concatenates results along a dimension that they have already")
        return _moved(self._by_token(ref).squeeze(dim + 1), 1, dim)

    def _by_token(self, ref: Ref) -> Tensor:
        """The result `ref` [B, ...] of all tokens [B, T, ...]."""
        value = self.value(ref)
        if repr(self.forms.shape(ref)[:1]) != repr((self.forms.body.batch,)):
            raise refused("has a result without the sequences as its first dimension")
        return value.reshape(self.body.batch, self.body.tokens, *value.shape[1:])

    # ---- values of all tokens ------------------------------------------------------------------

    def value(self, ref: Ref) -> Tensor:
        """A tensor of the body for all tokens, [B * T, ...] for [B, ...]."""
        if ref.kind == "outside":
            return self._constant(ref)
        if ref not in self._values:
            self._values[ref] = self._computed(ref)
        return self._values[ref]

    def _constant(self, ref: Ref) -> Tensor:
        tensor = self.body.outside[ref.number]
        if any(not isinstance(size, int) for size in tensor.shape):
            raise refused("reads a tensor of all sequences or tokens at once")
        return tensor

    def _computed(self, ref: Ref) -> Tensor:
        if ref.kind == "before":
            raise refused("returns the state of the token before: return the new one, or what is read from it")
        step = self.forms.step(ref)
        if step.token is not None:
            return self._part(step)
        if self.body.block and self.forms.is_stateful(ref):
            return self._read_by_blocks(ref)
        if self.forms.is_stateful(ref):
            try:
                form = self.forms.read(ref)
            except NotLinear:
                form = None
            if form is not None and (read := self._read(form)) is not None:
                return read
        made = step.func(*self._filled(step.args), **self._filled(step.kwargs))
        result: Tensor = made if isinstance(made, Tensor) else made[ref.item]
        return result

    def _part(self, step: Step) -> Tensor:
        """The parts of all tokens of an outside tensor."""
        source, dim = self.body.outside[step.args[0].number], step.token
        assert dim is not None
        if repr(source.shape[1 if dim == 0 else 0]) != repr(self.body.batch):
            raise refused("takes parts of a tensor without the sequences as its first dimension")
        moved = _moved(source, dim, 1)
        parts = self._flat(moved, moved.shape[2:])
        if len(step.shapes[0]) < source.dim():
            return parts
        if dim == 0:
            raise refused("takes parts of a tensor with the tokens first, and keeps their dimension")
        return parts.unsqueeze(dim)

    def _flat(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """`tensor` [B, T, ...] as [B * T, *sizes], copied, since splitting a view makes the trace depend on strides."""
        flat = tensor.reshape(self.body.batch * self.body.tokens, *sizes)
        return flat.clone(memory_format=torch.contiguous_format)

    def _filled(self, arguments: Any) -> Any:
        """Arguments of a step with the tensors of all tokens, and the number of sequences times that of tokens."""

        def fill(item: Any) -> Any:
            if isinstance(item, Ref):
                return self.value(item)
            if not isinstance(item, torch.SymInt):
                return sized(item, 1)
            if repr(item) != repr(self.forms.body.batch):
                raise refused("computes with the number of tokens")
            return self.body.batch * self.body.tokens

        return tree_map(fill, arguments)

    # ---- states --------------------------------------------------------------------------------

    def _read(self, form: Form) -> Tensor | None:
        """A result that is linear in one state; None if it is computed from such results."""
        term = form.terms[0]
        if len(form.terms) != 1 or not term.states:
            return None
        (state,) = term.states
        if state.ref.kind == "before":
            raise refused("reads its state before the update of the token: read it afterwards")
        factors = [factor for factor in term.factors if not factor.state]
        summed = [axis for axis in state.axes if axis is not None and axis not in form.dims]
        others = {axis for factor in factors for axis in factor.axes} - {None, *form.dims, *summed}
        if len(summed) > 1 or others:
            return None
        row = summed[0] if summed else None
        matched = match(self.forms, state, row)
        query = [factor for factor in factors if row is not None and row in factor.axes]
        made, axes = self._recur(matched, query)
        rest = self._product(Term(1.0, tuple(f for f in factors if f not in query)), axes)
        made = made if rest is None else made * rest
        made = made if term.number == 1 else made * term.number
        if set(axes) | {BATCH} != {axis for axis in form.dims if axis is not None}:
            return None
        return _placed(made, (BATCH, *axes), form.dims)

    def _read_by_blocks(self, ref: Ref) -> Tensor:
        """The result of each block, in a loop over blocks.

        Only what is read from the state before the block is matched. The proof covers what tokens of a block read of
        each other.
        """
        try:
            form = self.forms.read(ref)
        except NotLinear as error:
            raise refused(f"does not read its state linearly, because of {error.step.name}") from error
        terms = [term for term in form.terms if term.states]
        if len(terms) != 1 or terms[0].states[0].ref.kind != "before":
            raise refused("does not read its state once in each block")
        read = terms[0].states[0]
        summed = [axis for axis in read.axes if axis is not None and axis not in form.dims]
        if len(summed) != 1:
            raise refused("does not sum over one dimension of its state")
        state = Factor(Ref("own", read.ref.number, read.ref.item), read.axes, True)
        query = [f for f in terms[0].factors if not f.state and summed[0] in f.axes and BATCH in f.axes]
        made, axes = self._recur(match(self.forms, state, summed[0]), query, ref)
        if set(axes) | {BATCH} != {axis for axis in form.dims if axis is not None}:
            raise refused("returns other dimensions of its state than those it keeps")
        return _placed(made, (BATCH, *axes), form.dims)

    def _proved(self, rates: Tensor | None, ref: Ref) -> Tensor:
        """`rates` with the proof that the loop's own code, over several blocks, computes the recurrence."""
        if rates is None or self.body.block is None:
            raise refused("has blocks of tokens with a decay that differs by token")
        length = 2 * self.body.block + self.body.block // 2 + 1
        trial = Recurrence(with_random(self.body, length))
        trial.forms, trial.is_trial = self.forms, True
        dim = 1 + next(at for at, size in enumerate(self.forms.shape(ref)[1:]) if repr(size) == "1")
        own = run_blocks(trial.body, ref, dim, length)
        return ops.op("proved")(rates, own, trial.joined(ref, dim), self.body.tables(), self.body.name)

    def _recur(self, state: StateUpdate, query: Sequence[Factor], proof: Ref | None = None) -> tuple[Tensor, list[int]]:
        """(the state read by the product of `query`, [B * T, ...], its axes without that of the sequences).

        With `proof`, the result of a block, the rates of the recurrence depend on a proof of it.
        """
        by_key = [axis for axis in state.heads if any(axis in factor.axes for factor in (*query, *state.key))]
        heads = [*by_key, *(axis for axis in state.heads if axis not in by_key)]
        row = [] if state.row is None else [state.row]
        decay, rates = self._decay(state, heads, row)
        rates = self._proved(rates, proof) if proof is not None and not self.is_trial else rates
        gain = Term(state.gain_number, tuple(state.gain))
        y = ops.op("linear_recurrence")(
            self._shaped([Term(1.0, tuple(query))], by_key, row),
            self._shaped([Term(1.0, tuple(state.key))], by_key, row),
            self._shaped(state.value, heads, state.columns),
            decay,
            rates,
            self._shaped([gain], heads) if state.delta else None,
            state.delta,
        )
        axes = [*heads, *state.columns]
        return self._flat(y, [self.forms.sizes[axis] for axis in axes]), axes

    def _decay(self, state: StateUpdate, heads: list[int], row: list[int]) -> tuple[Tensor, Tensor | None]:
        """(decay, rates): exp(decay * rates) is what each token multiplies the state by."""
        log = ops.op("log_decay")
        used = {axis for term in state.decay for axis in term.axes}
        last = row if set(row) & used else None
        if len(state.decay) > 1:  # 1 - z, for example
            return log(self._shaped(state.decay, heads, last)), None
        (term,) = state.decay
        if term.number <= 0:
            raise refused("multiplies its state by a number that is not positive")
        logs = [log(self._shaped([Term(1.0, (f,))], heads, last)) for f in term.factors if BATCH in f.axes]
        fixed = [Term(1.0, (f,)) for f in term.factors if BATCH not in f.axes]
        fixed += [Term(term.number, ())] if term.number != 1 or not term.factors else []
        rates = [log(self._fixed(one, heads, last)) for one in fixed]
        if not logs:
            return self._shaped([Term(1.0, ())], heads, last), _sum(rates)
        return _sum([*logs, *rates]), None

    def _shaped(self, terms: Sequence[Term], lead: Sequence[int], last: Sequence[int] | None = None) -> Tensor:
        """A sum of products as [B, T, lead], or [B, T, lead, last], with the axes of each joined to one dimension."""
        whole = [*lead, *(last or [])]
        shape = [self._total(lead), *([] if last is None else [self._total(last)])]
        size = (self.body.batch * self.body.tokens, *(self.forms.sizes[axis] for axis in whole))
        number = sum(term.number for term in terms if not term.factors)
        parts = [part for term in terms if term.factors and (part := self._product(term, whole)) is not None]
        made = _sum(parts) if parts else torch.full(size, number)
        made = made + number if parts and number else made
        wide = made.expand(size[0] if isinstance(made.shape[0], int) else -1, *size[1:])
        return wide.reshape(self.body.batch, self.body.tokens, *shape)

    def _fixed(self, term: Term, lead: Sequence[int], last: Sequence[int] | None) -> Tensor:
        """A product without sequences and tokens as [lead] or [lead, last]."""
        whole = [*lead, *(last or [])]
        sizes, shape = [self.forms.sizes[a] for a in whole], [self._total(a) for a in (lead, last) if a is not None]
        made = torch.full((1,), term.number)
        for factor in term.factors:
            made = _placed(self.value(factor.ref), factor.axes, whole)
        return made.expand(*sizes).reshape(*shape)

    def _total(self, axes: Sequence[int]) -> int:
        return math.prod(self.forms.sizes[axis] for axis in axes)

    def _product(self, term: Term, axes: Sequence[int]) -> Tensor | None:
        """A product, [B * T or 1, ...] with a dimension for each of `axes`; None without factors."""
        made: Tensor | None = None
        for factor in term.factors:
            value = _placed(self.value(factor.ref), factor.axes, (BATCH, *axes))
            made = value if made is None else made * value
        return made if made is None or term.number == 1 else made * term.number


def _moved(tensor: Tensor, start: int, to: int) -> Tensor:
    """`tensor` with a dimension moved to another place."""
    order = [place for place in range(tensor.dim()) if place != start % tensor.dim()]
    order.insert(to % tensor.dim(), start % tensor.dim())
    return tensor if order == sorted(order) else tensor.permute(order)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _placed(value: Tensor, axes: Sequence[int | None], dims: Sequence[int | None]) -> Tensor:
    """`value`, with a dimension for each of `axes`, brought to the dimensions `dims`; new ones have size 1."""
    for place in reversed(range(len(axes))):
        if axes[place] is None:
            value = value.squeeze(place)
    held = [axis for axis in axes if axis is not None]
    order = [axis for axis in dims if axis is not None and axis in held]
    if order != held:
        value = value.permute([held.index(axis) for axis in order])
    for place, axis in enumerate(dims):
        if axis is None or axis not in held:
            value = value.unsqueeze(place)
    return value
