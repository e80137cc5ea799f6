"""The code of trellis formats: the value of a state, and how states of a sequence overlap in the packed bits.

64 outputs of one input are a sequence, in the order of `places`. The symbols of a sequence, each of a format's bits,
lie one after the other in its bytes. The state of an output is STATE_BITS of these bits from its own symbol on; after
the last bit comes the first. So a kernel decodes any output alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from qcompile.formats.blocks import ROW_BLOCK, CodeLayout, padded_inputs

STATE_BITS = 12
"""Bits of a state. One more loses 2 % less of a Gaussian weight and takes twice as long to search."""
SEQUENCE = 64
"""Outputs of a sequence. 128 lose 2 % less, 32 7 % more; 16 lose half as much again, since ends must meet."""
BLOCKS = SEQUENCE // ROW_BLOCK
FACTOR, ADDEND = 2095692331, 3164817360
"""A state times FACTOR plus ADDEND, modulo 2^32, has four bytes. Their sum, less 510, is the value: nearly Gaussian.

Of 6,323 random pairs these lost least of Gaussian weights in 2, 3 and 4 bits: 0.0738, 0.0192 and 0.0051 of the energy.
"""
CENTER = 510


def values_of(states: Tensor) -> Tensor:
    """The values f32 of states int64, whole numbers from -510 to 510."""
    hashed = states * FACTOR + ADDEND
    return ((hashed & 255) + (hashed >> 8 & 255) + (hashed >> 16 & 255) + (hashed >> 24 & 255) - CENTER).float()


@cache
def state_values() -> Tensor:
    """The values f32 [2^STATE_BITS] of all states."""
    return values_of(torch.arange(2**STATE_BITS))


@cache
def spread_of_values() -> float:
    """The standard deviation of the values of states."""
    return float(state_values().double().std(correction=0))


def sequences_of(n: int) -> int:
    """Number of sequences that hold n outputs."""
    return -(-n // SEQUENCE)


def in_sequences(rows: Tensor) -> Tensor:
    """[N, ...] -> [sequences, SEQUENCE, ...], padded with zeros: the outputs of each sequence in its order.

    Of the four blocks of 16 rows, the first rows come first, then the second rows, and so on: the symbols of the same
    row of all blocks are adjacent, so that a kernel gets the bits of all with one permutation of bytes.
    """
    short = sequences_of(len(rows)) * SEQUENCE - len(rows)
    whole = torch.cat((rows, rows.new_zeros(short, *rows.shape[1:]))) if short else rows
    return whole.unflatten(0, (-1, BLOCKS, ROW_BLOCK)).transpose(1, 2).flatten(1, 2)


def from_sequences(sequences: Tensor, n: int) -> Tensor:
    """The inverse of in_sequences, for n outputs."""
    return sequences.unflatten(1, (ROW_BLOCK, BLOCKS)).transpose(1, 2).flatten(0, 2)[:n]


def packed_symbols(states: Tensor, bits: int) -> Tensor:
    """States [..., SEQUENCE] -> the bytes [..., SEQUENCE / 8 * bits] of their symbols."""
    symbols = states.unflatten(-1, (-1, 8)) & 2**bits - 1  # 8 symbols are `bits` bytes
    word = sum(symbols[..., i].long() << bits * i for i in range(8))
    assert isinstance(word, Tensor)
    return torch.stack([word >> 8 * i & 255 for i in range(bits)], -1).flatten(-2).to(torch.uint8)


def unpacked_states(codes: Tensor, bits: int) -> Tensor:
    """The states int64 [..., SEQUENCE] of bytes from packed_symbols."""
    grouped = codes.unflatten(-1, (-1, bits)).long()
    word = sum(grouped[..., i] << 8 * i for i in range(bits))
    assert isinstance(word, Tensor)
    symbols = torch.stack([word >> bits * i & 2**bits - 1 for i in range(8)], -1).flatten(-2)
    states = symbols
    for later in range(1, -(-STATE_BITS // bits)):
        states = states | symbols.roll(-later, -1) << bits * later
    return states & 2**STATE_BITS - 1


@dataclass(frozen=True)
class TrellisLayout(CodeLayout):
    """The order of packed sequences: [sequence][k][SEQUENCE / 8 * symbol_bits bytes], as in the part `codes`."""

    symbol_bits: int = 0

    @property
    def bits(self) -> int:
        """Bits per code."""
        return self.symbol_bits

    def bytes(self, n: int, k: int) -> int:
        return sequences_of(n) * padded_inputs(k) * self._bytes

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [sequences, K, bytes], padded with zeros to whole blocks of inputs; activations are zero there."""
        k = codes.shape[1]
        return torch.nn.functional.pad(codes, (0, 0, 0, padded_inputs(k) - k))

    def unpack(self, blob: Tensor, n: int, k: int) -> Tensor:
        return blob[: self.bytes(n, k)].view(sequences_of(n), padded_inputs(k), self._bytes)[:, :k]

    @property
    def _bytes(self) -> int:
        return SEQUENCE // 8 * self.symbol_bits
