"""Weights as torchao stores them in safetensors (pytorch/ao, prototype/safetensors and quantization/quantize_).

The header of a file has a text for each weight MODULE.PARAMETER: JSON with its class (`_type`), its settings (`_data`),
and the names of its tensors (`_tensor_data_names`): MODULE._PARAMETER_qdata, MODULE._PARAMETER_scale, and so on.

- `Int8Tensor`, `IntxUnpackedToInt8Tensor`: codes int8 [.., outputs, inputs], each in a byte if it has fewer bits too. A
  block of `block_size` has a scale and may have a zero point: (code - zero) * scale.
- `Float8Tensor`: 8-bit floats with a scale for each block.
- `Int4Tensor`: two signed codes a byte, the earlier one in the lower half. A group of inputs has a scale and what is
  added, in floats, both [groups, outputs]: code * scale + zero.

Formats of activations are the recipe's. Classes in the order of a device's kernels are refused, and so is a factor on
inputs (`act_pre_scale`).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import Entry, StoredCheckpoint
from qcompile.checkpoints.stored.groups import BAND, Find, from_fp8, nibbles, one_of, require
from qcompile.errors import UnsupportedError, UsageError, shown

METHOD = "torchao"
INTEGERS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
FLOATS = "Float8Tensor"
NIBBLES = "Int4Tensor"
KINDS = (*INTEGERS, FLOATS, NIBBLES)
FLOAT_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
IGNORED = ("act_quant_scale", "act_quant_zero_point")
"""Tensors of a weight by which activations are rounded, as the recipe decides."""


def torchao(quantization: dict[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`: the files say how each weight is stored."""
    return _find


def _find(checkpoint: StoredCheckpoint) -> None:
    texts = checkpoint.metadata()
    result = False
    for name, text in texts.items():
        module, dot, parameter = name.rpartition(".")
        if dot and (stated := _stated(name, text)):
            result = True
            _add(checkpoint, name, f"{module}._{parameter}_", stated)
    if not result:
        raise UsageError(f"{checkpoint.directory}: the headers of the files describe no weight, as torchao's do")


def _stated(name: str, text: str) -> dict[str, Any]:
    """What the header says of weight `name`; empty for a plain tensor. Raises UsageError if that makes no sense."""
    try:
        stated = json.loads(text)
        kind = stated["_type"]
        if kind == "Tensor":
            return {}
        parts, data = stated["_tensor_data_names"], stated["_data"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"weight {name}: its text in the header is no description: {type(error).__name__}") from None
    if not (isinstance(kind, str) and isinstance(data, dict) and isinstance(parts, list)):
        raise UsageError(f"weight {name}: its text in the header is no description of a weight")
    if kind not in KINDS:
        raise UnsupportedError(f"weight {name} is stored as {shown(kind)} of torchao; {', '.join(KINDS)} are read")
    if "act_pre_scale" in parts:
        raise UnsupportedError(f"weight {name} has a factor on its inputs (act_pre_scale), which is not read")
    return {**data, "_type": kind, "_parts": parts}


def _add(checkpoint: StoredCheckpoint, name: str, stem: str, stated: Mapping[str, Any]) -> None:
    """Make the weight `name` of the tensors with names that begin with `stem`."""
    for part in IGNORED:
        checkpoint.entries.pop(stem + part, None)
    codes = checkpoint.entries.get(f"{stem}qdata")
    if codes is None or len(codes.shape) < 2 or 0 in codes.shape:
        actual = "missing" if codes is None else f"of shape {list(codes.shape)}"
        raise UsageError(f"tensor {stem}qdata is {actual}; the codes of weight {name} belong there")
    names = [f"{stem}qdata", f"{stem}scale"]
    if stated["_type"] == NIBBLES:
        _add_nibbles(checkpoint, name, stem, _block(name, codes, stated, 2))
        return
    if stated["_type"] == FLOATS:
        one_of(METHOD, "codes of weight " + name, codes.dtype, FLOAT_CODES)
    elif codes.dtype != torch.int8:
        raise UsageError(f"tensor {stem}qdata is {codes.dtype}; torch.int8 belongs there")
    block = _block(name, codes, stated)
    count = math.prod(size // side for side, size in zip(block, codes.shape, strict=True))
    for part in ("scale", "zero_point"):
        entry = checkpoint.entries.get(stem + part)
        if entry is None and part == "zero_point":
            continue
        if entry is None or math.prod(entry.shape) != count:
            actual = "missing" if entry is None else f"of shape {list(entry.shape)}"
            raise UsageError(f"tensor {stem}{part} is {actual}; weight {name} has {count} blocks")
    if f"{stem}zero_point" in checkpoint:
        names.append(f"{stem}zero_point")
    sides = [block[-2], block[-1]]
    checkpoint.add(name, codes.shape, tuple(names), functools.partial(from_blocks, sides))


def _block(name: str, codes: Entry, stated: Mapping[str, Any], each: int = 1) -> list[int]:
    """The sides of a block of the weight `name`; an element of its last dimension holds `each` codes."""
    block: Any = stated.get("block_size")
    sides = [*codes.shape[:-1], each * codes.shape[-1]]
    right = isinstance(block, list) and len(block) == len(sides) and all(type(side) is int for side in block)
    if not right or not all(0 < side <= size and size % side == 0 for side, size in zip(block, sides, strict=True)):
        raise UsageError(f"weight {name}: block_size {shown(block)} does not divide its shape {sides}")
    if any(side != 1 for side in block[:-2]):
        raise UnsupportedError(f"weight {name}: block_size {block} spans several matrices, which is not read")
    return list(block)


def from_blocks(block: list[int], codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Codes [.., n, k] with a scale and a zero point for each `block` of rows and columns -> float32 [.., n, k]."""
    if zeros is None:
        return from_fp8(codes, scales, block)
    rows, columns = block
    sides = (*codes.shape[:-2], codes.shape[-2] // rows, codes.shape[-1] // columns)
    # [.., blocks of rows, rows, blocks of columns, columns]
    value = codes.to(torch.float32).unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    value -= zeros.to(torch.float32).view(sides)[..., :, None, :, None]
    value *= scales.to(torch.float32).view(sides)[..., :, None, :, None]
    return value.view(codes.shape)


# ---- two codes a byte ------------------------------------------------------------------------------


def _add_nibbles(checkpoint: StoredCheckpoint, name: str, stem: str, block: list[int]) -> None:
    codes = checkpoint.entries[f"{stem}qdata"]
    if len(codes.shape) != 2 or codes.dtype.itemsize != 1 or block[0] != 1:
        raise UnsupportedError(f"weight {name}: codes {codes.dtype} of shape {list(codes.shape)} are not read")
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    for part in ("scale", "zero_point"):
        require(checkpoint, stem + part, (inputs // block[1], outputs))
    parts = tuple(stem + part for part in ("qdata", "scale", "zero_point"))
    checkpoint.add(name, (outputs, inputs), parts, functools.partial(from_nibbles, block[1]))


def from_nibbles(group: int, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Two signed codes a byte [n, k / 2], scales and what is added [k / group, n] -> float32 [n, k]."""
    outputs, inputs = len(packed), 2 * packed.shape[1]
    value = torch.empty(outputs, inputs)
    for start in range(0, outputs, BAND):
        band = slice(start, start + BAND)
        codes = nibbles(packed[band].view(torch.uint8)).to(torch.float32)
        codes -= 16.0 * (codes > 7)
        scale, zero = (part[:, band].T.to(torch.float32)[:, :, None] for part in (scales, zeros))
        value[band] = (codes.unflatten(1, (-1, group)) * scale + zero).flatten(1)
    return value
