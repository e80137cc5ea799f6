"""Operators of a step over recurrent states: rows of many sequences, each with a slot of states.

`states` [slots, numbers] holds a row for each slot; a layer's part of it begins at number `offset` and is laid out as
formats/states.py says. Rows are computed in the order of their positions with the same arithmetic, however many there
are, so a row's bits do not depend on the division of a text into steps.

`certain` [S] is how many leading positions of each sequence will never be taken back. Only those enter the base of a
recurrence; rows after them are put into its log, from which the next step continues. Where all rows are certain,
nothing is logged. 0 leaves the base where it is: so a draft continues the states of its target, which then computes the
same positions itself. A sequence that starts at position 0 starts from a state of zeros, whatever its slot holds.

A state that is `stored` in fewer bits is rounded after each block of positions, in the base as in what continues from
it. The base is then the last such position that is certain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from qcompile.formats.states import STATE_FORMATS, ConvState, LayerState, RecurrenceState, StateFormat
from qcompile.ops.recurrent import decayed, outer
from qcompile.ops.registry import define, name_of
from qcompile.ops.schema import operands


class _Rows(NamedTuple):
    """The rows of one sequence in a step: their places [N], the position of the first, and the sequence's slot."""

    places: Tensor
    start: int
    slot: int
    sequence: int


def _by_sequence(positions: Tensor, sequence: Tensor, state_slots: Tensor) -> Iterator[_Rows]:
    for number in sequence.unique().tolist():
        places = (sequence == number).nonzero().flatten()
        yield _Rows(places, int(positions[places[0]]), int(state_slots[number]), number)


def _fake(x: Tensor, states: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(states)]


@define(
    lambda x, weight, bias, positions, sequence, state_slots, states, offset: _fake(x, states),
    since="cache",
)
def conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    sequence: Tensor,
    state_slots: Tensor,
    states: Tensor,
    offset: int,
) -> list[Tensor]:
    """causal_conv of x [M, F] with weight [F, W], continued from the slots [S] -> [y [M, F], new states]."""
    features, width = weight.shape
    layout = ConvState(features, width)
    y, states = torch.empty_like(x), states.clone()
    for rows in _by_sequence(positions, sequence, state_slots):
        ring = states[rows.slot, offset : offset + layout.ring * features].view(layout.ring, features)
        before = [ring[p % layout.ring] if p >= 0 else ring.new_zeros(features) for p in _before(rows.start, width)]
        inputs = torch.cat([torch.stack(before).to(x.dtype), x[rows.places]]) if before else x[rows.places]
        count = len(rows.places)
        total = torch.zeros_like(x[rows.places]) if bias is None else bias.to(x.dtype).expand(count, features)
        for j in range(width):
            total = total + inputs[j : j + count] * weight[:, j].to(x.dtype)
        y[rows.places] = total
        for row, position in zip(rows.places.tolist(), range(rows.start, rows.start + count), strict=True):
            ring[position % layout.ring] = x[row].to(states.dtype)
    return [y, states]


def _before(start: int, width: int) -> range:
    return range(start - width + 1, start)


class _Parts(NamedTuple):
    """Views of a recurrence's part of a slot. state: [H, K, D] in its format; scales: [H, D] of int8."""

    base: Tensor
    scales: Tensor | None
    state: Tensor
    keys: Tensor
    updates: Tensor
    decay: Tensor


def _parts(slot: Tensor, offset: int, layout: RecurrenceState) -> _Parts:
    base, state, keys, updates, decay, _ = (offset + place for place in layout.places)
    heads, key_dim, value_dim = layout.heads, layout.key_dim, layout.value_dim
    values = heads * value_dim
    held = _numbers(slot[state:keys], layout.stored)[: values * key_dim]
    matrix = held.view(key_dim, heads).t()[..., None] if value_dim == 1 else held.view(heads, key_dim, value_dim)
    logs = (keys, layout.key_heads * key_dim), (updates, values), (decay, layout.decays)
    scales = None if layout.scales is None else base + layout.scales
    return _Parts(
        slot[base : base + values],
        None if scales is None else slot[scales : scales + values].view(heads, value_dim),
        matrix,
        *(slot[at : at + layout.log_tokens * count].view(layout.log_tokens, count) for at, count in logs),
    )


def _numbers(part: Tensor, stored: StateFormat) -> Tensor:
    """A state's part of a slot in the numbers that it consists of."""
    return part if stored == "f32" else part.view({"bf16": torch.bfloat16, "int8": torch.int8}[stored])


