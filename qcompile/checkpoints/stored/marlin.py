"""GPTQ weights in the order of the Marlin kernel (AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_marlin.py).

Codes are symmetric ones of 4 bits: (code - 8) * scale. NAME.B int32 [inputs / 16, outputs * 2] has them in tiles of 16
inputs and 64 outputs, 128 words a tile. A word has the codes of four inputs of an output, and of the output eight
further on. With the bits of numbers from the highest to the lowest:

- the number of the word in its tile is the lower 3 bits of the output, bits 2 and 1 of the input, and the upper 2 bits
  of the output;
- the number of the code in its word, from the lowest bits on, is bit 0 of the input, bit 3 of the output, and bit 3 of
  the input.

NAME.s is [groups, outputs]. Of several groups, 64 consecutive scales are a transposed 8 x 8 matrix. Of a single group,
32 consecutive scales are a matrix [4, 4] of pairs, transposed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.gptq_rules import ModuleRules, module_rules
from qcompile.checkpoints.stored.groups import (
    Find,
    dequantize,
    group_size,
    one_of,
    require,
    require_none_left,
    shifts,
    unpack,
    words_of,
)
from qcompile.errors import UsageError

METHOD = "marlin"
INPUTS, OUTPUTS, WORDS = 16, 64, 128
"""Inputs, outputs and words of a tile."""
BITS, MIDDLE = 4, 8
"""Bits of a code, and its zero point."""


def marlin(quantization: Mapping[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`. Raises UnsupportedError, UsageError."""
    return functools.partial(_find, sizes=module_rules(quantization, _group))


def _group(quantization: Mapping[str, Any]) -> int:
    """Inputs in a group (-1: all), as this `quantization_config` says. Raises UnsupportedError, UsageError."""
    for key, values in {"bits": (BITS, None), "sym": (True, None), "desc_act": (False, None)}.items():
        one_of(METHOD, key, quantization.get(key), values)
    return group_size(METHOD, quantization.get("group_size"))


def _find(checkpoint: StoredCheckpoint, sizes: ModuleRules[int]) -> None:
    """Add the weights of codes in tiles; `sizes` are inputs in a group by module, -1 for all."""
    checkpoint.linears = True
    for name in list(checkpoint):
        stem = name.removesuffix(".B")
        if stem == name:
            continue
        tiles, words = words_of(checkpoint, name)
        if words % WORDS:
            raise UsageError(f"tensor {name} has {words} words a row; tiles of {WORDS} words do not fill them")
        inputs, outputs = tiles * INPUTS, words // WORDS * OUTPUTS
        size = sizes.scheme(stem)
        size = inputs if size < 0 else size
        if inputs % size:
            raise UsageError(f"tensor {name} has {inputs} inputs, which groups of {size} do not fill")
        require(checkpoint, f"{stem}.s", (inputs // size, outputs))
        make = functools.partial(from_marlin, size)
        checkpoint.add(f"{stem}.weight", (outputs, inputs), (name, f"{stem}.s"), make)
    require_none_left(checkpoint, (".s", ".qweight", ".qzeros", ".scales"))


def from_marlin(size: int, words: Tensor, scales: Tensor) -> Tensor:
    """Words [inputs / 16, outputs * 2], scales [groups, outputs], `size` inputs to a group -> f32 [outputs, inputs]."""
    inputs = len(words) * INPUTS
    a_word = WORDS // OUTPUTS

    def codes(band: slice) -> Tensor:
        return in_order(words[:, band.start * a_word : band.stop * a_word])

    return dequantize(inputs, codes, scales_in_order(scales).T, MIDDLE, size)


def in_order(words: Tensor) -> Tensor:
    """Words [inputs / 16, outputs * 2] of whole tiles -> codes int32 [outputs, inputs]."""
    # [tiles of inputs, tiles of outputs, outputs' bits 2 1 0, inputs' bits 2 1, outputs' bits 5 4, and of the code in
    # its word: input's bit 0, output's bit 3, input's bit 3]
    parts = unpack(words, shifts(BITS), 1).view(len(words), -1, 8, 4, 4, 2, 2, 2)
    return parts.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(-1, len(words) * INPUTS)


def scales_in_order(scales: Tensor) -> Tensor:
    """Scales [groups, outputs] as stored -> in the order of outputs."""
    sides = (8, 8) if len(scales) > 1 else (4, 4, 2)
    return scales.unflatten(1, (-1, *sides)).transpose(2, 3).reshape(scales.shape)
