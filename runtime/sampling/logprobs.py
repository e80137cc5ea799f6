"""Log probabilities of tokens: from logits, or from the reports that an executor writes for the tokens it chooses.

Both are of the model's logits before any option, penalties too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from qcompile.runtime.sampling.arrays import DoubleArray, FloatArray

Spell = Callable[[int], str]

MOST_REPORTED = 20
"""Most alternatives for each token that executors report; more are found in the logits."""
_PEAK, _SUM, _LOGIT, _RANK, _FIXED = range(5)
"""Columns of a report."""


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability under the model, before any option, and its rank from 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def logprobs_of(logits: FloatArray, token: int, alternatives: int, spell: Spell | None) -> dict[int, Logprob]:
    """Log probabilities of `token` (first) and of the `alternatives` most probable tokens. logits: [vocab].

    Of equal logits, those of lower token numbers come first. `spell` returns a token's text; without it, decoded_token
    is None.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= math.log(np.exp(values).sum())
    count = min(alternatives, len(values))
    top = np.empty(0, np.int64)
    if count:
        top = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
        top = top[np.lexsort((top, -logits[top]))][:count]
    rank = 1 + int((logits > logits[token]).sum())
    return _told(token, rank, float(values[token]), top.tolist(), values[top].tolist(), spell)


def empty_reports(positions: int, alternatives: int) -> DoubleArray:
    """Room for the reports of tokens at this many positions: [positions, 4 + 2 * alternatives].

    A report is the largest logit, the sum of exp(logit - largest), the logit of the chosen token, its rank, the largest
    logits with falling values, and their tokens, of equal ones the lowest first.
    """
    return np.zeros((positions, _FIXED + 2 * alternatives))


def alternatives_of(reports: DoubleArray) -> int:
    """How many alternatives reports have room for."""
    return (reports.shape[1] - _FIXED) // 2


def reported_logprobs(
    reports: DoubleArray, tokens: Sequence[int], spell: Spell | None, most: int | None = None
) -> list[dict[int, Logprob]]:
    """`logprobs_of` tokens from their reports, [positions, fields] with at least as many positions as tokens.

    most: number of alternatives, if the reports have more.
    """
    rows, count = reports[: len(tokens)], alternatives_of(reports)
    logs = np.array([math.log(total) for total in rows[:, _SUM].tolist()]).reshape(-1, 1)
    values = rows[:, _LOGIT : _FIXED + count] - rows[:, _PEAK : _PEAK + 1] - logs
    values[:, 1] = rows[:, _RANK]  # which is between the chosen token's logit and the others
    tops = rows[:, _FIXED + count :].astype(np.int64)
    return [
        _told(token, int(rank), chosen, top[:most], others[:most], spell)
        for token, (chosen, rank, *others), top in zip(tokens, values.tolist(), tops.tolist(), strict=True)
    ]


def prompt_logprobs(
    prompt: Sequence[int], reports: Sequence[DoubleArray], spell: Spell | None, most: int
) -> list[dict[int, Logprob] | None]:
    """`reported_logprobs` of a prompt's tokens, from those of its pieces. The first token has none."""
    logprobs: list[dict[int, Logprob] | None] = [None]
    for piece in reports:
        logprobs += reported_logprobs(piece, prompt[len(logprobs) : len(logprobs) + len(piece)], spell, most)
    return logprobs


def _told(
    token: int, rank: int, logprob: float, top: Sequence[int], logprobs: Sequence[float], spell: Spell | None
) -> dict[int, Logprob]:
    """The result for a token, its rank and log probability, and the most probable tokens with theirs."""
    told = {token: Logprob(logprob, rank, spell(token) if spell else None)}
    for place, (other, its) in enumerate(zip(top, logprobs, strict=True), start=1):
        if other != token:
            told[other] = Logprob(its, place, spell(other) if spell else None)
    return told
