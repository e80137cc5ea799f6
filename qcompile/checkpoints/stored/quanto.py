"""Weights as optimum-quanto stores them (huggingface/optimum-quanto, tensor/weights and nn/qmodule.py).

config.json says nothing of it. The file quanto_qmap.json names the modules, each with the type of its weights: qint8,
qfloat8_e4m3fn and qfloat8_e5m2 have 8 bits, qint4 and qint2 have fewer. `none` leaves weights as they are.

- 8 bits: MODULE.weight._data [outputs, inputs] are codes, MODULE.weight._scale [outputs, 1]: code * scale.
- 4 and 2 bits: groups of inputs are rows of a matrix of codes [groups, group], and rows are packed in bytes: the first
  part of the rows has the lowest bits of MODULE.weight._data._data. A group has MODULE.weight._scale and ._shift
  [groups, 1], floats: code * scale - shift. No file says how many groups a row of the weight has; the model does.

Scales by which inputs and outputs of a module are rounded have no effect: the recipe decides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import MAX_NAME_LETTERS, StoredCheckpoint, read_json
from qcompile.checkpoints.stored.groups import Find, require, require_none_left
from qcompile.errors import UnsupportedError, UsageError, shown

METHOD = "quanto"
MAP = "quanto_qmap.json"
"""The file that says how the weights of each module are stored."""
BYTES = {
    "qint8": torch.int8,
    "qfloat8_e4m3fn": torch.float8_e4m3fn,
    "qfloat8_e5m2": torch.float8_e5m2,
}
"""Types of codes of 8 bits, by the name of quanto's type."""
BITS = {"qint4": 4, "qint2": 2}
"""Bits of a code of other types."""
NONE = "none"
"""The type of weights that are left as they are."""
_DATA = "._data"
"""The end of the name of a tensor of codes, twice if they are packed."""
SCALES = (".input_scale", ".output_scale")


def quanto(quantization: dict[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`: the file MAP says how weights are stored."""
    return _find


def _find(checkpoint: StoredCheckpoint) -> None:
    for module, stated in _named_as_stored(checkpoint, read_json(checkpoint.directory / MAP)).items():
        if len(module) > MAX_NAME_LETTERS or not module.isprintable():
            raise UsageError(f"{checkpoint.directory / MAP} names a module {shown(module)}, as no tensor is called")
        kind = _kind(checkpoint, module, stated)
        if kind in BYTES:
            _add_bytes(checkpoint, f"{module}.weight", BYTES[kind])
        elif kind in BITS:
            _add_groups(checkpoint, f"{module}.weight", BITS[kind])
        for end in SCALES:
            checkpoint.entries.pop(module + end, None)
    require_none_left(checkpoint, (".weight._data", ".weight._data._data", ".weight._scale", ".weight._shift"))


def _named_as_stored(checkpoint: StoredCheckpoint, table: dict[str, Any]) -> dict[str, Any]:
    """What MAP, `table`, says of modules, by their names in the files.

    MAP has the names in the model, and transformers may save other names. Modules without tensors are then those of the
    files that `table` does not name, and are known if all of them are stored alike.
    """
    ends = (f".weight{_DATA}{_DATA}", f".weight{_DATA}")
    stems = {name.removesuffix(end) for end in ends for name in checkpoint if name.endswith(end)} - table.keys()
    absent = [module for module in table if not any(module + end in checkpoint for end in (*ends, ".weight"))]
    if not absent or len(absent) != len(stems) or any(table[module] != table[absent[0]] for module in absent):
        return table
    kept = {module: stated for module, stated in table.items() if module not in absent}
    return {**kept, **dict.fromkeys(sorted(stems), table[absent[0]])}


def _kind(checkpoint: StoredCheckpoint, module: str, stated: Any) -> str:
    """The type of a module's weights, as `stated` in MAP. Raises UnsupportedError unless it is one that is read."""
    kind = stated.get("weights") if isinstance(stated, dict) else None
    if kind in (*BYTES, *BITS, NONE):  # compared, not hashed: JSON may have a list in its place
        return str(kind)
    wrong = shown(kind) if isinstance(stated, dict) else f"stated by {shown(stated)}"
    raise UnsupportedError(
        f"{checkpoint.directory / MAP}: weights of {shown(module)} are {wrong}; {', '.join((*BYTES, *BITS))} are read"
    )


def _add_bytes(checkpoint: StoredCheckpoint, name: str, kind: torch.dtype) -> None:
    outputs, inputs = _sides(checkpoint, f"{name}._data", kind)
    require(checkpoint, f"{name}._scale", (outputs, 1))
    checkpoint.add(name, (outputs, inputs), (f"{name}._data", f"{name}._scale"), from_bytes)


def _add_groups(checkpoint: StoredCheckpoint, name: str, bits: int) -> None:
    rows, group = _sides(checkpoint, f"{name}._data._data", torch.uint8)
    scales = checkpoint.entries.get(f"{name}._scale")
    groups = scales.shape[0] if scales and scales.shape else 0
    if rows != -(-groups * bits // 8):
        raise UsageError(f"tensor {name}._data._data has {rows} rows; codes of {groups} groups belong there")
    require(checkpoint, f"{name}._scale", (groups, 1))
    require(checkpoint, f"{name}._shift", (groups, 1))
    parts = tuple(f"{name}.{part}" for part in ("_data._data", "_scale", "_shift"))
    checkpoint.add(name, (groups, group), parts, functools.partial(from_groups, bits), reshaped=True)


def _sides(checkpoint: StoredCheckpoint, name: str, kind: torch.dtype) -> tuple[int, int]:
    """The shape of tensor `name`. Raises UsageError unless it is a matrix of `kind` that is not empty."""
    entry = checkpoint.entries.get(name)
    if entry is None or entry.dtype != kind or len(entry.shape) != 2 or 0 in entry.shape:
        actual = "missing" if entry is None else f"{entry.dtype} of shape {list(entry.shape)}"
        raise UsageError(f"tensor {name} is {actual}; a matrix of {kind} belongs there")
    return entry.shape[0], entry.shape[1]


def from_bytes(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [n, k] and scales [n, 1] -> float32 [n, k]."""
    return codes.to(torch.float32).mul_(scales.to(torch.float32))


def from_groups(bits: int, packed: Tensor, scales: Tensor, shifts: Tensor) -> Tensor:
    """Bytes [rows, group] of 8 / `bits` codes, scales and shifts [groups, 1] -> float32 [groups, group]."""
    groups, rows = len(scales), len(packed)
    value = torch.empty(groups, packed.shape[1])
    for place in range(8 // bits):
        part = value[place * rows : (place + 1) * rows]
        part.copy_((packed >> (bits * place) & (2**bits - 1))[: len(part)])
    return value.mul_(scales.to(torch.float32)).sub_(shifts.to(torch.float32))
