"""The artifact directory on disk: written atomically, and verified by hashes.

An artifact is a directory with `qcompile.json` (the manifest) and the files it lists. The writer works in a locked
sibling directory `.NAME.tmp-*` and renames it into place as its last step, exchanging it for an older artifact. So a
killed build leaves NAME unchanged, and the next build to the same place removes unlocked leftovers.

The manifest contains every file's SHA-256 and its own: it is canonical JSON, so a reader serializes what it parsed
and compares bytes. Weights are split over several files because one SHA-256 cannot be computed by two threads.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from qcompile.artifact import swap
from qcompile.artifact.manifest import SHAPE, check_shape
from qcompile.errors import ArtifactError, ResourceError, UsageError

FORMAT_VERSION = 1
MANIFEST = "qcompile.json"
PASSES_FILE = "passes.json"
UNSEALED = (PASSES_FILE,)
"""Files about a particular build, such as its times: they differ between builds, so no hash covers them."""
ALIGNMENT = 64
PAGE = 4096
"""Alignment of the data of a weights file; page-aligned weights are read up to a tenth faster (benchmarks/cpu_gemm)."""
SHARD_BYTES = 128 << 20
_AMENDED = f".{MANIFEST}.new"
"""Name of an amended manifest while it is being written. A killed `amend` leaves it, and the next overwrites it."""
_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}

Manifest = dict[str, Any]


@dataclass(frozen=True)
class WeightSpec:
    """A packed tensor: its name and its size in bytes, a multiple of 64."""

    name: str
    bytes: int


def canonical_json(value: object) -> bytes:
    """The only JSON encoding of this format: equal values give equal bytes."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _seal(manifest: Manifest) -> str:
    """SHA-256 of the manifest without its own hash."""
    return hashlib.sha256(canonical_json({k: v for k, v in manifest.items() if k != "sha256"})).hexdigest()


@contextmanager
def _disk_errors(path: Path, instead: str = "choose another directory") -> Iterator[None]:
    """Report disk errors in one line with the path and the reason; `instead` is the advice for read-only places."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(f"no space left on the disk for {path}: free some space") from error
        if error.errno in _READ_ONLY:
            raise ResourceError(f"cannot write {path}: {error.strerror}; {instead}") from error
        raise ResourceError(f"cannot write {path}: {error.strerror or error}") from error


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


def _safetensors_header(specs: Sequence[WeightSpec]) -> bytes:
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


class ArtifactWriter:
    """Writes one artifact. Use it as a context manager, and call `finish` last.

    Leaving the `with` block without `finish`, for any reason, removes all that was written. Raises UsageError if `path`
    exists and is neither an artifact nor an empty directory, and ResourceError if the disk is full or not writable.
    """

    def __init__(self, path: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.path = Path(os.path.realpath(path))
        self._shard_bytes = shard_bytes
        self._files: dict[str, dict[str, Any]] = {}
        with _disk_errors(self.path):
            _check_replaceable(self.path)
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
            header = _safetensors_header(members)
            self._write(name, _shard_bytes(header, members, source))
            offset = len(header)
            for spec in members:
                entries.append({"name": spec.name, "file": name, "offset": offset, "bytes": spec.bytes})
                offset += spec.bytes
        return entries

    def finish(self, manifest: Manifest) -> Path:
        """Add format version, files and hash to the manifest, write it, and rename the directory into place."""
        complete = dict(manifest, format_version=FORMAT_VERSION, files=self._files)
        complete["sha256"] = _seal(complete)
        with _disk_errors(self.path):
            for folder, _, _ in os.walk(self._dir):
                _fsync_directory(Path(folder))
            self._write(MANIFEST, iter([canonical_json(complete)]))
            _fsync_directory(self._dir)
            self._install()
        return self.path

    def _write(self, name: str, pieces: Iterator[Any]) -> None:
        """Write one file, hashing as it goes."""
        target = self._dir / _relative(name)
        digest, size = hashlib.sha256(), 0
        with _disk_errors(self.path / name):
            target.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                digest.update(view)
                size += len(view)
                with _disk_errors(self.path / name):
                    _write_all(fd, view)
            with _disk_errors(self.path / name):
                os.fsync(fd)
        finally:
            os.close(fd)
        self._files[name] = {"bytes": size, "sha256": digest.hexdigest()}

    def _install(self) -> None:
        """Rename into place. An older artifact then takes the temporary directory's place and is deleted with it."""
        _check_replaceable(self.path)
        os.chmod(self._dir, 0o777 & ~swap.umask())
        swap.install(self._dir, self.path)
        _fsync_directory(self.path.parent)


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _shard_bytes(header: bytes, specs: Sequence[WeightSpec], pieces: Iterator[Any]) -> Iterator[Any]:
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


