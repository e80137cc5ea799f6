"""Whether a path may become an artifact: it is free, an empty directory, or an artifact that may be replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from qcompile.artifact.layout import MANIFEST
from qcompile.errors import UsageError


def check_replaceable(path: Path) -> None:
    """Raise UsageError unless `path` is free, an empty directory, or an artifact, and in no other artifact."""
    if around := next((parent for parent in path.parents if (parent / MANIFEST).is_file()), None):
        raise UsageError(f"output {path} is inside of the artifact {around}: choose another directory")
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
    check_replaceable(path)


def _check_movable(folder: Path) -> None:
    """Raise UsageError if `folder` cannot be renamed, or is the working directory or above it."""
    here = Path(os.readlink("/proc/self/cwd"))  # may have been deleted
    if folder in (here, *here.parents):
        raise UsageError(f"output {folder} is where you are, and would be replaced: build from outside of it")
    if os.path.ismount(folder):
        raise UsageError(f"output {folder} is a mount point, which cannot be replaced: choose a folder in it")


def _is_at(folder: int, path: Path) -> bool:
    """Whether the folder with the descriptor `folder` is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(folder), os.stat(path))
    except FileNotFoundError:
        return False


def _is_ours(folder: int) -> bool:
    """Whether the folder with the descriptor `folder` is empty or an artifact."""
    if not os.listdir(folder):
        return True
    try:
        return stat.S_ISREG(os.stat(MANIFEST, dir_fd=folder).st_mode)
    except FileNotFoundError:
        return False
