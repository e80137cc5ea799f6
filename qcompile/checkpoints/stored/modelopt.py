"""Weights as NVIDIA's ModelOpt stores them (NVIDIA/TensorRT-Model-Optimizer, modelopt/torch/export).

config.json says how, or the file hf_quant_config.json beside it, which is all that earlier releases wrote. The tensors
of a weight tell which of these it is:

- FP8: NAME of 8-bit floats and NAME_scale, a factor for the whole weight, for each output [outputs], or for blocks of
  128 x 128 [blocks of outputs, 1, blocks of inputs, 1]. In MXFP8 it is uint8 [outputs, inputs / 32], the exponent of a
  power of two, plus 127.
- NVFP4: NAME uint8 [outputs, inputs / 2], two E2M1 codes a byte, the earlier input in the low half;
  NAME_scale, E4M3 [outputs, inputs / 16]; NAME_scale_2 f32, by which scales are multiplied. A weight is the code times
  (scale / (1 / scale_2)) in float32, so that the format nvfp4, which divides by a scale of the tensor, holds it;
  ModelOpt's own product with scale_2 differs from it by at most one part in 4 million.

Scales of activations and of the cache that are stored beside them round these, which the recipe decides. Factors on
inputs (AWQ, SmoothQuant) are refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.groups import (
    ACTIVATIONS,
    E8M0_GROUP,
    Find,
    e2m1_shape,
    forget,
    from_fp8,
    from_mxfp8,
    longer,
    nibbles,
    one_of,
    require,
    require_none_left,
)
from qcompile.errors import UsageError, shown
from qcompile.formats.nvfp4 import NVFP4

METHOD = "modelopt"
FILE = "hf_quant_config.json"
"""The file that says how weights are stored where config.json does not."""
MIXED = "mixed_precision"
"""The algorithm of a checkpoint with modules of several."""
FOUR_BITS = (NVFP4.name, "w4a16_nvfp4")
ALGORITHMS = ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "mxfp8", *FOUR_BITS)
TOTAL = "_scale_2"
"""The end of the name of a scale of a whole weight."""
BLOCK = 128
"""Sides of a block of 8-bit floats that share a factor."""


def modelopt(quantization: dict[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`. Raises UnsupportedError, UsageError."""
    stated = quantization.get("quantization")
    inner = stated if isinstance(stated, dict) else quantization
    if one_of(METHOD, "quant_algo", inner.get("quant_algo"), (*ALGORITHMS, MIXED)) != MIXED:
        _check(inner)
        return _find
    modules = inner.get("quantized_layers")
    if not isinstance(modules, dict) or not all(isinstance(module, dict) for module in modules.values()):
        raise UsageError(f"quantized_layers of {METHOD} weights is {shown(modules)}; settings of modules belong there")
    for module in modules.values():
        _check(module)
    return _find


def beside(content: dict[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` that the `content` of FILE stands for; None if it is of the cache alone."""
    stated = content.get("quantization")
    if isinstance(stated, dict) and stated.get("quant_algo") is None:
        return None
    return {"quant_method": METHOD, **content}


def _check(stated: dict[str, Any]) -> None:
    """Raise UnsupportedError for an algorithm, as a module or all of them have it, that is not read."""
    algorithm = one_of(METHOD, "quant_algo", stated.get("quant_algo"), ALGORITHMS)
    if algorithm in FOUR_BITS:
        one_of(METHOD, "group_size", stated.get("group_size") or NVFP4.group, (NVFP4.group,))


def _find(checkpoint: StoredCheckpoint) -> None:
    for total in [name for name in checkpoint if name.endswith(f".weight{TOTAL}")]:
        name = total.removesuffix(TOTAL)
        if name not in checkpoint:
            raise UsageError(f"tensor {name} is missing, and {total} is there")
        shape = e2m1_shape(checkpoint, name, name, NVFP4.group, torch.float8_e4m3fn)
        require(checkpoint, total, () if not checkpoint.entries[total].shape else (1,), torch.float32)
        checkpoint.add(name, shape, (name, f"{name}_scale", total), _from_parts)
    for name, entry in list(checkpoint.entries.items()):
        if entry.dtype.itemsize == 1 and entry.dtype.is_floating_point and not name.endswith("_scale"):
            _add_floats(checkpoint, name)
    forget(checkpoint, ACTIVATIONS)
    require_none_left(checkpoint, (".weight_scale", TOTAL, ".pre_quant_scale"))
    for name, entry in checkpoint.entries.items():
        if name.endswith(".weight") and not entry.dtype.is_floating_point:
            raise UsageError(f"tensor {name} is {entry.dtype}, and no {name}{TOTAL} makes it NVFP4")


def _add_floats(checkpoint: StoredCheckpoint, name: str) -> None:
    """Make the weight `name` of itself, 8-bit floats, and of its factors, as their type and shape tell."""
    entry = checkpoint.entries[name]
    if len(entry.shape) < 2 or 0 in entry.shape:
        raise UsageError(f"tensor {name} of 8-bit floats has shape {list(entry.shape)}; matrices are read")
    *matrices, outputs, inputs = entry.shape
    scales = checkpoint.entries.get(f"{name}_scale")
    shape = () if scales is None else scales.shape
    if scales is not None and scales.dtype == torch.uint8:
        require(checkpoint, f"{name}_scale", (*matrices, outputs, -(-inputs // E8M0_GROUP)), torch.uint8)
        checkpoint.add(name, entry.shape, (name, f"{name}_scale"), from_mxfp8)
        return
    if len(shape) == len(matrices) + 4:
        block, wanted = [BLOCK, BLOCK], (*matrices, -(-outputs // BLOCK), 1, -(-inputs // BLOCK), 1)
    elif longer(shape) == longer((*matrices, outputs)):
        block, wanted = [1, inputs], shape
    else:
        block, wanted = [outputs, inputs], shape if longer(shape) == longer(matrices) else (*matrices, 1)
    require(checkpoint, f"{name}_scale", wanted)
    checkpoint.add(name, entry.shape, (name, f"{name}_scale"), functools.partial(from_fp8, block=block))


def _from_parts(packed: Tensor, scales: Tensor, total: Tensor) -> Tensor:
    """Codes uint8 [n, k / 2], E4M3 scales [n, k / 16] and the scale of the weight f32 -> float32 [n, k]."""
    codes = nibbles(packed)
    return NVFP4.dequantize([codes, scales.view(torch.uint8), (1 / total).reshape(1)], codes.shape[1])
