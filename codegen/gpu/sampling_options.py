"""Where kernels find the sampling options of a sequence (artifact/abi.py states them and their order)."""

from __future__ import annotations

from qcompile.artifact.abi import GpuSamplingOptions

OPTIONS = len(GpuSamplingOptions._fields)
"""Sampling options of a sequence, float64 each."""


def option(name: str) -> str:
    """The place of a sampling option of a sequence, as an expression in kernels whose `given` points to the first."""
    index = GpuSamplingOptions._fields.index(name)
    return f"given + {index}" if index else "given"
