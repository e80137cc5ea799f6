"""Checkpoints with weights that are stored in few bits, read as the numbers that the codes represent.

Some models are published only in such a form. A weight and its scales become one float32 tensor of the weight's name,
and later stages see only that tensor. A recipe may then quantize it again. The recipe `mxfp4` restores exactly the
values of an MXFP4 checkpoint: a group's values are E2M1 numbers under one power of two, so they are representable under
the power of two that the recipe chooses for the group.

- `fp8`, `fbgemm_fp8`: see fp8.py; `modelopt`: see modelopt.py.
- `mxfp4` (gpt-oss): NAME_blocks uint8 [experts, outputs, groups, 16], the earlier of two inputs in the low half, and
  NAME_scales, E8M0 [experts, outputs, groups]; together NAME [experts, inputs, outputs].
- `awq`, `gptq`, `marlin`, `compressed-tensors`, `bitsandbytes`, `torchao` and `hqq`: see the files of these names.
  `quanto`, too; a file beside the weights says that it is used.
- `auto-round`: in the way of one of these, see auto_round.py.
- `gguf`: the folder of a GGUF file, see checkpoints/gguf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import Checkpoint, StoredCheckpoint, read_json
from qcompile.checkpoints.gguf.files import METHOD
from qcompile.checkpoints.gguf.tensors import GgufCheckpoint
from qcompile.checkpoints.stored import hqq, modelopt, quanto
from qcompile.checkpoints.stored.auto_round import METHOD as AUTO_ROUND
from qcompile.checkpoints.stored.auto_round import auto_round
from qcompile.checkpoints.stored.awq import awq
from qcompile.checkpoints.stored.bitsandbytes import KINDS, STATE, bitsandbytes
from qcompile.checkpoints.stored.compressed import compressed_tensors
from qcompile.checkpoints.stored.fp8 import BLOCK_FACTORS, FACTOR, fp8
from qcompile.checkpoints.stored.gptq import gptq
from qcompile.checkpoints.stored.groups import Find
from qcompile.checkpoints.stored.marlin import marlin
from qcompile.checkpoints.stored.torchao import torchao
from qcompile.errors import UnsupportedError, UsageError
from qcompile.formats.elements import e2m1_values

BLOCKS, SCALES = "_blocks", "_scales"
KEY, OLD_KEY = "quantization_config", "compression_config"
"""What config.json calls it, or its part `text_config`; early releases of compressed-tensors had another name."""
PACKED = (".qweight", ".weight_packed", "_qdata", "._data", ".SCB", *(STATE + kind for kind in KINDS))
"""Endings of names of tensors of weights that cannot be read without a configuration that says how they are packed."""
GROUP = 32
"""Inputs that share one power of two in MXFP4."""


def stated(directory: Path) -> Any:
    """What the files of a checkpoint say of how its weights are stored: a `quantization_config`, or None."""
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    inner = text.get(KEY) if isinstance(text, dict) else None
    places = (config.get(KEY), config.get(OLD_KEY), inner)
    quantization = next((place for place in places if place is not None), None)
    if quantization is None and (directory / quanto.MAP).is_file():
        return {"quant_method": quanto.METHOD}
    if quantization is None and (directory / modelopt.FILE).is_file():
        return modelopt.beside(read_json(directory / modelopt.FILE))
    return quantization


def open_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`, stored as its configuration says."""
    quantization = stated(directory)
    if isinstance(quantization, dict) and quantization.get("quant_method") == METHOD:
        return GgufCheckpoint(directory)
    if quantization is not None:
        return _stored(directory, quantization)
    checkpoint = Checkpoint(directory)
    if any(name.endswith(hqq.CODES) for name in checkpoint):  # hqq's own functions save tensors, which say all
        return _stored(directory, {"quant_method": hqq.METHOD})
    for name, entry in checkpoint.entries.items():
        factors = next((name + ending for ending in (BLOCK_FACTORS, FACTOR) if name + ending in checkpoint), None)
        if factors and entry.dtype.itemsize == 1:
            raise UsageError(
                f"tensor {name} has factors beside it, {factors}, and config.json does not say what they are: its "
                "quantization_config is missing"
            )
        if name.endswith(PACKED):
            packed = f"tensor {name} is of a packed weight, and config.json does not say how"
            raise UsageError(f"{packed}: its quantization_config is missing")
    return checkpoint


def _stored(directory: Path, quantization: Any) -> StoredCheckpoint:
    find = reader(quantization)
    checkpoint = StoredCheckpoint(directory)
    find(checkpoint)
    return checkpoint


def reader(quantization: Any) -> Find:
    """The reader for weights stored as `quantization`, a configuration's `quantization_config`, says. Reads no file.

    Raises UnsupportedError for a form that is not read, UsageError for a malformed configuration.
    """
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(method, str) or method not in _READERS:
        raise UnsupportedError(
            f"checkpoint is already quantized ({method or 'unknown'}); give the original weights "
            f"(stored ones are read as {', '.join(_READERS)})"
        )
    return _READERS[method](quantization)


# ---- MXFP4 -----------------------------------------------------------------------------------------


def _find_mxfp4(checkpoint: StoredCheckpoint) -> None:
    for blocks, entry in list(checkpoint.entries.items()):
        name = blocks.removesuffix(BLOCKS)
        scales = checkpoint.entries.get(name + SCALES)
        if name == blocks or entry.dtype != torch.uint8:
            continue
        if scales is None:
            raise UsageError(f"tensor {blocks} has no {name}{SCALES} beside it")
        right = len(entry.shape) == 4 and entry.shape[-1] == GROUP // 2 and scales.shape == entry.shape[:-1]
        if not right or scales.dtype != torch.uint8:
            shapes = f"{list(entry.shape)} and {scales.dtype} {list(scales.shape)}"
            raise UsageError(
                f"tensors {blocks} and {name}{SCALES} are {shapes}; "
                "uint8 [experts, outputs, groups, 16] and uint8 [experts, outputs, groups] are read"
            )
        experts, outputs, groups, _ = entry.shape
        checkpoint.add(name, (experts, groups * GROUP, outputs), (blocks, name + SCALES), from_mxfp4)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Codes uint8 [e, n, g, 16] and powers uint8 [e, n, g] -> float32 [e, 32 g, n], one expert at a time."""
    experts, outputs, groups, half = blocks.shape
    value = torch.empty(experts, 2 * half * groups, outputs)
    for index in range(experts):
        codes = torch.stack((blocks[index] & 15, blocks[index] >> 4), -1).view(outputs, groups, 2 * half)
        powers = torch.exp2(scales[index].to(torch.float32) - 127)  # 255 stands for NaN, and becomes infinity
        value[index] = (e2m1_values(codes) * powers[..., None]).view(outputs, -1).T
    return value


_gptq = functools.partial(gptq, tiled=marlin)
_READERS: dict[str, Callable[[dict[str, Any]], Find]] = {
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    modelopt.METHOD: modelopt.modelopt,
    "mxfp4": lambda quantization: _find_mxfp4,
    "awq": awq,
    "gptq": _gptq,
    "marlin": marlin,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    hqq.METHOD: hqq.hqq,
    quanto.METHOD: quanto.quanto,
    AUTO_ROUND: functools.partial(auto_round, gptq=_gptq, awq=awq, compressed=compressed_tensors),
    METHOD: lambda quantization: lambda checkpoint: None,
}
