"""The tensors of GGUF files under transformers' names, as the numbers that they represent.

Blocks of quantized types become float32 by the `gguf` package, a band of rows at a time. What the converter changed in
weights is undone: norms stored plus one, and the interleaving of the rotated halves of queries and keys, row by row.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import Checkpoint, Entry
from qcompile.checkpoints.gguf.architectures import TABLES, Architecture
from qcompile.checkpoints.gguf.configuration import ROPE_TENSORS, architecture_of
from qcompile.checkpoints.gguf.header import Header, TensorPlace, read_header
from qcompile.errors import ResourceError, UnsupportedError, UsageError, shown

FILES = "*.gguf"
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of tensors that hold floats, not blocks."""
BAND = 1 << 22
"""Numbers that are unpacked at once: no second tensor of the weight's size."""
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,4})\.)?(?P<stem>\w+)\.(?P<what>weight|bias)")
_ROTATED = ("attn_q", "attn_k")


@dataclass(frozen=True)
class Stored:
    """One weight of the model in the file: where, and what is undone when it is read.

    `heads` is the number of heads with interleaved halves (0: none), `offset` what was added.
    """

    place: TensorPlace
    heads: int = 0
    offset: float = 0.0

    def load(self, name: str) -> Tensor:
        """The weight, called `name` in errors: as stored, or float32 if it is computed."""
        value = read(name, self.place)
        if self.offset:
            value = value.to(torch.float32) - self.offset
        if self.heads:
            rows = value.unflatten(0, (self.heads, -1, 2))  # [heads, half, 2, ...]
            value = rows.transpose(1, 2).reshape(value.shape)
        return value


class GgufCheckpoint(Checkpoint):
    """The tensors of the GGUF files in a folder, by the names that transformers has for them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.values_read = False
        self.entries = {}
        self._stored: dict[str, Stored] = {}
        headers = [read_header(path) for path in sorted(directory.glob(FILES))]
        for header in headers:
            for name, place in header.tensors.items():
                if name not in ROPE_TENSORS:
                    self._add(headers[0], name, place)
        self.kinds = {name: stored.place.kind.name for name, stored in self._stored.items()}

    def raw(self, name: str) -> Tensor:
        """The tensor as stored, or float32 if it is computed."""
        self.values_read = True
        return self._stored[name].load(name)

    def in_few_bits(self, name: str) -> bool:
        """Whether tensor `name` is stored in blocks."""
        return self.kinds[name] not in PLAIN

    def stored_type(self, name: str) -> torch.dtype | None:
        """The type of floats that tensor `name` is stored in; None if its values are computed."""
        return None if self._stored[name].offset else PLAIN.get(self.kinds[name])

    def _add(self, first: Header, name: str, place: TensorPlace) -> None:
        architecture = architecture_of(first)
        module, what = _module(first, architecture, name)
        offset = 1.0 if architecture.norms_plus_one and "norm" in name else 0.0
        stored = Stored(place, _heads(first, architecture, name), offset)
        if "{}" not in module:
            self._put(f"{module}.{what}", stored)
            return
        count, *shape = place.shape  # of experts, one after another
        size = (place.end - place.begin) // count
        for expert in range(count):
            begin = place.begin + expert * size
            one = TensorPlace(place.path, place.kind, tuple(shape), begin, begin + size)
            self._put(f"{module.format(expert)}.{what}", Stored(one))

    def _put(self, name: str, stored: Stored) -> None:
        place = stored.place
        if name in self._stored:
            raise UsageError(f"{place.path}: two tensors are the weight {name}")
        if stored.heads and place.shape[0] % (2 * stored.heads):
            raise UsageError(f"{place.path}: weight {name} has {place.shape[0]} rows for {stored.heads} heads")
        self._stored[name] = stored
        dtype = PLAIN.get(place.kind.name, torch.float32)
        self.entries[name] = Entry(place.path, dtype, place.shape, place.begin, place.end)


def _module(header: Header, architecture: Architecture, name: str) -> tuple[str, str]:
    """The path of the module of the tensor `name`, with {} for the number of an expert, and `weight` or `bias`."""
    match = _NAME.fullmatch(name)
    if match is not None and match["layer"] is None and match["stem"] in TABLES:
        return TABLES[match["stem"]], match["what"]
    if match is not None and match["layer"] is not None and match["stem"] in architecture.modules:
        return f"model.layers.{int(match['layer'])}.{architecture.modules[match['stem']]}", match["what"]
    raise UnsupportedError(f"{header.path}: tensor {shown(name)} of architecture {header.architecture} is not read")


def _heads(header: Header, architecture: Architecture, name: str) -> int:
    """The number of heads with interleaved halves in the tensor `name`; 0 if there are none."""
    stem = name.split(".")[2] if name.startswith("blk.") else ""
    if not architecture.alternating or stem not in _ROTATED:
        return 0
    settings = [f"{header.architecture}.attention.head_count{end}" for end in ("", "_kv")]
    queries, keys = (header.metadata.get(key) for key in settings)
    heads = queries if stem == "attn_q" or keys is None else keys
    return int(heads[0] if isinstance(heads, list) else heads or 0)


# ---- numbers ---------------------------------------------------------------------------------------


def read(name: str, place: TensorPlace) -> Tensor:
    """The numbers at `place`: floats as they are stored, blocks as float32. `name` is for errors."""
    if (dtype := PLAIN.get(place.kind.name)) is not None:
        return Checkpoint.map(name, Entry(place.path, dtype, place.shape, place.begin, place.end))
    rows, columns = math.prod(place.shape[:-1]), place.shape[-1]
    width = columns // place.kind.block * place.kind.size
    packed = Checkpoint.map(name, Entry(place.path, torch.uint8, (rows, width), place.begin, place.end))
    unpack = unpacker(place.kind.name)
    value = torch.empty(rows, columns)
    step = max(1, BAND // columns)
    for start in range(0, rows, step):
        value[start : start + step] = unpack(packed[start : start + step])
    return value.view(place.shape)


@functools.cache
def unpacker(kind: str) -> Callable[[Tensor], Tensor]:
    """A function from blocks of the type `kind`, uint8 [rows, bytes], to their numbers, float32 [rows, columns].

    Raises ResourceError if the gguf package is missing, UnsupportedError if it does not know the type.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ResourceError(f"GGUF tensors of type {kind} need the gguf package: pip install 'qcompile[gguf]'")
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        number: Any = GGMLQuantizationType[kind]
    except KeyError:
        raise UnsupportedError(f"the installed gguf package does not know tensors of type {kind}: update it") from None

    def unpack(blocks: Tensor) -> Tensor:
        with np.errstate(all="ignore"):  # what is not finite is refused when the weight is whole
            return torch.from_numpy(dequantize(blocks.numpy(), number))

    return unpack
