"""AWQ weights, version "gemm" (casper-hansen/AutoAWQ, awq/modules/linear/gemm.py).

NAME.qweight int32 [inputs, outputs / 8] has 4 bits a code; from the lowest bits of a word on, the codes are of outputs
0, 2, 4, 6, 1, 3, 5, 7. NAME.qzeros int32 [groups, outputs / 8] has the same order. NAME.scales is [groups, outputs].
Without zero points (GPTQModel writes `zero_point: false`) all of NAME.qzeros are 8.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.groups import (
    Find,
    dequantize,
    group_size,
    one_of,
    require,
    require_none_left,
    require_uniform,
    unpack,
    words_of,
)
from qcompile.errors import UnsupportedError, UsageError

AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""First bits, in a word, of the codes of eight consecutive outputs."""
MIDDLE = 8
"""The zero point of symmetric weights."""


def awq(quantization: dict[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`. Raises UnsupportedError, UsageError."""
    get = quantization.get
    one_of("awq", "bits", get("bits", get("w_bit", 4)), (4,))
    zero_point = one_of("awq", "zero_point", get("zero_point", True), (True, False))
    for key in ("version", "format", "checkpoint_format"):  # what AutoAWQ and GPTQModel call it
        one_of("awq", key, get(key) or "gemm", ("gemm",))
    if get("backend") == "llm-awq":
        raise UnsupportedError("awq weights with backend llm-awq are not read")
    require_uniform("awq", quantization)
    size = group_size("awq", get("group_size", get("q_group_size", 128)))
    return functools.partial(_find_awq, size=size, symmetric=not zero_point)


def _find_awq(checkpoint: StoredCheckpoint, size: int, symmetric: bool) -> None:
    checkpoint.linears = True
    for name in list(checkpoint):
        stem = name.removesuffix(".qweight")
        if stem == name:
            continue
        inputs, words = words_of(checkpoint, name)
        group = inputs if size < 0 else size
        count = -(-inputs // group)
        require(checkpoint, f"{stem}.qzeros", (count, words), torch.int32)
        require(checkpoint, f"{stem}.scales", (count, words * len(AWQ_SHIFTS)))
        make = (
            functools.partial(_from_symmetric, stem, group) if symmetric else functools.partial(from_awq, group=group)
        )
        parts = (name, f"{stem}.qzeros", f"{stem}.scales")
        checkpoint.add(f"{stem}.weight", (words * len(AWQ_SHIFTS), inputs), parts, make)
    require_none_left(checkpoint, (".qzeros", ".scales"))


def _from_symmetric(name: str, group: int, words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """As `from_awq`, for the weights `name` with all zero points in the middle; UsageError if one is elsewhere."""
    if bool((stored := unpack(zeros, AWQ_SHIFTS, 1)).ne(MIDDLE).any()):
        raise UsageError(
            f"tensor {name}.qzeros holds zero points {int(stored.min())} to {int(stored.max())}, and zero_point is "
            f"false, which means {MIDDLE} everywhere: correct zero_point in the quantization_config"
        )
    return from_awq(words, zeros, scales, group)


def from_awq(words: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Tensor:
    """Words [inputs, outputs / 8] and [groups, outputs / 8], scales [groups, outputs] -> f32 [outputs, inputs]."""

    def codes(band: slice) -> Tensor:
        each = len(AWQ_SHIFTS)
        return unpack(words[:, band.start // each : band.stop // each], AWQ_SHIFTS, 1).T

    return dequantize(len(words), codes, scales.T, unpack(zeros, AWQ_SHIFTS, 1).T, group)
