"""Loads a CPU artifact: reads and verifies all files, and only then opens its libraries.

Every file is hashed on a thread pool from the memory that it was read into. Weights are read directly into one arena of
huge pages, chunk by chunk, and each chunk is hashed while it is still in the core's cache. The kernel library is opened
from an in-memory file that holds the same bytes that were hashed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile.artifact.abi import CPU_ABI
from qcompile.artifact.hashes import damaged, file_problem
from qcompile.artifact.layout import Manifest
from qcompile.artifact.reader import read_checked_manifest
from qcompile.artifact.rebuilt import RebuiltKernels
from qcompile.artifact.shards import ALIGNMENT
from qcompile.errors import ArtifactError, ResourceError
from qcompile.system.free_memory import available_memory
from qcompile.targets import cpu_flags

HUGE_PAGE = 2 << 20
_PAGE = 4096

# Open libraries by SHA-256: the dynamic loader must not load the same bytes twice.
_libraries: dict[str, ctypes.CDLL] = {}


class Arena:
    """Zeroed private memory starting on a 2 MB boundary, backed by huge pages on first use.

    `size` is in bytes. Raises ResourceError if the address space cannot be reserved.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        length = -(-max(size, 1) // HUGE_PAGE) * HUGE_PAGE
        try:
            self._map = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ResourceError(f"cannot reserve {length:,} bytes of memory: {error}") from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        skip = -start % HUGE_PAGE
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages: slower, but correct
            self._map.madvise(mmap.MADV_HUGEPAGE, skip, length)
        self.address, self._skip = start + skip, skip
        self.view = memoryview(self._map)[skip : skip + size]

    def release(self, offset: int, size: int) -> None:
        """Give back whole pages; they read as zeros afterwards."""
        self._map.madvise(mmap.MADV_DONTNEED, self._skip + offset, size)


@dataclass(frozen=True)
class DraftLibrary:
    """A draft path: its library, and the addresses of the weights that it reads, in its own order."""

    library: ctypes.CDLL
    pointers: Any


@dataclass(frozen=True)
class LoadedArtifact:
    """A verified artifact: manifest, weights in memory, and opened libraries."""

    root: Path
    manifest: Manifest
    weights: Arena
    places: dict[str, int]
    """Offset in `weights` (bytes) of each file of weights."""
    pointers: Any
    """ctypes array: the address of each tensor, in the order of manifest["runtime"]["weights"], or of the rank."""
    names: tuple[str, ...]
    """The names of these tensors, in the same order."""
    library: ctypes.CDLL
    drafts: tuple[DraftLibrary | None, ...]
    """For each draft stage of the manifest; None for a lookup."""
    rebuilt: str = ""
    """The hash of rebuilt kernels, if these were loaded in place of the artifact's own (RebuiltKernels)."""


def check_cpu(target: dict[str, Any], flags: frozenset[str]) -> None:
    """Raise ArtifactError naming the features that the artifact's target requires and this CPU lacks."""
    missing = [flag for flag in target.get("requires", []) if flag not in flags]
    if missing:
        raise ArtifactError(
            f"artifact is built for target {target['name']} ({target.get('isa', '')}), this CPU has no "
            f"{', '.join(missing)}: build it again here with --target cpu"
        )


def load_artifact(
    path: str | Path, manifest: Manifest | None = None, rank: int = 0, kernels: RebuiltKernels | None = None
) -> LoadedArtifact:
    """Read and verify the artifact at `path`, with its checked `manifest` if that was read before.

    Of an artifact for several processes, only the weights of rank `rank` stay in memory, and are in its own order. Rank
    0 has all drafts, others those that all ranks compute.
    Raises ArtifactError if a single bit differs from what was built or the CPU lacks features, ResourceError if memory
    is short. No file of the artifact is executed before all of them are verified; with `kernels`, none is executed at
    all, and draft paths without a rebuilt library are left out.
    """
    root = Path(path)
    if manifest is None:
        manifest = read_checked_manifest(root)
    check_cpu(manifest["target"], cpu_flags())
    runtime = manifest["runtime"]
    if runtime["abi"] != CPU_ABI:
        raise ArtifactError(f"{root}: library interface {runtime['abi']}, this qcompile has {CPU_ABI}; rebuild it")
    files: dict[str, dict[str, Any]] = manifest["files"]
    entries: list[dict[str, Any]] = runtime["weights"]
    stages: list[dict[str, Any]] = divided_stages(runtime) if rank else runtime.get("levels") or []
    ranks = runtime.get("ranks")
    own: Sequence[int] = ranks[rank] if ranks else range(len(entries))
    drafted = [stage["ranks"][rank] if rank else stage.get("weights", []) for stage in stages]
    held = dict.fromkeys([*own, *(index for indices in drafted for index in indices)])
    places = _place_weights([entries[index] for index in held], files, root)
    size = sum(_rounded(files[name]["bytes"]) for name in places)
    if size > available_memory():
        raise ResourceError(f"{root}: weights take {size:,} bytes, {available_memory():,} are available")
    arena = Arena(size)
    names = [runtime["library"], *(stage["library"] for stage in stages if "library" in stage)]
    if kernels is not None:
        names = [name for name in names if name in kernels.libraries]
    missing = [name for name in names if name not in files]
    if missing:
        raise ArtifactError(f"{root}: library {missing[0]} is not in the manifest; build it again")
    libraries = {name: bytearray(files[name]["bytes"]) for name in names}
    destinations = _destinations(arena, places, files)
    destinations |= {name: memoryview(content) for name, content in libraries.items()}
    _read_and_check(root, files, destinations)
    addresses = {index: arena.address + places[entries[index]["file"]] + entries[index]["offset"] for index in held}
    if kernels is not None:
        libraries = {name: bytearray(kernels.libraries[name]) for name in names}
    opened = {name: _open_library(content) for name, content in libraries.items()}
    if ranks:
        _forget(arena, [*addresses.values()], [entries[index]["bytes"] for index in held])
    drafts = (
        DraftLibrary(opened[stage["library"]], _pointers([addresses[index] for index in indices]))
        if stage.get("library") in opened
        else None
        for stage, indices in zip(stages, drafted, strict=True)
    )
    library = opened[runtime["library"]]
    pointers = _pointers([addresses[index] for index in own])
    own_names = tuple(entries[index]["name"] for index in own)
    return LoadedArtifact(
        root, manifest, arena, places, pointers, own_names, library, tuple(drafts), kernels.digest if kernels else ""
    )


def divided_stages(runtime: dict[str, Any]) -> list[dict[str, Any]]:
    """The draft stages of a manifest's `runtime` that all ranks of a divided model compute."""
    return [stage for stage in runtime.get("levels") or [] if "ranks" in stage]


def read_weights(artifact: LoadedArtifact) -> None:
    """Read the weights again after their memory was released, and verify them.

    Raises ArtifactError if the artifact's files are no longer those that were loaded, ResourceError if memory is short;
    then the memory is released again.
    """
    arena, files, root = artifact.weights, artifact.manifest["files"], artifact.root
    if arena.size > available_memory():
        raise ResourceError(f"{root}: weights take {arena.size:,} bytes, {available_memory():,} are available")
    problems = ["reading was interrupted"]
    try:
        destinations = _destinations(arena, artifact.places, files)
        problems = _read_all(root, {name: files[name] for name in artifact.places}, destinations)
    finally:
        if problems:
            arena.release(0, arena.size)
    if problems:
        raise ArtifactError(f"{root} has changed since the model was loaded: {problems[0]}; load it again")


def _forget(arena: Arena, starts: list[int], sizes: list[int]) -> None:
    """Give back the whole pages of `arena` that hold none of the weights at `starts`."""
    kept = sorted(zip(starts, sizes, strict=True))
    ends = [arena.address, *(start + size for start, size in kept)]
    for end, start in zip(ends, [*(start for start, _ in kept), arena.address + arena.size], strict=True):
        first, last = -(-end // _PAGE) * _PAGE, start // _PAGE * _PAGE
        if last > first:
            arena.release(first - arena.address, last - first)


def _pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _place_weights(entries: list[dict[str, Any]], files: dict[str, dict[str, Any]], root: Path) -> dict[str, int]:
    """Offset in the arena (bytes) of each weights file. Raises ArtifactError if a tensor lies outside its file."""
    places: dict[str, int] = {}
    end = 0
    for entry in entries:
        name, offset, size = entry["file"], entry["offset"], entry["bytes"]
        if name not in files or offset % ALIGNMENT or not 0 <= offset <= offset + size <= files[name]["bytes"]:
            raise ArtifactError(f"{root}: weight {entry['name']} lies outside its file; build the artifact again")
        if name not in places:
            places[name] = end
            end += _rounded(files[name]["bytes"])
    return places


def _destinations(arena: Arena, places: dict[str, int], files: dict[str, dict[str, Any]]) -> dict[str, memoryview]:
    """Where in the arena each file of weights is read to."""
    return {name: arena.view[at : at + files[name]["bytes"]] for name, at in places.items()}


def _read_and_check(root: Path, files: dict[str, dict[str, Any]], destinations: dict[str, memoryview]) -> None:
    """Read and hash every file into its buffer in `destinations` if it has one. Raises ArtifactError."""
    if problems := _read_all(root, files, destinations):
        raise damaged(root, problems)


def _read_all(root: Path, files: dict[str, dict[str, Any]], destinations: dict[str, memoryview]) -> list[str]:
    """Read and hash every file, the largest first. Returns the problems, one line each."""
    by_size = sorted(files, key=lambda name: -int(files[name]["bytes"]))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(lambda name: file_problem(root, name, files[name], destinations.get(name)), by_size)
        return [problem for problem in results if problem]


def _open_library(content: bytearray) -> ctypes.CDLL:
    """Open a library from these bytes, so that it is not read from the disk again."""
    digest = hashlib.sha256(content).hexdigest()
    if digest not in _libraries:
        # The descriptor stays open: the loader identifies libraries by path, so its number must not be reused.
        fd = os.memfd_create("qcompile-kernels")
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        try:
            _libraries[digest] = ctypes.CDLL(f"/proc/self/fd/{fd}")
        except OSError as error:
            os.close(fd)
            raise ArtifactError(f"the artifact's library cannot be opened: {error}; build it again") from error
    return _libraries[digest]
