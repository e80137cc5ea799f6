"""Checkpoints whose weights are stored in few bits, read as the numbers that the codes represent.

Some models are published only in such a form. A weight and its scales become one float32 tensor of the weight's name,
and later stages see only that tensor. A recipe may then quantize it again. The recipe `mxfp4` restores exactly the
values of an MXFP4 checkpoint: a group's values are E2M1 numbers under one power of two, so they are representable under
the power of two that the recipe chooses for the group.

- `fp8` (`quant_method` of DeepSeek V3 and others): NAME of 8-bit floats and NAME_scale_inv, a factor for each block of
  `weight_block_size` rows and columns, the last ones short, or for the whole weight.
- `mxfp4` (gpt-oss): NAME_blocks uint8 [experts, outputs, groups, 16], the earlier of two inputs in the low half, and
  NAME_scales, E8M0 [experts, outputs, groups]; together NAME [experts, inputs, outputs].
- `awq`, `gptq` and `compressed-tensors`: see awq.py, gptq.py and compressed.py.
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
from qcompile.checkpoints.stored.awq import awq
from qcompile.checkpoints.stored.compressed import compressed_tensors
from qcompile.checkpoints.stored.gptq import gptq
from qcompile.checkpoints.stored.groups import Find
from qcompile.errors import UnsupportedError, UsageError
from qcompile.formats.elements import e2m1_values

BLOCK_SCALES, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
PACKED = (".qweight", ".weight_packed")
"""Endings of names of tensors that cannot be read without a configuration that says how they are packed."""
GROUP = 32
"""Inputs that share one power of two in MXFP4."""


def open_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`, stored as its configuration says."""
    quantization = read_json(directory / "config.json").get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == METHOD:
        return GgufCheckpoint(directory)
    if quantization is not None:
        find = reader(quantization)
        stored = StoredCheckpoint(directory)
        find(stored)
        return stored
    checkpoint = Checkpoint(directory)
    for name, entry in checkpoint.entries.items():
        factors = next((name + ending for ending in (BLOCK_SCALES, "_scale") if name + ending in checkpoint), None)
        if factors and entry.dtype.itemsize == 1:
            raise UsageError(
                f"tensor {name} has factors beside it, {factors}, and config.json does not say what they are: its "
                "quantization_config is missing"
            )
        if name.endswith(PACKED):
            raise UsageError(
                f"tensor {name} is packed, and config.json does not say how: its quantization_config is missing"
            )
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


# ---- fp8 -------------------------------------------------------------------------------------------


def _fp8(quantization: dict[str, Any]) -> Find:
    block = quantization.get("weight_block_size", [128, 128])
    if block is not None and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    ):
        raise UsageError(f"weight_block_size of the checkpoint's fp8 weights is {block}; two sizes belong there")
    return functools.partial(_find_fp8, block=None if block is None else list(block))


def _find_fp8(checkpoint: StoredCheckpoint, block: list[int] | None) -> None:
    for name, entry in list(checkpoint.entries.items()):
        if entry.dtype.itemsize > 1 or not entry.dtype.is_floating_point:
            continue
        scales = checkpoint.entries.get(name + BLOCK_SCALES)
        if scales is None:
            raise UsageError(f"tensor {name} is of 8-bit floats and has no {name}{BLOCK_SCALES}")
        if len(entry.shape) < 2:
            raise UsageError(f"tensor {name} of 8-bit floats has shape {list(entry.shape)}; matrices are read")
        sides = list(entry.shape[-2:] if block is None else block)
        wanted = (*entry.shape[:-2], *(-(-n // side) for n, side in zip(entry.shape[-2:], sides, strict=True)))
        if not scales.dtype.is_floating_point or _longer(scales.shape) != _longer(wanted):
            stored = f"{scales.dtype} of shape {list(scales.shape)}"
            raise UsageError(f"tensor {name}{BLOCK_SCALES} is {stored}; floats of shape {list(wanted)} belong there")
        make = functools.partial(from_fp8, block=sides)
        checkpoint.add(name, entry.shape, (name, name + BLOCK_SCALES), make)


def _longer(shape: tuple[int, ...]) -> list[int]:
    """The sides of `shape` other than 1: one factor may be stored with several shapes."""
    return [side for side in shape if side != 1]


def from_fp8(codes: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """8-bit floats [..., n, k] and a factor for each `block` of rows and columns -> float32 [..., n, k]."""
    value = codes.to(torch.float32)
    rows, columns = block
    factors = scales.to(torch.float32).reshape(*codes.shape[:-2], -1, -(-codes.shape[-1] // columns))
    factors = factors.repeat_interleave(columns, -1)[..., : codes.shape[-1]]
    for index in range(factors.shape[-2]):  # one row of blocks at a time, to avoid a second tensor of the weight's size
        value[..., index * rows : (index + 1) * rows, :] *= factors[..., index : index + 1, :]
    return value


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


_READERS: dict[str, Callable[[dict[str, Any]], Find]] = {
    "fp8": _fp8,
    "mxfp4": lambda quantization: _find_mxfp4,
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    METHOD: lambda quantization: lambda checkpoint: None,
}
