"""What a format of checkpoints is: how it stores the parts of a weight, and how the configuration says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD = 32
"""Bits of the integers that codes are packed in."""


@dataclass(frozen=True)
class StoredLayout:
    """How a format of checkpoints stores weights of one of our formats.

    `tensors` makes the file's tensors from the parts of a weight by role, named by what follows the module's name.
    `config` makes quantization_config, given the linears that stay floating-point numbers, and which of them is the
    output head. The numbers of inputs and outputs of a weight must be multiples of `inputs` and `outputs`. `activation`
    is the format of activations that the configuration asks for, if it does.
    """

    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    config: Callable[[Sequence[str], str | None], dict[str, Any]]
    inputs: int = 1
    outputs: int = 1
    activation: str = ""


def pack_halves(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [n, k] -> uint8 [n, k / 2], the earlier input in the low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def pack_words(codes: Tensor, dim: int, places: Sequence[int] = range(0, WORD, 4)) -> Tensor:
    """Codes [n, k] that are not negative -> int32 words along `dim`, the last padded with zeros.

    `places` are the first bits, in a word, of its codes in their order.
    """
    each = len(places)
    short = -codes.shape[dim] % each
    pad = (0, short) if dim == 1 else (0, 0, 0, short)
    grouped = torch.nn.functional.pad(codes, pad).to(torch.int32).unflatten(dim, (-1, each))
    words = torch.zeros_like(grouped.select(dim + 1, 0))
    for index, place in enumerate(places):
        words |= grouped.select(dim + 1, index) << place
    return words
