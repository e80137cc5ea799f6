"""What templates of kernels on logits have in common: the options of a sequence, and the parts of a row.

artifact/abi.py states the sampling options and their order.
"""

from __future__ import annotations

from typing import Any

from qcompile.artifact.abi import GpuSamplingOptions
from qcompile.codegen.sizes import power_of_two

OPTIONS = len(GpuSamplingOptions._fields)
"""Sampling options of a sequence, float64 each."""


def option(name: str) -> str:
    """The address of a sampling option of a sequence, as an expression in kernels; `given` points to the first."""
    index = GpuSamplingOptions._fields.index(name)
    return f"given + {index}" if index else "given"


OPTION_VALUES: dict[str, Any] = {"option": option, "options": OPTIONS}
"""Values for templates that read sampling options."""


def parts_values(vocab: int, part: int) -> dict[str, int]:
    """Values for templates of programs that take `part` logits of a row each."""
    parts = -(-vocab // part)
    return {"vocab": vocab, "part": part, "parts": parts, "parts_block": power_of_two(parts)}
