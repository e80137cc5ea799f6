"""Weights as bitsandbytes stores them (bitsandbytes-foundation/bitsandbytes, functional.py and nn/modules.py).

- 4 bits (`nf4`, `fp4`): NAME.weight has two codes a byte, the earlier one in the upper half, of all elements of the
  weight in order of rows; bytes may be stored as another type (`bnb_4bit_quant_storage`). NAME.weight.quant_map f32
  [16] has the values of codes. Each `blocksize` elements have a largest value, NAME.weight.absmax f32; blocks may span
  rows. NAME.weight.quant_state.bitsandbytes__nf4 (or __fp4) is JSON in bytes: the shape, the block size, and so on.
- With double quantization, NAME.weight.absmax are codes of a byte. The value of a code is its entry of
  NAME.weight.nested_quant_map f32 [256] times NAME.weight.nested_absmax f32, one for each `nested_blocksize` codes,
  plus `nested_offset`.
- 8 bits (LLM.int8()): NAME.weight int8 [outputs, inputs] and NAME.SCB f32 [outputs], the value of code 127.
  NAME.weight_format is 0 for codes in order of rows.

Numbers are computed in float32 in the order of operations of bitsandbytes, which then rounds them to the model's type.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.groups import Find, one_of, require, require_none_left
from qcompile.errors import UnsupportedError, UsageError

METHOD = "bitsandbytes"
KINDS = ("nf4", "fp4")
STATE = ".quant_state.bitsandbytes__"
REST = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")
ROWS = 0
"""The value of NAME.weight_format for codes in order of rows."""
LARGEST_STATE = 4096
"""Bytes of a description of a weight; those that are written have less than 200."""
OF_127 = 7.874015718698502e-3
"""1 / 127 as bitsandbytes has it."""


@dataclass(frozen=True)
class NormalFloats:
    """How a weight of 4 bits is stored: its shape, elements in a block, and largest values in a block of theirs.

    `nested` is 0 without double quantization; `offset` is what is added to the largest values with it.
    """

    shape: tuple[int, int]
    block: int
    nested: int
    offset: float

    @property
    def elements(self) -> int:
        """Elements of the weight."""
        return self.shape[0] * self.shape[1]

    @property
    def blocks(self) -> int:
        """Largest values of the weight."""
        return -(-self.elements // self.block)


def bitsandbytes(quantization: dict[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`. Raises UnsupportedError.

    Each weight says itself how it is stored, in 4 or in 8 bits.
    """
    for key in ("load_in_4bit", "load_in_8bit"):
        one_of(METHOD, key, quantization.get(key), (True, False, None))
    one_of(METHOD, "bnb_4bit_quant_type", quantization.get("bnb_4bit_quant_type") or "nf4", KINDS)
    return _find


def _find(checkpoint: StoredCheckpoint) -> None:
    checkpoint.linears = True
    for name in list(checkpoint):
        stem, state, _ = name.partition(STATE)
        if state:
            _add_four_bits(checkpoint, stem, name)
        elif name.endswith(".SCB"):
            _add_eight_bits(checkpoint, name.removesuffix(".SCB"))
    require_none_left(checkpoint, REST)
    for name, entry in checkpoint.entries.items():
        if name.endswith(".weight") and not entry.dtype.is_floating_point:
            raise UsageError(f"tensor {name} is {entry.dtype}, and no {name}{STATE}* says how it is stored")


# ---- 4 bits ----------------------------------------------------------------------------------------


