"""Write an artifact directory atomically.

The writer works in a locked sibling directory `.NAME.tmp-*` and renames it into place as its last step, exchanging it
for an older artifact. So a killed build leaves NAME unchanged, and the next build to the same place removes unlocked
leftovers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from qcompile.artifact import swap
from qcompile.artifact.destination import check_replaceable
from qcompile.artifact.layout import (
    FORMAT_VERSION,
    MANIFEST,
    UNSEALED,
    Manifest,
    canonical_json,
    disk_errors,
    fsync_directory,
    relative,
    seal,
)
from qcompile.artifact.shards import ALIGNMENT, SHARD_BYTES, WeightSpec, plan_shards, safetensors_header, shard_bytes
from qcompile.errors import ResourceError


class ArtifactWriter:
    """Writes one artifact. Use it as a context manager, and call `finish` last.

    Leaving the `with` block without `finish`, for any reason, removes all that was written. Raises UsageError if `path`
    exists and is neither an artifact nor an empty directory, and ResourceError if the disk is full or not writable.
    """

    def __init__(self, path: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.path = Path(os.path.realpath(path))
        self._shard_bytes = shard_bytes
        self._files: dict[str, dict[str, Any]] = {}
        with disk_errors(self.path):
            check_replaceable(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            swap.remove_leftovers(self.path)
            self._dir, self._lock = swap.locked_sibling(self.path)

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            shutil.rmtree(self._dir, ignore_errors=True)  # after _install, it holds the replaced artifact
        finally:
            os.close(self._lock)

    def add_file(self, name: str, content: bytes | str | Path) -> None:
        """Add a file at the relative path `name`: bytes, text, or a copy of an existing file."""
        data = content.encode() if isinstance(content, str) else content
        if isinstance(data, Path):
            try:
                self._write(name, iter([data.read_bytes()]))
            except OSError as error:
                raise ResourceError(f"cannot read {data}: {error.strerror}") from error
        else:
            self._write(name, iter([data]))

    def add_unsealed(self, name: str, content: bytes) -> None:
        """Add one of the files in UNSEALED, which no hash covers."""
        if name not in UNSEALED:
            raise ValueError(f"{name} is not among the files without hash")
        self.add_file(name, content)
        del self._files[name]

    def add_weights(self, specs: Sequence[WeightSpec], pieces: Iterable[Any]) -> list[dict[str, Any]]:
        """Stream packed tensors into `weights-*.safetensors`; returns the manifest's runtime.weights.

        `pieces` yields buffers (bytes, memoryview, contiguous arrays) in the order of `specs`. A tensor may span
        several pieces; a piece never holds parts of two tensors. Each entry returned is {name, file, offset, bytes},
        with the offset relative to the start of the file.
        """
        for spec in specs:
            if spec.bytes <= 0 or spec.bytes % ALIGNMENT:
                raise ValueError(f"weight {spec.name}: {spec.bytes} bytes not a multiple of {ALIGNMENT}")
        if len({spec.name for spec in specs}) != len(specs):
            raise ValueError("two weights share a name")
        need = sum(spec.bytes for spec in specs)
        free = shutil.disk_usage(self._dir).free
        if need > free:
            raise ResourceError(f"no space on the disk for {self.path}: {need:,} bytes needed, {free:,} free")
        entries: list[dict[str, Any]] = []
        source = iter(pieces)
        for number, shard in enumerate(plan_shards([spec.bytes for spec in specs], self._shard_bytes)):
            name, members = f"weights-{number:05d}.safetensors", [specs[i] for i in shard]
            header = safetensors_header(members)
            self._write(name, shard_bytes(header, members, source))
            offset = len(header)
            for spec in members:
                entries.append({"name": spec.name, "file": name, "offset": offset, "bytes": spec.bytes})
                offset += spec.bytes
        return entries

    def finish(self, manifest: Manifest) -> Path:
        """Add format version, files and hash to the manifest, write it, and rename the directory into place."""
        complete = dict(manifest, format_version=FORMAT_VERSION, files=self._files)
        complete["sha256"] = seal(complete)
        with disk_errors(self.path):
            for folder, _, _ in os.walk(self._dir):
                fsync_directory(Path(folder))
            self._write(MANIFEST, iter([canonical_json(complete)]))
            fsync_directory(self._dir)
            self._install()
        return self.path

    def _write(self, name: str, pieces: Iterator[Any]) -> None:
        """Write one file, hashing as it goes."""
        target = self._dir / relative(name)
        digest, size = hashlib.sha256(), 0
        with disk_errors(self.path / name):
            target.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                digest.update(view)
                size += len(view)
                with disk_errors(self.path / name):
                    _write_all(fd, view)
            with disk_errors(self.path / name):
                os.fsync(fd)
        finally:
            os.close(fd)
        self._files[name] = {"bytes": size, "sha256": digest.hexdigest()}

    def _install(self) -> None:
        """Rename into place. An older artifact then takes the temporary directory's place and is deleted with it."""
        check_replaceable(self.path)
        os.chmod(self._dir, 0o777 & ~swap.umask())
        swap.install(self._dir, self.path)
        fsync_directory(self.path.parent)


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]
