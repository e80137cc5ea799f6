"""Weights as NVIDIA's ModelOpt stores them (NVIDIA/TensorRT-Model-Optimizer, modelopt/torch/export).

- `quant_algo: FP8`: NAME of 8-bit floats and NAME_scale, a factor for the whole weight.
- `quant_algo: NVFP4`: NAME uint8 [outputs, inputs / 2], two E2M1 codes a byte, the earlier input in the low half;
  NAME_scale, E4M3 [outputs, inputs / 16]; NAME_scale_2 f32, by which scales are multiplied. A weight is the code times
  (scale / (1 / scale_2)) in float32, so that the format nvfp4, which divides by a scale of the tensor, holds it;
  ModelOpt's own product with scale_2 differs from it by at most one part in 4 million.

Scales of activations and of the cache that are stored beside them round these, which the recipe decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.groups import (
    ACTIVATIONS,
    Find,
    e2m1_shape,
    forget,
    nibbles,
    one_of,
    require,
    require_none_left,
)
from qcompile.errors import UsageError
from qcompile.formats.nvfp4 import NVFP4

METHOD = "modelopt"
TOTAL = "_scale_2"
"""The end of the name of a scale of a whole weight."""


def modelopt(quantization: dict[str, Any], floats: Find) -> Find:
    """The reader for a checkpoint with this `quantization_config`: `floats` for FP8. Raises UnsupportedError."""
    stated = quantization.get("quantization")
    inner = stated if isinstance(stated, dict) else quantization
    if one_of(METHOD, "quant_algo", inner.get("quant_algo"), ("fp8", NVFP4.name)) == "fp8":
        return floats
    one_of(METHOD, "group_size", inner.get("group_size") or NVFP4.group, (NVFP4.group,))
    return _find_nvfp4


def _find_nvfp4(checkpoint: StoredCheckpoint) -> None:
    for total in [name for name in checkpoint if name.endswith(f".weight{TOTAL}")]:
        name = total.removesuffix(TOTAL)
        if name not in checkpoint:
            raise UsageError(f"tensor {name} is missing, and {total} is there")
        shape = e2m1_shape(checkpoint, name, name, NVFP4.group, torch.float8_e4m3fn)
        require(checkpoint, total, () if not checkpoint.entries[total].shape else (1,), torch.float32)
        checkpoint.add(name, shape, (name, f"{name}_scale", total), _from_parts)
    forget(checkpoint, ACTIVATIONS)
    require_none_left(checkpoint, (".weight_scale", TOTAL))


def _from_parts(packed: Tensor, scales: Tensor, total: Tensor) -> Tensor:
    """Codes uint8 [n, k / 2], E4M3 scales [n, k / 16] and the scale of the weight f32 -> float32 [n, k]."""
    codes = nibbles(packed)
    return NVFP4.dequantize([codes, scales.view(torch.uint8), (1 / total).reshape(1)], codes.shape[1])