def _check_replaceable(path: Path) -> None:
    """Raise UsageError unless `path` is free, an empty directory, or an artifact."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        if path.exists():
            raise UsageError(f"output {path} is a file: choose another directory") from error
        return  # a parent is a file: creating the folder reports it
    try:
        _check_movable(path)
        if _is_ours(folder):
            return
        # If another build replaced the folder, it is being deleted file by file: check what is at `path` now.
        if _is_at(folder, path):
            raise UsageError(f"output {path} holds other files: choose another directory")
    finally:
        os.close(folder)
    _check_replaceable(path)


def _check_movable(folder: Path) -> None:
    """Raise UsageError if this folder cannot be replaced by another, or replacing it would surprise."""
    here = Path(os.readlink("/proc/self/cwd"))  # may have been deleted
    if folder in (here, *here.parents):
        raise UsageError(f"output {folder} is where you are, and would be replaced: build from outside of it")
    if os.path.ismount(folder):
        raise UsageError(f"output {folder} is a mount point, which cannot be replaced: choose a folder in it")


def _is_at(folder: int, path: Path) -> bool:
    """Whether the folder with this descriptor is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(folder), os.stat(path))
    except FileNotFoundError:
        return False


def _is_ours(folder: int) -> bool:
    """Whether the folder with this descriptor is empty or an artifact."""
    if not os.listdir(folder):
        return True
    try:
        return stat.S_ISREG(os.stat(MANIFEST, dir_fd=folder).st_mode)
    except FileNotFoundError:
        return False


def _relative(name: str) -> PurePosixPath:
    """`name` as a path inside the artifact. Raises ArtifactError if it leads outside."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or str(path) != name:
        raise ArtifactError(f"file name {name!r} leaves the artifact")
    return path


def read_manifest(path: str | Path) -> Manifest:
    """Parse and check `qcompile.json` of the artifact at `path`.

    Raises UsageError if there is no such directory, ArtifactError if the manifest is missing, damaged or of another
    format version.
    """
    root = Path(path)
    if not stat.S_ISDIR(_status(root).st_mode):
        raise UsageError(f"{root}: no such artifact directory")
    try:
        raw = (root / MANIFEST).read_bytes()
    except FileNotFoundError:
        model = (root / "config.json").exists()
        hint = ": this is a model, make an artifact of it with `qcompile build`" if model else ""
        raise ArtifactError(f"{root}: not an artifact (no {MANIFEST}){hint}") from None
    except OSError as error:
        raise ArtifactError(f"{root}: cannot read {MANIFEST}: {error.strerror}") from error
    return _parsed(root, raw)


def _parsed(root: Path, raw: bytes) -> Manifest:
    """The manifest with the bytes `raw`, after checking it; errors name `root`."""
    damaged = ArtifactError(f"{root}: {MANIFEST} is damaged; build the artifact again")
    try:
        manifest = json.loads(raw)
        intact = isinstance(manifest, dict) and canonical_json(manifest) == raw
    except (ValueError, RecursionError):
        raise damaged from None
    if not intact or manifest.get("sha256") != _seal(manifest):
        raise damaged
    if manifest.get("format_version") != FORMAT_VERSION:
        found = manifest.get("format_version")
        raise ArtifactError(f"{root}: artifact format {found}, this qcompile reads {FORMAT_VERSION}; rebuild it")
    checked: Manifest = manifest
    check_shape(checked, {"files": SHAPE["files"]}, str(root / MANIFEST))
    for name in checked["files"]:
        _relative(name)
    return checked


def amend(path: str | Path, **entries: object) -> Manifest:
    """Override `entries` in the manifest of the artifact at `path` and replace it in one rename.

    Amendments are serialized by a lock, and use the folder's descriptor instead of its name, so that an artifact that
    replaces it meanwhile is not modified.
    """
    root = Path(os.path.realpath(path))
    with _disk_errors(root / MANIFEST, "tune a copy of the artifact elsewhere"), ExitStack() as stack:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)
        here = Path(f"/proc/self/fd/{folder}")
        manifest = _parsed(root, (here / MANIFEST).read_bytes()) | entries
        manifest["sha256"] = _seal(manifest)
        try:
            with open(here / _AMENDED, "wb") as file:
                file.write(canonical_json(manifest))
                file.flush()
                os.fsync(file.fileno())
            os.replace(here / _AMENDED, here / MANIFEST)
        except BaseException:
            (here / _AMENDED).unlink(missing_ok=True)
            raise
        os.fsync(folder)
    return manifest


def state(path: str | Path) -> tuple[int, ...]:
    """A state that changes when another artifact replaces the one at `path`, or its manifest is amended.

    Problems found between two equal states belong to one artifact. Raises UsageError if there is none.
    """
    found = _status(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _status(path: str | Path) -> os.stat_result:
    """os.stat of `path`. Raises UsageError if it does not exist or cannot be read."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path}: no such artifact directory") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: give another path") from error


