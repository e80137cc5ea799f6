"""Sampling options that the tests of kernels and library try."""

from __future__ import annotations

from typing import Any

from qcompile.runtime.sampling import SamplingParams

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
    {"repetition_penalty": 1e3, "frequency_penalty": -1.7, "temperature": 0.9, "top_k": 20, "min_p": 0.01},
]
"""Penalties; greedy where no temperature is given. Those that invite tokens to recur show whether they are counted."""


def penalized(**more: Any) -> list[SamplingParams]:
    """Parameters with each of PENALTIES, and more options."""
    return [SamplingParams(**{"temperature": 0.0, "seed": i, **more, **o}) for i, o in enumerate(PENALTIES)]
