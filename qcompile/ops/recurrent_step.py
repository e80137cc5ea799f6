"""Operators of a step over recurrent states: rows of many sequences, each with a slot of states.

`states` [slots, numbers] holds a row for each slot; a layer's part of it begins at number `offset` and is laid out as
formats/states.py says. Rows are computed in the order of their positions with the same arithmetic, however many there
are, so a row's bits do not depend on the division of a text into steps.

`certain` [S] is how many leading positions of each sequence will never be taken back. Only those enter the base of a
recurrence; rows after them are put into its log, from which the next step continues. Where all rows are certain,
nothing is logged. 0 leaves the base where it is: so a draft continues the states of its target, which then computes the
same positions itself. A sequence that starts at position 0 starts from a state of zeros, whatever its slot holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from qcompile.formats.states import LOG_TOKENS, ConvState, LayerState, RecurrenceState
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
    """Views of a recurrence's part of a slot. state: [H, K, D]."""

    base: Tensor
    state: Tensor
    keys: Tensor
    updates: Tensor
    decay: Tensor


def _parts(slot: Tensor, offset: int, layout: RecurrenceState) -> _Parts:
    base, state, keys, updates, decay, _ = (offset + place for place in layout.places)
    heads, key_dim, value_dim = layout.heads, layout.key_dim, layout.value_dim
    values = heads * value_dim
    held = slot[state : state + values * key_dim]
    matrix = held.view(key_dim, heads).t()[..., None] if value_dim == 1 else held.view(heads, key_dim, value_dim)
    logs = (keys, layout.key_heads * key_dim), (updates, values), (decay, layout.decays)
    return _Parts(
        slot[base : base + values],
        matrix,
        *(slot[at : at + LOG_TOKENS * count].view(LOG_TOKENS, count) for at, count in logs),
    )


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
) -> list[Tensor]:
    """linear_recurrence over rows, continued from the slots [S] -> [y [M, H, D], new states].

    q and k [M, Hk, K], v [M, H, D], decay [M, H] or [M, H, K], rates [H] or [H, K] or None, gain [M, H] or None.
    """
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    layout = RecurrenceState(heads, key_heads, key_dim, value_dim, decay.dim() == 3)
    y, states = torch.empty_like(v), states.clone()
    for rows in _by_sequence(positions, sequence, state_slots):
        parts = _parts(states[rows.slot], offset, layout)
        end = rows.start + len(rows.places)
        base = int(parts.base[0]) if rows.start else 0
        state = parts.state.to(v.dtype) if rows.start else torch.zeros_like(parts.state, dtype=v.dtype)
        kept = max(base, min(int(certain[rows.sequence]), end))
        if not rows.start:
            parts.base.zero_()
            parts.state.zero_()
        for position in range(base, end):
            if position < rows.start:
                entry = position % LOG_TOKENS
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
                        log[position % LOG_TOKENS] = value.flatten().to(states.dtype)
            if position + 1 == kept:
                parts.state.copy_(state)
                parts.base.fill_(kept)
    return [y, states]


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """x [Hk, K] for each of `heads` heads."""
    return x.repeat_interleave(heads // x.shape[0], 0)


def layer_state(node: fx.Node) -> LayerState:
    """The state of an operator of states, over whole sequences or a step; its operands' shapes are known."""
    given = operands(node)
    if name_of(node.target) in ("causal_conv", "conv_step"):
        return ConvState(*given.weight.meta["val"].shape)
    (key_heads, key_dim), (heads, value_dim) = (each.meta["val"].shape[-2:] for each in (given.k, given.v))
    by_key = given.decay.meta["val"].dim() == given.k.meta["val"].dim()
    return RecurrenceState(heads, key_heads, key_dim, value_dim, by_key)
