"""Versions of the interfaces between an artifact's compiled part and the runtime; they rise when an interface changes.

Code generation writes the numbers into artifacts, and the runtime refuses artifacts of another version by name.
"""

from __future__ import annotations

from typing import NamedTuple

CPU_ABI = 12
"""Version of the C interface of a CPU target's library (codegen/cpu/templates/abi.h, runtime/cpu/executor.py)."""
GPU_ABI = 28
"""Version of the launch plans of a GPU target (codegen/gpu/launches.py, runtime/cuda/executor.py)."""


class GpuSamplingOptions(NamedTuple):
    """The float64 numbers by which GPU kernels sample a sequence, in their order in the array `sampling` of a launch.

    Places are indices: of `uniforms` in the random numbers, of `reports` in the reports, of all others in the lists of
    tokens. The list of penalties has the tokens' counts, the tokens, and `room` for tokens chosen since; the list of
    biases has the tokens and the biases.
    """

    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    min_logit: float = 0.0
    """What to add to the largest logit for min-p's limit."""
    top_k: float = 0
    """0: no limit."""
    first: float = 0
    """Position of the token that the first random number draws."""
    uniforms_at: float = 0
    uniforms: float = 0
    alternatives: float = 0
    """Alternatives in a report of log probabilities."""
    repetition: float = 0.0
    frequency: float = 0.0
    presence: float = 0.0
    listed_at: float = 0
    listed: float = 0
    room: float = 0
    """0: no penalties."""
    reports_at: float = 0
    reported: float = 0
    """Positions to report; 0: none."""
    known_at: float = 0
    known: float = 0
    """Tokens that are known to follow."""
    known_through: float = 0
    """Known tokens of this sequence and of all before it."""
    biases_at: float = 0
    biases: float = 0
    masked: float = 0
    """1: some tokens are left out by a mask."""
