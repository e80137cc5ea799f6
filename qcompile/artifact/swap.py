"""Replace a folder or a file atomically: a reader sees either the old one or the new one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_HERE = -100  # AT_FDCWD: relative paths start at the working directory
_EXCHANGE = 2
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}
_NOT_OFFERED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def install(folder: Path, place: Path) -> None:
    """Move `folder` to `place`. A folder that exists there is moved to where `folder` was. Raises OSError."""
    while True:
        try:
            os.rename(folder, place)  # succeeds if `place` is absent or an empty folder
            return
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        try:
            _exchange(folder, place)
            return
        except FileNotFoundError:
            if not folder.exists():
                raise
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            if _exchange_by_renames(folder, place):
                return


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A temporary file to write. When the block ends it is renamed to `path`; if the block fails it is deleted.

    Raises OSError.
    """
    handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            os.fchmod(file.fileno(), 0o666 & ~umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def umask() -> int:
    """The process's umask, which tempfile ignores, as it creates private files."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def _exchange(one: Path, other: Path) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    paths = os.fsencode(one), os.fsencode(other)
    if library.renameat2(_HERE, paths[0], _HERE, paths[1], _EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def _exchange_by_renames(one: Path, other: Path) -> bool:
    """Exchange two folders by renames, for file systems without atomic exchange; for a moment `other` is absent.

    Returns False if another process created `other` in that moment.
    """
    aside, lock = locked_sibling(other)
    try:
        try:
            os.rename(other, aside / "old")
        except FileNotFoundError:
            if not one.exists():
                raise
            return False
        try:
            os.rename(one, other)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _TAKEN:
                return False  # the old folder is deleted, as if the other process had come later
            os.rename(aside / "old", other)
            raise
        os.rename(aside / "old", one)
        return True
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _prefix(path: Path) -> str:
    return f".{path.name}.tmp-"


def locked_sibling(path: Path) -> tuple[Path, int]:
    """A new temporary folder beside `path`, and the descriptor of the lock that marks it as in use."""
    while True:
        # Choose the name before creating the folder, so that an interruption during creation can still delete it.
        folder = path.parent / f"{_prefix(path)}{secrets.token_hex(8)}"
        try:
            folder.mkdir(mode=0o700)
            lock = _locked(folder)
            if lock is None:  # another build removed it as a leftover before we had the lock
                continue
            if folder.exists():
                return folder, lock
            os.close(lock)
        except FileExistsError:
            continue
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def remove_leftovers(path: Path) -> None:
    """Delete temporary folders that killed builds left beside `path`; running builds hold locks on theirs."""
    for folder in path.parent.glob(f"{glob.escape(_prefix(path))}*/"):
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if another process holds it or the folder is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
