"""Embeddings of a step's rows in memory of the host, which kernels read in place of the table (codegen/gpu/embeds.py).

A prompt's rows are read once, at the rate of the bus, and steps of many rows take longer than that. So embeddings take
no memory of the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qcompile.runtime.cuda.counts import power_of_two
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.step import Rows


class GivenEmbeds:
    """Two copies of embeddings, as of other inputs of a step: one may be read while the other is written.

    facts: the plan's, with their width and the number of the token that stands for the first of a step.
    """

    def __init__(self, driver: Driver, facts: Mapping[str, int]) -> None:
        self._driver, self._width, self._first = driver, facts["width"], facts["first"]
        self._copies: list[FloatArray | None] = [None, None]
        self._passed: list[Any] = []
        """Events behind the steps that read the copies, once there are any."""

    def begin(self, turn: int) -> None:
        """Note that the step of the other turn is queued, before one of `turn` is written."""
        if self._passed:
            self._driver.record(self._passed[1 - turn])

    def write(self, sequences: Sequence[Rows], turn: int) -> tuple[list[int], list[int]]:
        """Take the embeddings of a step of `turn`, [rows, width] of each sequence that has some.

        Returns the tokens of the step's rows, and the address of the embeddings as two numbers, the lower 32 bits
        first. Raises ResourceError if there is no memory for them.
        """
        given = [rows.embeds for rows in sequences if rows.embeds is not None]
        copy = self._room(sum(map(len, given)), turn)
        tokens: list[int] = []
        at = 0
        for rows in sequences:
            count = 0 if rows.embeds is None else len(rows.embeds)
            if rows.embeds is not None:
                copy[at : at + count] = rows.embeds
            tokens += range(self._first + at, self._first + at + count)
            tokens += rows.tokens[count:]
            at += count
        halves: list[int] = np.array([copy.ctypes.data], np.int64).view(np.int32).tolist()
        return tokens, halves

    def _room(self, rows: int, turn: int) -> FloatArray:
        """The copy of a turn, with room for `rows` rows, when no step reads it any more."""
        if not self._passed:
            self._passed = [self._driver.event(), self._driver.event()]
        self._driver.wait_for(self._passed[turn])
        copy = self._copies[turn]
        if copy is None or len(copy) < rows:
            self._free(turn)
            rows = power_of_two(rows)
            address = self._driver.pinned(4 * rows * self._width)
            numbers: Any = (ctypes.c_float * (rows * self._width)).from_address(address)
            copy = self._copies[turn] = np.ctypeslib.as_array(numbers).reshape(rows, self._width)
        return copy

    def _free(self, turn: int) -> None:
        copy = self._copies[turn]
        if copy is not None:
            self._driver.free_pinned(copy.ctypes.data)
        self._copies[turn] = None

    def free(self) -> None:
        """Free the memory."""
        for turn in range(2):
            self._free(turn)
        for event in self._passed:
            self._driver.drop_event(event)
        self._passed = []
