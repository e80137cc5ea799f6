"""Calls of kernels with recurrent states. The layout of a slot is in formats/states.py; `state` is a number in it.

Each sequence of a step has a slot and a number of certain positions (ops/recurrent_step.py). All values
but matrix states `stored` in fewer bits are f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qcompile.codegen.calls import Call
from qcompile.formats.states import ConvState, RecurrenceState, StateFormat

MOST_TAPS = 64
"""The widest convolution that there are kernels for."""


@dataclass(frozen=True)
class ConvStep(Call):
    """out = causal_conv of the columns of x from `x_offset` on, continued from the ring at `state` of each slot.

    `weight` is [width][features rounded up to 16], transposed: each tap's factors lie side by side, then zeros. `bias`
    is [features].
    """

    kernel: ClassVar[str] = "conv_step"
    x: str
    x_offset: int
    out: str
    features: int
    width: int
    weight: str
    state: int
    bias: str | None = None

    @property
    def layer(self) -> ConvState:
        """The layout of the layer's part of a slot."""
        return ConvState(self.features, self.width)


@dataclass(frozen=True)
class RecurrenceStep(Call):
    """out = linear_recurrence of q, k, v, decay and gain, continued from the part of each slot from `state` on.

    Each operand is a buffer, read from its offset on. Decay has a number for each head, or with `by_key` for each head
    and key feature. The weight `rates` is [heads], or with `rates_by_key` [heads][key_dim]; if value_dim is 1,
    [key_dim][heads rounded up to 16], transposed.
    """

    kernel: ClassVar[str] = "recurrence_step"
    read_fields: ClassVar[tuple[str, ...]] = ("q", "k", "v", "decay", "gain")
    q: str
    q_offset: int
    k: str
    k_offset: int
    v: str
    v_offset: int
    decay: str
    decay_offset: int
    out: str
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    by_key: bool
    delta: bool
    state: int
    rates: str | None = None
    rates_by_key: bool = False
    gain: str | None = None
    gain_offset: int = 0
    stored: StateFormat = "f32"

    @property
    def layer(self) -> RecurrenceState:
        """The layout of the layer's part of a slot."""
        sizes = self.heads, self.key_heads, self.key_dim, self.value_dim
        return RecurrenceState(*sizes, self.by_key, self.stored)
