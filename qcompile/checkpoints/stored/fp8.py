"""Weights in 8-bit floats with factors (DeepSeek V3, AutoFP8; see modelopt.py for ModelOpt's).

- `fp8`: NAME of 8-bit floats and NAME_scale_inv, a factor for each block of `weight_block_size` rows and columns, the
  last ones short, or for the whole weight. AutoFP8 has NAME_scale, a factor for the whole weight.
- `fbgemm_fp8` (huggingface/transformers, integrations/fbgemm_fp8.py): NAME and NAME_scale [outputs, 1], a factor for
  each output.

Scales of activations and of the cache that are stored beside them round these, which the recipe decides.
"""

from __future__ import annotations

import functools
from typing import Any

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.groups import ACTIVATIONS, Find, forget, from_fp8, longer
from qcompile.errors import UsageError

BLOCK_FACTORS, FACTOR = "_scale_inv", "_scale"
"""Endings of names of factors."""


def fp8(quantization: dict[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`. Raises UsageError."""
    block = quantization.get("weight_block_size", [128, 128])
    if block is not None and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    ):
        raise UsageError(f"weight_block_size of the checkpoint's fp8 weights is {block}; two sizes belong there")
    return functools.partial(find_fp8, block=None if block is None else list(block))


def find_fp8(checkpoint: StoredCheckpoint, block: list[int] | None) -> None:
    """Add the weights of 8-bit floats with factors for each `block` of rows and columns (None: for whole weights)."""
    for name, entry in list(checkpoint.entries.items()):
        if entry.dtype.itemsize > 1 or not entry.dtype.is_floating_point:
            continue
        factors = name + (FACTOR if f"{name}{FACTOR}" in checkpoint else BLOCK_FACTORS)
        scales = checkpoint.entries.get(factors)
        if scales is None:
            raise UsageError(f"tensor {name} is of 8-bit floats and has no {name}{BLOCK_FACTORS}")
        if len(entry.shape) < 2:
            raise UsageError(f"tensor {name} of 8-bit floats has shape {list(entry.shape)}; matrices are read")
        whole = block is None or factors.endswith(FACTOR)
        rows = whole and scales.shape[-2:] == (entry.shape[-2], 1)
        sides = [1, entry.shape[-1]] if rows else list(entry.shape[-2:] if whole else block or ())
        wanted = (*entry.shape[:-2], *(-(-n // side) for n, side in zip(entry.shape[-2:], sides, strict=True)))
        if not scales.dtype.is_floating_point or longer(scales.shape) != longer(wanted):
            stored = f"{scales.dtype} of shape {list(scales.shape)}"
            raise UsageError(f"tensor {factors} is {stored}; floats of shape {list(wanted)} belong there")
        make = functools.partial(from_fp8, block=sides)
        checkpoint.add(name, entry.shape, (name, factors), make)
    forget(checkpoint, ACTIVATIONS)
