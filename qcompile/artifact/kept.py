"""Artifacts in the user's cache, built when a command first needs them, and found again by what they were built from.

Each has a folder of its own below `artifacts` in the cache, with the artifact and `about.json`, which says what it was
built from. A process that builds it holds the folder's lock, so that two build once; if the build ends without an
artifact, the folder is deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qcompile.artifact import swap
from qcompile.artifact.layout import MANIFEST, canonical_json, disk_errors
from qcompile.errors import ResourceError
from qcompile.user_cache import cache_dir

ABOUT = "about.json"
_SOURCES = (
    "*.py",
    *(f"{folder}/**/*.py" for folder in ("artifact", "checkpoints", "formats", "ops", "passes", "recipe_files")),
    "plugins/*.py",
    *("codegen/**/*", "sample_text/**/*"),
)
"""What an artifact's content depends on, below the package."""
_LONGEST_NAME = 60


@dataclass(frozen=True)
class KeptArtifact:
    """Where an artifact is kept, whether or not it is there."""

    folder: Path

    @property
    def artifact(self) -> Path:
        """The directory of the artifact."""
        return self.folder / "artifact"

    @property
    def ready(self) -> bool:
        """Whether the artifact is there."""
        return (self.artifact / MANIFEST).is_file()

    @property
    def about(self) -> dict[str, Any]:
        """What the artifact was built from; empty if that cannot be read."""
        try:
            about = json.loads((self.folder / ABOUT).read_bytes())
        except (OSError, ValueError):
            return {}
        return about if isinstance(about, dict) else {}

    @property
    def last_used(self) -> float:
        """Seconds since the epoch."""
        try:
            return (self.folder / ABOUT).stat().st_mtime
        except OSError:
            return 0.0

    @property
    def bytes(self) -> int:
        """Size on the disk."""
        return folder_bytes(self.folder)

    def use(self) -> None:
        """Note that the artifact is used now."""
        with suppress(OSError):  # a cache that may only be read serves as well
            os.utime(self.folder / ABOUT)

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the folder's lock; `waiting` is called once if another process holds it. Raises ResourceError.

        A folder that holds no artifact when the block ends is deleted.
        """
        try:
            lock = _lock(self.folder, waiting)
        except OSError as error:
            advice = "set QCOMPILE_CACHE to a folder that can be written"
            raise ResourceError(f"cannot write {self.folder}: {error.strerror}; {advice}") from error
        try:
            yield
        finally:
            if not self.ready:
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(lock)

    def describe(self, about: Mapping[str, Any]) -> None:
        """Write what the artifact is built from. Raises ResourceError."""
        with disk_errors(self.folder / ABOUT), swap.whole_file(self.folder / ABOUT) as file:
            file.write(canonical_json(about))

    def remove(self) -> bool:
        """Delete the artifact; False if another process is building it."""
        try:
            lock = _lock(self.folder, None)
        except BlockingIOError:
            return False
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            os.close(lock)
        return True


def place(name: str, key: Mapping[str, Any]) -> KeptArtifact:
    """The place of the artifact of the model `name` that is built from `key` by this version of qcompile."""
    digest = hashlib.sha256(canonical_json({"compiler": _compiler(), **key})).hexdigest()[:16]
    words = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[-_LONGEST_NAME:] or "model"
    return KeptArtifact(_root() / f"{words}-{digest}")


def places() -> list[KeptArtifact]:
    """The places of all kept artifacts, and of those that are being built; the last used first."""
    try:
        artifacts = [KeptArtifact(folder) for folder in _root().iterdir() if folder.is_dir()]
    except OSError:
        return []
    return sorted(artifacts, key=lambda one: (-one.last_used, one.folder))


def remove_unfinished() -> None:
    """Delete what builds left that were killed; those that run hold their folders' locks."""
    for place in places():
        if not place.ready:
            place.remove()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; files that vanish meanwhile do not count."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(at, name)).st_size
    return total


def _root() -> Path:
    return cache_dir() / "artifacts"


def _lock(folder: Path, waiting: Callable[[], None] | None) -> int:
    """A descriptor that holds the lock of the folder, which is created if need be.

    Without `waiting`, raises BlockingIOError where another process holds it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # deleted since
            continue
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):  # else deleted by the process that held the lock
                if os.path.samestat(os.fstat(lock), os.stat(folder)):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


@cache
def _compiler() -> str:
    """Digest of the source files that determine what a build writes; they may change while the version stays."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(path for pattern in _SOURCES for path in root.glob(pattern)):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()
