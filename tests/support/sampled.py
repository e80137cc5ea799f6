"""Sampling options that the tests of kernels and library try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qcompile.runtime.sampling.logprobs import Logprob
from qcompile.runtime.sampling.params import SamplingParams

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.5, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1e-3},
    {"temperature": 1e-300},
    {"temperature": 1e6, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 1 - 1e-7},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 5.0, "top_p": 0.3, "top_k": 7},
]

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.2},
    {"repetition_penalty": 0.3, "frequency_penalty": 0.2, "temperature": 0.5},
    {"frequency_penalty": 0.3},
    {"repetition_penalty": 0.05, "frequency_penalty": 0.4, "presence_penalty": 0.5},
    {"presence_penalty": -2.0, "frequency_penalty": 0.5, "temperature": 0.3, "top_p": 0.9},
    {"logit_bias": {5: 3.5, 7: 3, 11: -100, 12: 2.75}, "frequency_penalty": 0.25},
    {"logit_bias": dict.fromkeys(range(1, 40, 3), 2.5), "repetition_penalty": 1.4, "temperature": 0.8},
    {"logit_bias": {9: 1.25, 10: -3}},
    {"repetition_penalty": 1e3, "frequency_penalty": -1.7, "temperature": 0.9, "top_k": 20, "min_p": 0.01},
]
"""Penalties and biases; greedy where no temperature is given. Those that invite tokens to recur show whether they are
counted."""


def penalized(**more: Any) -> list[SamplingParams]:
    """Parameters with each of PENALTIES, and more options."""
    return [SamplingParams(**{"temperature": 0.0, "seed": i, **more, **o}) for i, o in enumerate(PENALTIES)]


Found = Sequence[dict[int, Logprob]] | None


def same_logprobs(a: Found, b: Found) -> bool:
    """Whether tokens, their order, ranks and texts are equal, and log probabilities but for the order of a sum."""
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(map(_same_place, a, b))


def _same_place(a: dict[int, Logprob], b: dict[int, Logprob]) -> bool:
    def near(one: Logprob, other: Logprob) -> bool:
        close = math.isclose(one.logprob, other.logprob, rel_tol=0, abs_tol=4e-12)
        return close and (one.rank, one.decoded_token) == (other.rank, other.decoded_token)

    return list(a) == list(b) and all(near(a[token], b[token]) for token in a)


def same_outputs(a: Sequence[tuple[Any, ...]], b: Sequence[tuple[Any, ...]]) -> bool:
    """Whether outputs, each tokens, log probabilities and more, are equal by `same_logprobs`."""
    pairs = zip(a, b, strict=True)
    return all(same_logprobs(x[1], y[1]) and (x[0], *x[2:]) == (y[0], *y[2:]) for x, y in pairs)
