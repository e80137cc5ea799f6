"""The layout of recurrent states: what a sequence's slot holds for each layer.

A slot is a row of numbers, 4 bytes each, that belongs to one sequence. Each layer with a state has a part of it, from
an offset on that is a multiple of ALIGNMENT. Numbers that count positions are stored as floats, which are exact below
2^24.

So that rejected drafts can be taken back, a slot keeps the inputs of the newest positions: a convolution has a ring of
raw inputs anyway, and a recurrence has its state after the first `base` positions, and a log of what later positions
added to it. A step replays the log, in the same order and with the same arithmetic, so the bits are those of a step
that had started from the base.

A matrix state may be stored in fewer bits (STATE_FORMATS). It is computed in float32, and rounded after every
BLOCK_TOKENS-th position of the text. The places of rounding do not depend on steps, so neither do the bits of a row.
The base is always such a position: a decoding step reads the state and replays the log since then, and writes the state
once in BLOCK_TOKENS steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALIGNMENT = 16
"""Parts of a slot start at multiples of this many numbers (64 bytes)."""

LOG_TOKENS = 32
"""Positions that a log holds: those after the base, at most the drafts of two rounds and the tokens before them."""


ROUND_TOKENS = LOG_TOKENS // 2
"""Most rows of a sequence in a round of drafts. Of rows that may be taken back, a log holds those of two rounds."""

BLOCK_TOKENS = 8
"""Positions from one rounding of a state in fewer bits to the next.

A decoding step of a head of 128 x 128 in bf16 reads and writes 128 KiB with a state in float32, 64 with one that is
rounded after each token, and 42, 40 and 42 with blocks of 4, 8 and 16: longer ones replay more of the log.
"""

StateFormat = Literal["f32", "bf16", "int8"]

STATE_FORMATS: dict[StateFormat, int] = {"f32": 4, "bf16": 2, "int8": 1}
"""Formats of matrix states, with the bytes of a number. int8 has a scale for each column of a head's matrix."""


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
    - scales [heads * value_dim] of int8: a number of the state is its code times the scale of its column.
    - state: [heads, key_dim, value_dim]; if value_dim is 1, [key_dim, heads]. In numbers of `stored`, side by side.
    - log of keys [log_tokens, key_heads * key_dim], of updates gain * u [log_tokens, heads * value_dim], and of decay
      [log_tokens, heads] or [log_tokens, heads * key_dim]. Position p is entry p % log_tokens.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    by_key: bool
    stored: StateFormat = "f32"

    @property
    def state_bytes(self) -> int:
        """Bytes of a number of the state."""
        return STATE_FORMATS[self.stored]

    @property
    def block(self) -> int:
        """The base is a multiple of this many positions, and the state is rounded after each of these."""
        return 1 if self.stored == "f32" else BLOCK_TOKENS

    @property
    def log_tokens(self) -> int:
        """Entries of the logs: the positions of a block that are certain come before those of LOG_TOKENS."""
        return LOG_TOKENS + (self.block if self.block > 1 else 0)

    @property
    def scales(self) -> int | None:
        """Where the scales of a state begin in the layer's part; None if it has none."""
        return _aligned(self.heads * self.value_dim) if self.stored == "int8" else None

    @property
    def decays(self) -> int:
        """Numbers of a token's decay."""
        return self.heads * (self.key_dim if self.by_key else 1)

    @property
    def places(self) -> tuple[int, int, int, int, int, int]:
        """Where base, state, and the logs of keys, updates and decay begin in the layer's part, and its size."""
        values = self.heads * self.value_dim
        logged = (self.key_heads * self.key_dim, values, self.decays)
        state = -(-values * self.key_dim * self.state_bytes // 4)
        sizes = [(self.scales or 0) + values, state, *(self.log_tokens * count for count in logged)]
        places = [0]
        for size in sizes:
            places.append(places[-1] + _aligned(size))
        base, state, keys, updates, decay, end = places
        return base, state, keys, updates, decay, end

    @property
    def size(self) -> int:
        """Numbers of the layer's part of a slot."""
        return self.places[-1]

    @property
    def step_bytes(self) -> float:
        """Bytes of states that a sequence's decoding step reads and writes, in the mean over the places of a block."""
        columns = self.heads * self.value_dim
        held = self.state_bytes * columns * self.key_dim + (4 * columns if self.scales else 0)
        entry = 4 * (self.key_heads * self.key_dim + self.heads * self.value_dim + self.decays)
        if self.block == 1:
            return 2 * held
        replayed, logged = (self.block - 1) / 2, (self.block - 1) / self.block
        return held * (1 + 1 / self.block) + entry * (replayed + logged)


LayerState = ConvState | RecurrenceState


@dataclass(frozen=True)
class StateLayout:
    """All layers with a state, in order. Without any, a slot has no bytes.

    Raises ValueError if recurrences differ in their format.
    """

    layers: tuple[LayerState, ...] = ()

    def __post_init__(self) -> None:
        forms = {layer.stored for layer in self.layers if isinstance(layer, RecurrenceState)}
        if len(forms) > 1:
            raise ValueError(f"states are stored in several formats: {', '.join(sorted(forms))}")

    @property
    def offsets(self) -> tuple[int, ...]:
        """First number of each layer in a slot."""
        starts = [0]
        for layer in self.layers:
            starts.append(starts[-1] + layer.size)
        return tuple(starts[:-1])

    @property
    def stored(self) -> StateFormat:
        """The format of the states of recurrences, which is the same in all layers."""
        return next((layer.stored for layer in self.layers if isinstance(layer, RecurrenceState)), "f32")

    @property
    def slot_numbers(self) -> int:
        """Numbers of a slot."""
        return sum(layer.size for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, a multiple of 64."""
        return 4 * self.slot_numbers
