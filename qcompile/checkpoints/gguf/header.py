"""The header of a GGUF file: metadata and the table of tensors, checked completely before anything is used.

Format: ggml-org/ggml, docs/gguf.md. All numbers are little-endian:

    "GGUF", u32 version, u64 tensors, u64 metadata entries
    metadata: string key, u32 type, value; a string is u64 length and UTF-8, an array u32 type, u64 length and values
    tensors: string name, u32 dimensions, u64 each (the fastest first), u32 type, u64 offset in the data
    data, from the next multiple of `general.alignment` on

Lengths are compared with the bytes that are left before memory is taken for them. Imported before torch.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qcompile.artifact.plain_files import NotPlainError, open_plain
from qcompile.errors import UnsupportedError, UsageError, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURE = "general.architecture"
MOST_ENTRIES, MOST_TENSORS, MOST_ITEMS = 1 << 16, 1 << 17, 1 << 22
"""Limits of metadata entries, tensors, and items of an array; published files have 60, 4,000 and 600,000."""
MOST_DIMENSIONS, MOST_NAME = 4, 1 << 16
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values that are numbers, as `struct` names them."""


@dataclass(frozen=True)
class Kind:
    """A type of tensors: `block` consecutive numbers of a row take `size` bytes."""

    name: str
    block: int
    size: int


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
}
"""Types of tensors that are read, by their numbers in files."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is: bytes `begin` to `end` of `path`. `shape` has the dimension first that varies slowest."""

    path: Path
    kind: Kind
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its data: metadata by key, and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The architecture's name, which is also the prefix of its keys."""
        name = self.metadata.get(ARCHITECTURE)
        if not isinstance(name, str):
            raise UsageError(f"{self.path} has no {ARCHITECTURE}, a name")
        return name


def read_header(path: Path) -> Header:
    """The header of the GGUF file `path`. Raises UsageError for a file that contradicts itself, UnsupportedError."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise UsageError(f"{path} is truncated: {size} bytes do not hold a GGUF header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(path, view, size).header()
    except NotPlainError as error:
        raise UsageError(f"{path} is {error.strerror}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    """Reads the header in order; `at` is the next byte."""

    def __init__(self, path: Path, view: mmap.mmap, size: int) -> None:
        self.path, self.view, self.size = path, view, size
        self.at = 0

    def header(self) -> Header:
        if (magic := self.take(4, "its header")) != MAGIC:
            raise UsageError(f"{self.path} is no GGUF file: it begins with {magic!r}")
        version, tensors, entries = self.numbers("<IQQ", "its header")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "in the byte order of another machine" if swapped else f"of version {version}"
            raise UnsupportedError(f"{self.path} is a GGUF file {what}; versions 2 and 3 are read, little-endian")
        for count, most, what in ((entries, MOST_ENTRIES, "metadata entries"), (tensors, MOST_TENSORS, "tensors")):
            if count > most:
                raise UsageError(f"{self.path} is damaged: its header claims {count} {what}")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.name("a metadata key")
            if key in metadata:
                raise UsageError(f"{self.path} is damaged: metadata {shown(key)} occurs twice")
            what = f"metadata {shown(key)}"
            metadata[key] = self.value(self.numbers("<I", what)[0], what)
        table = [self.tensor() for _ in range(tensors)]
        return Header(self.path, metadata, self.places(table, metadata.get("general.alignment", 32)))

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes, of `what`."""
        if count > self.size - self.at:
            raise UsageError(
                f"{self.path} is truncated or damaged: {what} needs {count} bytes, {self.size - self.at} are left"
            )
        self.at += count
        return self.view[self.at - count : self.at]

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def name(self, what: str) -> str:
        name = self.string(what, MOST_NAME)
        if not name:
            raise UsageError(f"{self.path} is damaged: {what} is empty")
        return name

    def string(self, what: str, most: int | None = None) -> str:
        (length,) = self.numbers("<Q", what)
        if most is not None and length > most:
            raise UsageError(f"{self.path} is damaged: {what} of {length} bytes")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise UsageError(f"{self.path} is damaged: {what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            return self.numbers("<" + _NUMBERS[kind], what)[0]
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise UsageError(f"{self.path} is damaged: {what} has type {kind}, which does not exist")
        inner, count = self.numbers("<IQ", what)
        if count > MOST_ITEMS:
            raise UsageError(f"{self.path} is damaged: {what} claims {count} items")
        if inner in _NUMBERS:
            return list(self.numbers(f"<{count}{_NUMBERS[inner]}", what))
        if inner != _STRING:
            raise UnsupportedError(f"{self.path}: {what} is an array of type {inner}, which is not read")
        return [self.string(what) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], Kind, int]:
        """Name, shape, type and offset of the next tensor of the table."""
        name = self.name("a tensor's name")
        what = f"tensor {shown(name)}"
        (dimensions,) = self.numbers("<I", what)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise UsageError(f"{self.path} is damaged: {what} has {dimensions} dimensions")
        shape = self.numbers(f"<{dimensions}Q", what)
        number, offset = self.numbers("<IQ", what)
        if number not in KINDS:
            known = ", ".join(kind.name for kind in KINDS.values())
            raise UnsupportedError(f"{self.path}: {what} is of type {number}, which is not read, only {known}")
        kind = KINDS[number]
        if not all(0 < side < 1 << 40 for side in shape) or shape[0] % kind.block:
            raise UsageError(f"{self.path} is damaged: {what} of type {kind.name} has shape {list(shape[::-1])}")
        return name, shape[::-1], kind, offset

    def places(self, table: list[tuple[str, tuple[int, ...], Kind, int]], alignment: Any) -> dict[str, TensorPlace]:
        """Where tensors are in the file, by name: inside it, aligned, and none over another."""
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise UsageError(f"{self.path} is damaged: general.alignment is {shown(alignment)}")
        start = -(-self.at // alignment) * alignment
        places: dict[str, TensorPlace] = {}
        for name, shape, kind, offset in table:
            begin = start + offset
            end = begin + math.prod(shape) // kind.block * kind.size
            if name in places:
                raise UsageError(f"{self.path} is damaged: tensor {shown(name)} occurs twice")
            if offset % alignment:
                raise UsageError(
                    f"{self.path} is damaged: tensor {shown(name)} begins at {offset}, which is not aligned"
                )
            if end > self.size:
                raise UsageError(
                    f"{self.path} is truncated: tensor {shown(name)} ends at byte {end} of a {self.size}-byte file"
                )
            places[name] = TensorPlace(self.path, kind, shape, begin, end)
        last = 0
        for name, place in sorted(places.items(), key=lambda item: item[1].begin):
            if place.begin < last:
                raise UsageError(f"{self.path} is damaged: tensor {shown(name)} overlaps another")
            last = place.end
        return places
