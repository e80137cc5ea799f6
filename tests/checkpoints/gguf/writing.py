"""Writes GGUF files as their definition has them, right or wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

UINT32, FLOAT32, BOOL, TEXT, LIST = 4, 6, 7, 8, 9
F32 = 0


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(given: Any) -> bytes:
    """A metadata value with its type."""
    if isinstance(given, bytes):  # as it is
        return given
    if isinstance(given, bool):
        return struct.pack("<I?", BOOL, given)
    if isinstance(given, int):
        return struct.pack("<II", UINT32, given)
    if isinstance(given, float):
        return struct.pack("<If", FLOAT32, given)
    if isinstance(given, str):
        return struct.pack("<I", TEXT) + text(given)
    kind = value(given[0])[:4]
    return struct.pack("<I", LIST) + kind + struct.pack("<Q", len(given)) + b"".join(value(one)[4:] for one in given)


@dataclass
class Tensor:
    """A tensor of a file: `data` in the type `kind`, its `shape` as torch has it; `offset` None follows the others."""

    shape: tuple[int, ...]
    data: bytes
    kind: int = F32
    offset: int | None = None


def floats(array: Any) -> Tensor:
    array = np.asarray(array, np.float32)
    return Tensor(array.shape, array.tobytes())


@dataclass
class File:
    """A GGUF file to be written; fields that are None are computed."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    magic: bytes = b"GGUF"
    version: int = 3
    count: int | None = None
    entries: int | None = None
    alignment: int = 32
    more: bytes = b""
    """Metadata entries after the others, as bytes."""

    def write(self, path: Path) -> Path:
        count = len(self.tensors) if self.count is None else self.count
        entries = len(self.metadata) if self.entries is None else self.entries
        head = self.magic + struct.pack("<IQQ", self.version, count, entries)
        head += b"".join(text(key) + value(given) for key, given in self.metadata.items()) + self.more
        data = b""
        for name, tensor in self.tensors.items():
            data += bytes(-len(data) % self.alignment)
            shape = tensor.shape[::-1]
            offset = len(data) if tensor.offset is None else tensor.offset
            head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            head += struct.pack("<IQ", tensor.kind, offset)
            data += tensor.data
        path.write_bytes(head + bytes(-len(head) % self.alignment) + data)
        return path
