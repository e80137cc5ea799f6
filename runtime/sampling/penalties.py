"""Biases, and penalties on tokens of the text so far, as they change logits, and the list of those tokens.

A list of distinct tokens is all that is needed: penalties leave the logits of other tokens as they are. Executors get
the list with each call, and continue it themselves by the tokens that they choose or verify in that call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qcompile.runtime.sampling.arrays import FloatArray

IntArray = npt.NDArray[np.int32]


class Bias(NamedTuple):
    """What is added to the logits of distinct tokens, before penalties. tokens (int32), values (float32): [biased]."""

    tokens: IntArray
    values: FloatArray

    def added(self, logits: FloatArray) -> FloatArray:
        """Logits [vocab] with the biases."""
        biased = logits.copy()
        biased[self.tokens] += self.values
        return biased


class Penalties(NamedTuple):
    """A sequence's penalties as an executor applies them: options, and the distinct tokens that they are for.

    tokens, counts: [listed] the tokens, and how often each was generated (0: it is only in the prompt). They are those
    up to a position; `ahead` are the tokens after it that are known already. room: how many tokens may follow the
    listed ones in a call of the executor, at least 1.
    """

    repetition: float
    frequency: float
    presence: float
    tokens: IntArray
    counts: IntArray
    room: int
    ahead: Sequence[int] = ()


def penalize(
    logits: FloatArray, tokens: IntArray, counts: IntArray, repetition: float, frequency: float, presence: float
) -> FloatArray:
    """Logits [vocab] with penalties on distinct `tokens`, of which `counts` were generated; both [listed].

    A logit is divided by `repetition` if it is positive, else multiplied by it (CTRL 4.1). Those of generated tokens
    then lose `frequency` times their count, plus `presence`.
    """
    changed, factor, generated = logits[tokens], np.float32(repetition), counts > 0
    changed = np.where(changed > 0, changed / factor, changed * factor)
    changed[generated] -= (frequency * counts[generated] + presence).astype(np.float32)
    penalized = logits.copy()
    penalized[tokens] = changed
    return penalized


class Occurrences:
    """The distinct tokens of a text in order of their first occurrence, and how often each was generated.

    Starts with those of `prompt`, none of which was generated.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._tokens, self._counts = array("i", self._place), array("i", [0]) * len(self._place)

    def note(self, token: int) -> None:
        """Note a generated token."""
        place = self._place.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def listed(self, ahead: Sequence[int] = ()) -> tuple[IntArray, IntArray]:
        """Copies of the tokens and their counts, as if those of `ahead` had been generated too. Both int32 [listed]."""
        tokens, counts = np.array(self._tokens, np.int32), np.array(self._counts, np.int32)
        if not len(ahead):
            return tokens, counts
        every, place = np.unique(np.concatenate([tokens, np.asarray(ahead, np.int32)]), return_inverse=True)
        totals = np.zeros(len(every), np.int32)
        np.add.at(totals, place, np.concatenate([counts, np.ones(len(ahead), np.int32)]))
        return every, totals
