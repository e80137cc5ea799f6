"""The layout of recurrent states: what a sequence's slot holds for each layer.

A slot is a row of numbers, 4 bytes each, that belongs to one sequence. Each layer with a state has a part of it, from
an offset on that is a multiple of ALIGNMENT. Numbers that count positions are stored as floats, which are exact below
2^24.

So that rejected drafts can be taken back, a slot keeps the inputs of the newest positions: a convolution has a ring of
raw inputs anyway, and a recurrence has its state after the first `base` positions, and a log of what later positions
added to it. A step replays the log, in the same order and with the same arithmetic, so the bits are those of a step
that had started from the base.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 16
"""Parts of a slot start at multiples of this many numbers (64 bytes)."""

LOG_TOKENS = 32
"""Positions that a log holds: those after the base, at most the drafts of two rounds and the tokens before them."""


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ConvState:
    """The state of a causal convolution of `width` taps: a ring [ring, features] of its newest raw inputs.

    The input of position p is entry p % ring.
    """

    features: int
    width: int

    @property
    def ring(self) -> int:
        """Entries of the ring: what the next position reads, and the positions that may be taken back."""
        return self.width - 1 + LOG_TOKENS

    @property
    def size(self) -> int:
        """Numbers of the layer's part of a slot."""
        return _aligned(self.ring * self.features)


@dataclass(frozen=True)
class RecurrenceState:
    """The state of a linear recurrence over `heads` heads with matrices [key_dim, value_dim].

    `key_heads` as in linear_recurrence; `by_key` says that decay has a number for each key feature. The parts, in
    order, each from a multiple of ALIGNMENT on:

    - base [heads * value_dim]: positions that the state covers; the same number in every column, so that columns that
      are computed apart share nothing.
    - state: [heads, key_dim, value_dim]; if value_dim is 1, [key_dim, heads].
    - log of keys [LOG_TOKENS, key_heads * key_dim], of updates gain * u [LOG_TOKENS, heads * value_dim], and of decay
      [LOG_TOKENS, heads] or [LOG_TOKENS, heads * key_dim]. Position p is entry p % LOG_TOKENS.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    by_key: bool

    @property
    def decays(self) -> int:
        """Numbers of a token's decay."""
        return self.heads * (self.key_dim if self.by_key else 1)

    @property
    def places(self) -> tuple[int, int, int, int, int, int]:
        """Where base, state, and the logs of keys, updates and decay begin in the layer's part, and its size."""
        values = self.heads * self.value_dim
        logged = (self.key_heads * self.key_dim, values, self.decays)
        sizes = [values, values * self.key_dim, *(LOG_TOKENS * count for count in logged)]
        places = [0]
        for size in sizes:
            places.append(places[-1] + _aligned(size))
        base, state, keys, updates, decay, end = places
        return base, state, keys, updates, decay, end

    @property
    def size(self) -> int:
        """Numbers of the layer's part of a slot."""
        return self.places[-1]


LayerState = ConvState | RecurrenceState


@dataclass(frozen=True)
class StateLayout:
    """All layers with a state, in order. Without any, a slot has no bytes."""

    layers: tuple[LayerState, ...] = ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """First number of each layer in a slot."""
        starts = [0]
        for layer in self.layers:
            starts.append(starts[-1] + layer.size)
        return tuple(starts[:-1])

    @property
    def slot_numbers(self) -> int:
        """Numbers of a slot."""
        return sum(layer.size for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, a multiple of 64."""
        return 4 * self.slot_numbers
