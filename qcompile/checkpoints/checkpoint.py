"""Reading safetensors checkpoints: validated headers, tensors mapped one at a time, nothing else trusted.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, data).
The header is checked completely before any data is used: lengths, dtypes, shapes, and that the tensors cover the data
section exactly, without overlap or hole.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch
from torch import Tensor

from qcompile.artifact.plain_files import NotPlainError, open_plain, read_plain
from qcompile.checkpoints.weight_files import check_weights
from qcompile.errors import UnsupportedError, UsageError, shown

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_NAME_LETTERS = 512
"""The longest name of a tensor that is read."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """The place of one tensor: bytes `begin` to `end` of `path`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Bytes that the tensor has in the file."""
        return self.end - self.begin


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises UsageError if the file is missing, unreadable or holds something else."""
    try:
        value = json.loads(read_plain(path))
    except FileNotFoundError:
        raise UsageError(f"{path} is missing") from None
    except NotPlainError as error:
        raise UsageError(f"{path} is {error.strerror}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a JSON {type(value).__name__} where an object belongs")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name appears twice")
    for name in names:
        name.encode()  # JSON can contain unpaired surrogates, which are not text
    return names


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header object of `path`, the offset of its data, and the size of the file."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise UsageError(f"{path} is truncated: {size} bytes do not hold a safetensors header")
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise UsageError(f"{path} is truncated or damaged: its header claims {length} bytes of a {size}-byte file")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise UsageError(f"{path} has a damaged header: not a JSON object")
    for name in header:
        if len(name) > MAX_NAME_LETTERS:  # messages have the name
            raise UsageError(f"{path} has a tensor {shown(name)} with a name of {len(name):,} letters")
    return header, 8 + length, size


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    """Whether `value` is a list of integers in the range of sizes and offsets."""
    return isinstance(value, list) and all(type(count) is int and 0 <= count < 2**63 for count in value)


def _entry(path: Path, name: str, item: Any, start: int) -> Entry:
    item = item if isinstance(item, dict) else {}
    shape, span = item.get("shape"), item.get("data_offsets")
    if not (_is_counts(shape) and _is_counts(span) and len(span) == 2):
        raise UsageError(f"{path}: tensor {name} has no valid shape and data_offsets in the header")
    stored = item.get("dtype")
    if not isinstance(stored, str) or stored not in DTYPES:
        raise UnsupportedError(f"{path}: tensor {name} has dtype {shown(stored)}, which is not read")
    dtype = DTYPES[stored]
    needed, given = math.prod(shape) * dtype.itemsize, span[1] - span[0]
    if needed != given:
        raise UsageError(f"{path}: tensor {name} of shape {shape} needs {needed} bytes, its data_offsets give {given}")
    return Entry(path, dtype, tuple(shape), start + span[0], start + span[1])


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of the safetensors file `path`. Raises UsageError for a file that contradicts itself."""
    header, start, size = _read_header(path)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, item, start) for name, item in header.items()}
    place = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise UsageError(f"{path} is truncated: tensor {name} ends at byte {entry.end} of a {size}-byte file")
        if entry.begin != place:
            what = "overlaps the one before" if entry.begin < place else "leaves a hole before it"
            raise UsageError(f"{path} has a damaged header: tensor {name} {what}")
        place = entry.end
    if place != size:
        raise UsageError(f"{path} has a damaged header: {size - place} bytes belong to no tensor")
    return entries


def _texts(path: Path) -> dict[str, str]:
    """The texts in the header of the safetensors file `path`, by name."""
    texts = _read_header(path)[0].get("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise UsageError(f"{path} has a damaged header: its __metadata__ are no texts")
    return texts


def _shards(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Files of a checkpoint, and the table tensor -> shard of its index, or None if it has no index."""
    for name in (SINGLE, INDEX):
        if (directory / name).exists() and not (directory / name).is_file():
            raise UsageError(f"{directory / name} is no plain file")
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], None
    if (directory / INDEX).is_file():
        table = read_json(directory / INDEX).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise UsageError(f"{directory / INDEX} has no weight_map from tensor to file name")
        names = sorted(set(table.values()))
        for name in names:
            _check_shard_name(directory, name)
        return [directory / name for name in names], table
    paths = sorted(directory.glob("*.safetensors"))
    if len(paths) == 1 and paths[0].is_file():
        return paths, None
    check_weights(directory)
    raise UsageError(f"{directory} has no {SINGLE} and no {INDEX}")


def _check_shard_name(directory: Path, name: str) -> None:
    path = PurePosixPath(name)
    inside = name and not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name
    if not inside or "\0" in name:
        raise UsageError(f"{directory / INDEX} names shard {name!r}, which is not a plain path inside the checkpoint")
    if path.suffix != ".safetensors":
        raise UnsupportedError(f"{directory / INDEX} names shard {name!r}; only .safetensors shards are read")
    if not (directory / name).is_file():
        raise UsageError(f"{directory / name} is missing: the index names it as a shard")


