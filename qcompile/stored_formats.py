"""Checkpoints whose weights are stored in few bits, read as the numbers that those stand for.

Some models are published in no other form. A weight and its scales become one tensor of the weight's name, in float32,
and everything after this module sees nothing else. What a recipe then makes of it is its own affair: `mxfp4` finds
the very numbers that were stored, because any 32 numbers that E2M1 has under one power of two it has under their own.

- `fp8` (`quant_method` of DeepSeek V3 and others): NAME of 8-bit floats and NAME_scale_inv, a factor for each block of
  `weight_block_size` rows and columns, the last ones short, or for the whole weight.
- `mxfp4` (gpt-oss): NAME_blocks uint8 [experts, outputs, groups, 16], the earlier of two inputs in the low half, and
  NAME_scales, E8M0 [experts, outputs, groups]; together NAME [experts, inputs, outputs].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoint import Checkpoint, read_json
from qcompile.errors import UnsupportedError, UsageError
from qcompile.numerics import e2m1_values

BLOCK_SCALES, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
GROUP = 32
"""Inputs that share one power of two in MXFP4."""


def open_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`, stored as its configuration says."""
    quantization = read_json(directory / "config.json").get("quantization_config")
    if quantization is not None:
        return StoredCheckpoint(directory, quantization)
    checkpoint = Checkpoint(directory)
    for name, entry in checkpoint.entries.items():
        if name + BLOCK_SCALES in checkpoint and entry.dtype.itemsize == 1:
            raise UsageError(
                f"tensor {name} has factors beside it, {name}{BLOCK_SCALES}, and config.json does not say what they "
                "are: its quantization_config is missing"
            )
    return checkpoint


def require_read(quantization: dict[str, Any]) -> None:
    """Raise UnsupportedError unless weights stored as `quantization` says are read."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(method, str) or method not in _FIND:
        raise UnsupportedError(
            f"checkpoint is already quantized ({method or 'unknown'}); give the original weights "
            f"(stored ones are read as {', '.join(_FIND)})"
        )


class StoredCheckpoint(Checkpoint):
    """A checkpoint some of whose tensors are made of several stored ones, each when it is asked for."""

    def __init__(self, directory: Path, quantization: dict[str, Any]) -> None:
        super().__init__(directory)
        require_read(quantization)
        self._make: dict[str, Callable[[], Tensor]] = {}
        _FIND[quantization["quant_method"]](self, quantization)

    def add(self, name: str, shape: tuple[int, ...], parts: tuple[str, ...], make: Callable[..., Tensor]) -> None:
        """Let tensor `name` be what `make` makes of the tensors `parts`, which are no more to be seen."""
        stored = [self.entries.pop(part) for part in parts]
        if name in self.entries:
            raise UsageError(f"tensor {name} is stored twice: as it is, and as {' and '.join(parts)}")
        self._make[name] = lambda: make(*(self.map(part, entry) for part, entry in zip(parts, stored, strict=True)))
        self.entries[name] = replace(stored[0], shape=shape, dtype=torch.float32)

    def raw(self, name: str) -> Tensor:
        """The tensor as it is stored, or as it was made of others."""
        if name not in self._make:
            return super().raw(name)
        self.values_read = True
        return self._make[name]()


# ---- fp8 -------------------------------------------------------------------------------------------


def _find_fp8(checkpoint: StoredCheckpoint, quantization: dict[str, Any]) -> None:
    block = quantization.get("weight_block_size", [128, 128])
    if block is not None and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    ):
        raise UsageError(f"weight_block_size of the checkpoint's fp8 weights is {block}; two sizes belong there")
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
            found = f"{scales.dtype} of shape {list(scales.shape)}"
            raise UsageError(f"tensor {name}{BLOCK_SCALES} is {found}; floats of shape {list(wanted)} belong there")
        make = functools.partial(from_fp8, block=sides)
        checkpoint.add(name, entry.shape, (name, name + BLOCK_SCALES), make)


def _longer(shape: tuple[int, ...]) -> list[int]:
    """Its sides but those of 1: one factor is stored under several shapes."""
    return [side for side in shape if side != 1]


def from_fp8(codes: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """8-bit floats [..., n, k] and a factor for each `block` of rows and columns -> float32 [..., n, k]."""
    value = codes.to(torch.float32)
    rows, columns = block
    factors = scales.to(torch.float32).reshape(*codes.shape[:-2], -1, -(-codes.shape[-1] // columns))
    factors = factors.repeat_interleave(columns, -1)[..., : codes.shape[-1]]
    for index in range(factors.shape[-2]):  # a band of blocks at a time: no second tensor of the weight's size
        value[..., index * rows : (index + 1) * rows, :] *= factors[..., index : index + 1, :]
    return value


# ---- MXFP4 -----------------------------------------------------------------------------------------


def _find_mxfp4(checkpoint: StoredCheckpoint, quantization: dict[str, Any]) -> None:
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
            raise UsageError(f"tensors {blocks} and {name}{SCALES} are {shapes}; [e, n, g, 16] and uint8 [e, n, g] go")
        experts, outputs, groups, _ = entry.shape
        checkpoint.add(name, (experts, groups * GROUP, outputs), (blocks, name + SCALES), from_mxfp4)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Codes uint8 [e, n, g, 16] and powers uint8 [e, n, g] -> float32 [e, 32 g, n]. An expert at a time."""
    experts, outputs, groups, half = blocks.shape
    value = torch.empty(experts, 2 * half * groups, outputs)
    for index in range(experts):
        codes = torch.stack((blocks[index] & 15, blocks[index] >> 4), -1).view(outputs, groups, 2 * half)
        powers = torch.exp2(scales[index].to(torch.float32) - 127)  # 255 stands for NaN, and becomes infinity
        value[index] = (e2m1_values(codes) * powers[..., None]).view(outputs, -1).T
    return value


_FIND: dict[str, Callable[[StoredCheckpoint, dict[str, Any]], None]] = {"fp8": _find_fp8, "mxfp4": _find_mxfp4}
