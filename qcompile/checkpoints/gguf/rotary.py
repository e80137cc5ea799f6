"""The tensors of a GGUF file that divide rotary frequencies; they become a part of the configuration."""

from __future__ import annotations

import struct

from qcompile.artifact.plain_files import open_plain
from qcompile.checkpoints.gguf.configuration import ROPE_TENSORS
from qcompile.checkpoints.gguf.header import Header
from qcompile.errors import UnsupportedError, UsageError

MOST = 1 << 16


def rope_tensors(header: Header) -> dict[str, list[float]]:
    """The values of those ROPE_TENSORS that the file has. Raises UsageError for values that cannot divide."""
    tensors: dict[str, list[float]] = {}
    for name in ROPE_TENSORS:
        if (place := header.tensors.get(name)) is None:
            continue
        if place.kind.name != "F32" or len(place.shape) != 1 or place.shape[0] > MOST:
            raise UnsupportedError(f"{header.path}: tensor {name} is {place.kind.name} of shape {list(place.shape)}")
        with open_plain(place.path) as file:
            file.seek(place.begin)
            values = list(struct.unpack(f"<{place.shape[0]}f", file.read(place.end - place.begin)))
        if not all(0 < value < float("inf") for value in values):
            raise UsageError(f"{header.path}: tensor {name} holds numbers that cannot divide frequencies")
        tensors[name] = values
    return tensors
