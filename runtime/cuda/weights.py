"""Copies an artifact's weights to GPUs: all of them, or those of one rank of a divided model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from qcompile.artifact.hashes import damaged, file_problem, read_part
from qcompile.artifact.layout import Manifest
from qcompile.errors import ArtifactError
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.loader import Arena, divided_stages


class DeviceWeights(NamedTuple):
    """Where weights are on a GPU."""

    files: dict[str, int]
    """The address of the content of each file of weights."""
    by_name: dict[str, int]


def upload_weights(gpu: Driver, root: Path, manifest: Manifest, held: list[int]) -> DeviceWeights:
    """Copy the weights to the GPU, in memory that it can give back. The allocations are added to `held`.

    Raises ArtifactError if a file is not as the manifest says, ResourceError if memory is short.
    """
    files, entries = manifest["files"], manifest["runtime"]["weights"]
    uploaded = DeviceWeights({}, {})
    for name in sorted({entry["file"] for entry in entries}):
        size = files[name]["bytes"]
        memory = _verified(root, name, files[name])
        address = gpu.allocate_releasable(size, "weights")
        held.append(address)
        gpu.upload(address, memory.address, size, pinned=False)
        gpu.synchronize()
        uploaded.files[name] = address
        for entry in entries:
            if entry["file"] == name:
                if not 0 <= entry["offset"] <= entry["offset"] + entry["bytes"] <= size:
                    raise damaged(root, [f"weight {entry['name']} lies outside its file"])
                uploaded.by_name[entry["name"]] = address + entry["offset"]
    return uploaded


def upload_again(gpu: Driver, root: Path, files: dict[str, Any], places: dict[str, int]) -> None:
    """Copy the files of weights to their `places` again. Raises ArtifactError if one is not as `files` says any more.

    One file at a time is read into host memory and verified there, as on loading.
    """
    for name, address in places.items():
        memory = Arena(files[name]["bytes"])
        if problem := file_problem(root, name, files[name], memory.view):
            raise ArtifactError(f"{root} has changed since the model was loaded: {problem}; load it again")
        gpu.upload(address, memory.address, memory.size, pinned=False)
        gpu.synchronize()


def upload_rank(gpu: Driver, root: Path, manifest: Manifest, rank: int, held: list[int]) -> dict[str, int]:
    """Copy the weights of one rank to its GPU; returns their addresses by the names that rank 0's have.

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
    addresses: dict[str, int] = {}
    for number, name in enumerate(sorted({entry["file"] for entry in entries})):
        own = [(entries[place], known) for place, known in names.items() if entries[place]["file"] == name]
        whole = _verified(root, name, files[name]) if number % ranks == rank else None
        for entry, known in own:
            if not 0 <= entry["offset"] <= entry["offset"] + entry["bytes"] <= files[name]["bytes"]:
                raise damaged(root, [f"weight {entry['name']} lies outside its file"])
            part = _part(root, name, files[name], entry) if whole is None else None
            source = part.address if part else whole.address + entry["offset"]  # type: ignore[union-attr]
            held.append(gpu.allocate(entry["bytes"], "weights"))
            gpu.upload(held[-1], source, entry["bytes"], pinned=False)
            gpu.synchronize()
            addresses[known] = held[-1]
    return addresses


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
