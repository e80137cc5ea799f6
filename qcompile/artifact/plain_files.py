"""Opens files that somebody else made: only regular ones, as a pipe or a device would have no end."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path


class NotPlainError(OSError):
    """What lies at a path is not a regular file, or not in the folder where it should be."""

    def __init__(self, what: str, path: Path) -> None:
        super().__init__(errno.EINVAL, what, str(path))


def open_plain(path: Path, within: Path | None = None) -> FileIO:
    """A regular file, opened for unbuffered reading. Raises NotPlainError for anything else, without waiting
    for it, and OSError for a file that cannot be opened.

    within: a folder that the file must be in, after all links are followed.
    """
    _check_within(os.path.realpath(path), path, within)  # before anything elsewhere is opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotPlainError("no plain file", path)
        _check_within(os.readlink(f"/proc/self/fd/{descriptor}"), path, within)  # the path may have changed
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _check_within(real: str, path: Path, within: Path | None) -> None:
    if within is not None and not real.startswith(os.path.join(os.path.realpath(within), "")):
        raise NotPlainError(f"a link to {real}, outside of {within}: copy the file", path)


def read_plain(path: Path, within: Path | None = None) -> bytes:
    """The bytes of a regular file; `open_plain` tells what is refused."""
    with open_plain(path, within) as file:
        return file.read()
