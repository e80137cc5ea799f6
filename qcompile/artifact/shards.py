"""Weights files of an artifact: which tensors share a file, and the bytes of each file.

Weights are split over several files because one SHA-256 cannot be computed by two threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 64
PAGE = 4096
"""Alignment of the data of a weights file; page-aligned weights are read up to a tenth faster (benchmarks/cpu_gemm)."""
SHARD_BYTES = 128 << 20


@dataclass(frozen=True)
class WeightSpec:
    """A packed tensor: its name and its size in bytes, a multiple of 64."""

    name: str
    bytes: int


def plan_shards(sizes: Sequence[int], limit: int = SHARD_BYTES) -> list[range]:
    """Split consecutive tensors of these sizes (bytes) into files of about equal size, about `limit` each.

    The number of files is even and at least two (less only with fewer tensors): the loader hashes files on two or more
    threads, and takes as long as the busiest.
    """
    total = sum(sizes)
    files = min(len(sizes), max(2, -(-total // limit) + (-(-total // limit)) % 2))
    shards: list[range] = []
    start, done = 0, 0
    for index, size in enumerate(sizes):
        # Split before this tensor if that brings the running total closer to the file's share.
        share = total * (len(shards) + 1) / files
        if index > start and len(shards) < files - 1 and done + size / 2 > share:
            shards.append(range(start, index))
            start = index
        done += size
    if sizes:
        shards.append(range(start, len(sizes)))
    return shards


def safetensors_header(specs: Sequence[WeightSpec]) -> bytes:
    """Length and JSON header of a safetensors file of flat uint8 tensors, padded to a whole page."""
    entries: dict[str, object] = {}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": "U8",
            "shape": [spec.bytes],
            "data_offsets": [offset, offset + spec.bytes],
        }
        offset += spec.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def shard_bytes(header: bytes, specs: Sequence[WeightSpec], pieces: Iterator[Any]) -> Iterator[Any]:
    """Header, then exactly the bytes of these tensors."""
    yield header
    for spec in specs:
        left = spec.bytes
        while left > 0:
            piece = memoryview(next(pieces)).cast("B")
            left -= len(piece)
            yield piece
        if left < 0:
            raise ValueError(f"weight {spec.name}: {-left} bytes more than declared")