def rounded(state: Tensor, stored: StateFormat) -> tuple[Tensor, Tensor | None]:
    """state [H, K, D] in the numbers of a format, and the scales [H, D] of int8.

    A column's largest number has the code 127 or -127. Halves are rounded to even.
    """
    if stored == "f32":
        return state, None
    if stored == "bf16":
        return state.to(torch.bfloat16), None
    largest = state.abs().amax(1)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return (state * inverse[:, None]).round().to(torch.int8), largest / 127


def widened(state: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What the numbers of a state and their scales stand for."""
    return state.to(dtype) if scales is None else state.to(dtype) * scales[:, None].to(dtype)


def _keep(parts: _Parts, held: tuple[Tensor, Tensor | None], positions: int) -> None:
    """Put a state that covers `positions` into the base, with its scales."""
    state, scales = held
    parts.state.copy_(state)
    if parts.scales is not None and scales is not None:
        parts.scales.copy_(scales)
    parts.base.fill_(positions)


def _fake_recurrence(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
    states = kwargs.get("states", args[7] if len(args) > 7 else None)
    assert states is not None
    return _fake(v, states)


@define(_fake_recurrence, since="cache")
def recurrence_step(  # parameters: the schema of an operator is flat
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rates: Tensor | None,
    gain: Tensor | None,
    positions: Tensor,
    sequence: Tensor,
    state_slots: Tensor,
    certain: Tensor,
    states: Tensor,
    delta: bool,
    offset: int,
    stored: str = "f32",
) -> list[Tensor]:
    """linear_recurrence over rows, continued from the slots [S] -> [y [M, H, D], new states].

    q and k [M, Hk, K], v [M, H, D], decay [M, H] or [M, H, K], rates [H] or [H, K] or None, gain [M, H] or None.
    `stored` is a key of STATE_FORMATS.
    """
    form = state_format(stored)
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    layout = RecurrenceState(heads, key_heads, key_dim, value_dim, decay.dim() == 3, form)
    y, states = torch.empty_like(v), states.clone()
    for rows in _by_sequence(positions, sequence, state_slots):
        parts = _parts(states[rows.slot], offset, layout)
        end = rows.start + len(rows.places)
        base = int(parts.base[0]) if rows.start else 0
        state = widened(parts.state, parts.scales, v.dtype)
        kept = max(base, min(int(certain[rows.sequence]), end) // layout.block * layout.block)
        if not rows.start:
            state = torch.zeros_like(state)
            _keep(parts, rounded(state, form), 0)
        for position in range(base, end):
            if position < rows.start:
                entry = position % layout.log_tokens
                now = [parts.keys[entry].view(key_heads, key_dim), parts.decay[entry].view(decay.shape[1:])]
                key, fading = (t.to(v.dtype) for t in now)
                update = parts.updates[entry].view(heads, value_dim).to(v.dtype)
                state = decayed(state, fading, rates) + outer(_of_heads(key, heads), update)
            else:
                row = int(rows.places[position - rows.start])
                key = _of_heads(k[row], heads)
                state = decayed(state, decay[row], rates)
                update = v[row] - (state * key[..., None]).sum(-2) if delta else v[row]
                update = update if gain is None else update * gain[row][..., None]
                state = state + outer(key, update)
                y[row] = (state * _of_heads(q[row], heads)[..., None]).sum(-2)
                if position >= kept:
                    for log, value in ((parts.keys, k[row]), (parts.updates, update), (parts.decay, decay[row])):
                        log[position % layout.log_tokens] = value.flatten().to(states.dtype)
            if (position + 1) % layout.block == 0:
                held = rounded(state, form)
                state = widened(*held, v.dtype)
                if position + 1 == kept:
                    _keep(parts, held, kept)
    return [y, states]


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """x [Hk, K] for each of `heads` heads."""
    return x.repeat_interleave(heads // x.shape[0], 0)


def state_format(name: str) -> StateFormat:
    """The format of states called `name`. Raises ValueError if there is none."""
    for form in STATE_FORMATS:
        if form == name:
            return form
    raise ValueError(f"states of {name} are unknown; there are {', '.join(STATE_FORMATS)}")


def layer_state(node: fx.Node, stored: StateFormat = "f32") -> LayerState:
    """The state of an operator of states, over whole sequences or a step; its operands' shapes are known.

    That of an operator over whole sequences is to be `stored` so.
    """
    given = operands(node)
    if name_of(node.target) in ("causal_conv", "conv_step"):
        return ConvState(*given.weight.meta["val"].shape)
    (key_heads, key_dim), (heads, value_dim) = (each.meta["val"].shape[-2:] for each in (given.k, given.v))
    by_key = given.decay.meta["val"].dim() == given.k.meta["val"].dim()
    form = state_format(given.stored) if name_of(node.target) == "recurrence_step" else stored
    return RecurrenceState(heads, key_heads, key_dim, value_dim, by_key, form)