class Checkpoint:
    """The tensors of a checkpoint directory by name. Opening it reads only headers.

    `values_read` says whether the values of any tensor have been read since. `kinds` are the names of the types that
    tensors are stored in, by tensor, where a file has types of its own.
    """

    kinds: Mapping[str, str] = {}

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.values_read = False
        self.entries: dict[str, Entry] = {}
        paths, table = _shards(directory)
        for path in paths:
            for name, entry in read_header(path).items():
                if table is not None and table.get(name) != str(path.relative_to(directory)):
                    continue
                self.entries[name] = entry
        for name, shard in (table or {}).items():
            if name not in self.entries:
                raise UsageError(f"tensor {name} is missing from {directory / shard}, where the index puts it")

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def raw(self, name: str) -> Tensor:
        """The tensor as stored, in a memory mapping of its own, which ends with the tensor."""
        self.values_read = True
        return self.map(name, self.entries[name])

    @staticmethod
    def map(name: str, entry: Entry) -> Tensor:
        """The tensor at `entry`; messages call it `name`."""
        count = entry.end - entry.begin
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        skip = entry.begin % mmap.ALLOCATIONGRANULARITY
        with open_plain(entry.path) as file:
            if os.fstat(file.fileno()).st_size < entry.end:
                raise UsageError(f"{entry.path} was truncated while it was read, at tensor {name}")
            view = mmap.mmap(file.fileno(), count + skip, access=mmap.ACCESS_COPY, offset=entry.begin - skip)
        flat = torch.frombuffer(view, dtype=torch.uint8, offset=skip, count=count)
        if entry.begin % entry.dtype.itemsize:
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)

    def load(self, name: str) -> Tensor:
        """The floating-point tensor `name` in float32. Raises UsageError if it holds NaN or infinity."""
        value = self.raw(name).to(torch.float32)
        require_finite(name, value)
        return value

    def metadata(self) -> dict[str, str]:
        """The texts in the headers of all files, by name."""
        texts: dict[str, str] = {}
        for path in _shards(self.directory)[0]:
            texts |= _texts(path)
        return texts

    def in_few_bits(self, name: str) -> bool:
        """Whether tensor `name` is stored in few bits, and read as the numbers that these represent."""
        return False

    def of_linear(self, name: str) -> bool:
        """Whether tensor `name` is computed as [outputs, inputs] though the model may have it as [inputs, outputs]."""
        return False

    def stored_type(self, name: str) -> torch.dtype | None:
        """The type of floats that tensor `name` is stored in; None if its values are computed."""
        return None if self.in_few_bits(name) else self.entries[name].dtype

    def require(self, name: str, shape: tuple[int, ...], floats: bool = True) -> None:
        """Raise unless tensor `name` exists with this shape, and is floating point if `floats` is true."""
        if name not in self.entries:
            raise UsageError(f"tensor {name} is missing from {self.directory}")
        entry = self.entries[name]
        if entry.shape != shape:
            raise UsageError(f"tensor {name} has shape {list(entry.shape)}, the model needs {list(shape)}")
        if floats and not entry.dtype.is_floating_point:
            raise UnsupportedError(f"tensor {name} is of integer type {entry.dtype}; weights must be floating point")


class StoredCheckpoint(Checkpoint):
    """A checkpoint in which some tensors are computed from several stored tensors, when they are read.

    `linears` says that the tool puts linears of its own, [outputs, inputs], in the place of all modules that it stores.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._make: dict[str, Callable[[], Tensor]] = {}
        self._parts: dict[str, dict[str, Entry]] = {}
        self._reshaped: set[str] = set()
        self.linears = False

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: tuple[str, ...],
        make: Callable[..., Tensor],
        reshaped: bool = False,
    ) -> None:
        """Add tensor `name`, which `make` computes from the stored tensors `parts`; the parts are hidden.

        With `reshaped`, `shape` is [groups, inputs of a group], and `require` says how many groups are a row.
        """
        stored = [self.entries.pop(part) for part in parts]
        self._reshaped |= {name} if reshaped else set()
        if name in self.entries:
            raise UsageError(f"tensor {name} is stored twice: as it is, and as {' and '.join(parts)}")
        self._parts[name] = dict(zip(parts, stored, strict=True))
        self._make[name] = lambda: make(*(self.map(part, entry) for part, entry in self._parts[name].items()))
        self.entries[name] = replace(stored[0], shape=shape, dtype=torch.float32)

    def in_few_bits(self, name: str) -> bool:
        """Whether tensor `name` is computed from others."""
        return name in self._make

    def of_linear(self, name: str) -> bool:
        """Whether tensor `name` is computed from others as a weight of such a linear."""
        return self.linears and name in self._make

    def raw(self, name: str) -> Tensor:
        """The tensor as stored, or as computed from its parts."""
        if name not in self._make:
            return super().raw(name)
        self.values_read = True
        value = self._make[name]()
        return value.view(self.entries[name].shape) if name in self._reshaped else value

    def load(self, name: str) -> Tensor:
        """As for any checkpoint. UsageError names the stored tensor that makes a weight not finite."""
        value = self.raw(name).to(torch.float32)
        if name in self._make and not is_finite(value):
            for part, entry in self._parts[name].items():
                if entry.dtype.is_floating_point and not is_finite(self.map(part, entry).to(torch.float32)):
                    raise UsageError(
                        f"weight {name} holds NaN or infinite values, as tensor {part} does: download the file again"
                    )
        require_finite(name, value)
        return value

    def require(self, name: str, shape: tuple[int, ...], floats: bool = True) -> None:
        """As for any checkpoint. A tensor that is stored as groups gets `shape` if rows are whole groups."""
        if name in self._reshaped:
            entry = self.entries[name]
            if math.prod(shape) == math.prod(entry.shape) and shape[-1] % entry.shape[-1] == 0:
                self.entries[name] = replace(entry, shape=shape)
        super().require(name, shape, floats)


def require_finite(name: str, value: Tensor) -> None:
    """Raise UsageError that names the weight `name` if `value` holds NaN or infinity."""
    if not is_finite(value):
        raise UsageError(f"weight {name} holds NaN or infinite values")


def is_finite(value: Tensor) -> bool:
    """Whether `value` holds neither NaN nor infinity."""
    # One pass that allocates nothing: a sum is finite unless an element is not (or it overflows: then look closer).
    return math.isfinite(value.sum().item()) or bool(torch.isfinite(value).all())