def file_problem(root: Path, name: str, expected: dict[str, Any], into: memoryview | None = None) -> str | None:
    """Hash one file of an artifact and compare it with its manifest entry; returns what is wrong with it, or None.

    With `into` (exactly the file's size), the bytes are read into that memory and hashed chunk by chunk while they are
    in the CPU cache; this is how weights are loaded.
    """
    try:
        with open(root / name, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != expected["bytes"]:
                return f"{name}: {os.fstat(file.fileno()).st_size} bytes instead of {expected['bytes']}"
            digest = _hash_through(file.fileno(), expected["bytes"], into)
    except OSError as error:
        return f"{name}: {error.strerror or error}"
    return None if digest == expected["sha256"] else f"{name}: SHA-256 differs"


def listed_file(root: Path, files: dict[str, dict[str, Any]], name: str) -> bytes | None:
    """A file of the artifact at `root`, verified against the manifest's `files`; None if they do not list it.

    Raises ArtifactError if it is damaged.
    """
    if name not in files:
        return None
    content = bytearray(files[name]["bytes"])
    if problem := file_problem(root, name, files[name], memoryview(content)):
        raise damaged(root, [problem])
    return bytes(content)


def damaged(root: Path, problems: Sequence[str]) -> ArtifactError:
    """The error that names the first of an artifact's problems."""
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return ArtifactError(f"{root} is damaged: {problems[0]}{more}; build it again")


def _hash_through(fd: int, size: int, into: memoryview | None) -> str:
    """SHA-256 of the next `size` bytes of a file, stored in `into` if given; empty if the file is shorter."""
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(min(_CHUNK, size))) if into is None else into
    done = 0
    while done < size:
        room = scratch[: size - done] if into is None else scratch[done : done + _CHUNK]
        count = os.readv(fd, [room])
        if count == 0:
            return ""
        digest.update(room[:count])
        done += count
    return digest.hexdigest()


def verify(path: str | Path) -> list[str]:
    """All problems of the artifact at `path`, one line each; an empty list means that every bit is as built."""
    root = Path(path)
    while True:
        before = state(root)
        try:
            problems = _problems(root, read_manifest(root)["files"])
        except ArtifactError as error:
            problems = [str(error)]
        if not problems or state(root) == before:
            return problems


def _problems(root: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """Unlisted files at `root`, and problems with those listed in `files`."""
    present = {str(PurePosixPath(at, name).relative_to(root)) for at, _, names in os.walk(root) for name in names}
    known = {*files, MANIFEST, *UNSEALED, _AMENDED}
    problems = [f"{name}: not in the manifest" for name in sorted(present - known)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda item: file_problem(root, item[0], item[1]), sorted(files.items()))
        problems += [problem for problem in found if problem]
    return problems
