"""Copies an artifact's weights to GPUs: all of them, or those of one rank of a divided model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qcompile.artifact.hashes import damaged, file_problem, read_part
from qcompile.artifact.layout import Manifest
from qcompile.errors import ArtifactError
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.loader import Arena, divided_stages

_ALIGNMENT = 256
"""Bytes to a multiple of which each part of a file begins: what allocations of their own have."""


class FilePart(NamedTuple):
    """`size` bytes from `offset` on of a file of weights, and where in the memory for the file they are."""

    offset: int
    size: int
    at: int


class DeviceWeights(NamedTuple):
    """Where weights are on a GPU."""

    files: dict[str, int]
    """The address of the memory for each file of weights."""
    by_name: dict[str, int]
    parts: dict[str, list[FilePart]]
    """What of each file is there: all, or what a rank reads."""

    def size(self, name: str) -> int:
        """Bytes of the memory for a file."""
        return max(part.at + part.size for part in self.parts[name])


def upload_weights(gpu: Driver, root: Path, manifest: Manifest, held: list[int]) -> DeviceWeights:
    """Copy the weights to the GPU, in memory that it can give back. The allocations are added to `held`.

    Raises ArtifactError if a file is not as the manifest says, ResourceError if memory is short.
    """
    files, entries = manifest["files"], manifest["runtime"]["weights"]
    uploaded = DeviceWeights({}, {}, {})
    for name in sorted({entry["file"] for entry in entries}):
        size = files[name]["bytes"]
        memory = _verified(root, name, files[name])
        address = gpu.allocate_releasable(size, "weights")
        held.append(address)
        gpu.upload(address, memory.address, size, pinned=False)
        gpu.synchronize()
        uploaded.files[name], uploaded.parts[name] = address, [FilePart(0, size, 0)]
        for entry in entries:
            if entry["file"] == name:
                if not 0 <= entry["offset"] <= entry["offset"] + entry["bytes"] <= size:
                    raise damaged(root, [f"weight {entry['name']} lies outside its file"])
                uploaded.by_name[entry["name"]] = address + entry["offset"]
    return uploaded


def upload_again(gpu: Driver, root: Path, files: dict[str, Any], weights: DeviceWeights, names: Iterable[str]) -> None:
    """Copy the files `names` of weights to their places again. Raises ArtifactError if one is not as `files` says.

    One file at a time is read into host memory and verified there, as a whole also where a rank has a part of it.
    """
    for name in names:
        memory = Arena(files[name]["bytes"])
        if problem := file_problem(root, name, files[name], memory.view):
            raise ArtifactError(f"{root} has changed since the model was loaded: {problem}; load it again")
        for part in weights.parts[name]:
            gpu.upload(weights.files[name] + part.at, memory.address + part.offset, part.size, pinned=False)
        gpu.synchronize()


def upload_rank(gpu: Driver, root: Path, manifest: Manifest, rank: int, held: list[int]) -> DeviceWeights:
    """Copy the weights of one rank to its GPU, in memory that it can give back. They have the names of rank 0's.

    Each rank verifies its share of the files and reads only its own weights of the others, which other ranks verify:
    all read the same files of one host at the same time, and none computes before all have loaded. Only weights are
    read without their hash; kernels and all else that is executed or parsed every rank verifies itself.
    """
    files, runtime = manifest["files"], manifest["runtime"]
    entries, first, ranks = runtime["weights"], runtime["ranks"][0], len(runtime["ranks"])
    parts = [(runtime["ranks"], first), *((stage["ranks"], stage["ranks"][0]) for stage in divided_stages(runtime))]
    names = {
        place: entries[known]["name"]
        for of_ranks, of_first in parts
        for place, known in zip(of_ranks[rank], of_first, strict=True)
    }
    uploaded = DeviceWeights({}, {}, {})
    for number, name in enumerate(sorted({entry["file"] for entry in entries})):
        own = [(entries[place], known) for place, known in names.items() if entries[place]["file"] == name]
        whole = _verified(root, name, files[name]) if number % ranks == rank else None
        if not own:
            continue
        uploaded.parts[name] = pieces = _parts(root, files[name], [entry for entry, _ in own])
        held.append(gpu.allocate_releasable(uploaded.size(name), "weights"))
        uploaded.files[name] = held[-1]
        for (entry, known), part in zip(own, pieces, strict=True):
            content = _part(root, name, files[name], entry) if whole is None else None
            source = content.address if content else whole.address + part.offset  # type: ignore[union-attr]
            uploaded.by_name[known] = held[-1] + part.at
            gpu.upload(uploaded.by_name[known], source, part.size, pinned=False)
            gpu.synchronize()
    return uploaded


def _parts(root: Path, file: dict[str, Any], entries: Sequence[dict[str, Any]]) -> list[FilePart]:
    """Where weights of a file are in memory for them alone. Raises ArtifactError for one outside the file."""
    parts, end = [], 0
    for entry in entries:
        if not 0 <= entry["offset"] <= entry["offset"] + entry["bytes"] <= file["bytes"]:
            raise damaged(root, [f"weight {entry['name']} lies outside its file"])
        parts.append(FilePart(entry["offset"], entry["bytes"], end))
        end += -(-entry["bytes"] // _ALIGNMENT) * _ALIGNMENT
    return parts


def _verified(root: Path, name: str, expected: dict[str, Any]) -> Arena:
    """The content of a file of the artifact, which is as its manifest says."""
    memory = Arena(expected["bytes"])
    if problem := file_problem(root, name, expected, memory.view):
        raise damaged(root, [problem])
    return memory


def _part(root: Path, name: str, expected: dict[str, Any], entry: dict[str, Any]) -> Arena:
    """The content of a weight in a file that another rank verifies."""
    memory = Arena(entry["bytes"])
    if problem := read_part(root, name, expected, entry["offset"], memory.view):
        raise damaged(root, [problem])
    return memory