def _add_four_bits(checkpoint: StoredCheckpoint, name: str, state: str) -> None:
    """Make the weight `name` of its codes and of the tensors beside them, which tensor `state` describes."""
    stored = _state(checkpoint, state)
    entry = checkpoint.entries.get(name)
    if entry is None or entry.bytes != -(-stored.elements // 2):
        actual = "missing" if entry is None else f"{entry.bytes} bytes"
        raise UsageError(f"tensor {name} is {actual}; {state} says two codes a byte of {list(stored.shape)}")
    require(checkpoint, f"{name}.quant_map", (16,), torch.float32)
    require(checkpoint, f"{name}.absmax", (stored.blocks,), torch.uint8 if stored.nested else torch.float32)
    parts = [name, f"{name}.absmax", f"{name}.quant_map"]
    if stored.nested:
        count = -(-stored.blocks // stored.nested)
        require(checkpoint, f"{name}.nested_absmax", (count,), torch.float32)
        require(checkpoint, f"{name}.nested_quant_map", (256,), torch.float32)
        parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    del checkpoint.entries[state]
    checkpoint.add(name, stored.shape, tuple(parts), functools.partial(from_four_bits, stored))


def _state(checkpoint: StoredCheckpoint, name: str) -> NormalFloats:
    """What tensor `name`, JSON in bytes, says of a weight. Raises UsageError for what contradicts itself."""
    entry = checkpoint.entries[name]
    one_of(METHOD, "quant_type", name.partition(STATE)[2], KINDS)
    if entry.dtype != torch.uint8 or len(entry.shape) != 1 or not 0 < entry.bytes <= LARGEST_STATE:
        raise UsageError(f"tensor {name} is {entry.dtype} of shape {list(entry.shape)}; JSON in bytes belongs there")
    try:
        state = json.loads(bytes(checkpoint.map(name, entry).tolist()))
        shape, block, nested = state["shape"], state["blocksize"], state.get("nested_blocksize", 0)
        offset = float(state.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(f"tensor {name} is no description of a weight: {type(error).__name__}: {error}") from None
    counts = [*shape, block, nested or 1] if isinstance(shape, list) else []
    if len(counts) != 4:
        raise UnsupportedError(f"tensor {name} says shape {shape}; matrices are read")
    if not all(type(count) is int and 0 < count < 2**31 for count in counts):
        raise UsageError(f"tensor {name} says shape {shape}, blocksize {block}, nested_blocksize {nested}")
    return NormalFloats((shape[0], shape[1]), block, nested, offset)


def from_four_bits(
    stored: NormalFloats,
    codes: Tensor,
    largest: Tensor,
    values: Tensor,
    nested_largest: Tensor | None = None,
    nested_values: Tensor | None = None,
) -> Tensor:
    """Two codes a byte, largest values of blocks and values of codes f32 [16] -> float32 of the weight's shape.

    With `nested_values` f32 [256], `largest` are codes of these, and `nested_largest` f32 belong to blocks of theirs.
    """
    if nested_largest is not None and nested_values is not None:
        factors = nested_largest.repeat_interleave(stored.nested)[: stored.blocks]
        largest = nested_values[largest.long()] * factors + stored.offset
    packed = codes.reshape(-1).view(torch.uint8)
    value = torch.empty(2 * len(packed))
    value[::2] = values[(packed >> 4).int()]
    value[1::2] = values[(packed & 15).int()]
    value = value[: stored.elements]
    whole = stored.elements // stored.block * stored.block
    value[:whole].view(-1, stored.block).mul_(largest[: whole // stored.block, None])
    value[whole:] *= largest[-1]
    return value.view(stored.shape)


# ---- 8 bits ----------------------------------------------------------------------------------------


def _add_eight_bits(checkpoint: StoredCheckpoint, stem: str) -> None:
    """Make the weight STEM.weight of its codes and of STEM.SCB."""
    name = f"{stem}.weight"
    entry = checkpoint.entries.get(name)
    if entry is None or entry.dtype != torch.int8 or len(entry.shape) != 2 or 0 in entry.shape:
        actual = "missing" if entry is None else f"{entry.dtype} of shape {list(entry.shape)}"
        raise UsageError(f"tensor {name} is {actual}; a matrix of torch.int8 belongs there, as {stem}.SCB says")
    require(checkpoint, f"{stem}.SCB", (entry.shape[0],), torch.float32)
    order = checkpoint.entries.pop(f"{stem}.weight_format", None)
    if order is not None and (order.bytes != 1 or int(checkpoint.map(name, order).view(torch.uint8)) != ROWS):
        raise UnsupportedError(f"tensor {name} has its codes in the order of a GPU's tiles; only rows are read")
    checkpoint.add(name, entry.shape, (name, f"{stem}.SCB"), from_eight_bits)


def from_eight_bits(codes: Tensor, largest: Tensor) -> Tensor:
    """Codes int8 [n, k] and the value of code 127 f32 [n] -> float32 [n, k]."""
    return codes.to(torch.float32).mul_(largest[:, None]).mul_(OF_127)
