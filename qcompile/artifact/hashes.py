"""Compare files of an artifact with the hashes in its manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qcompile.artifact.plain_files import open_plain
from qcompile.errors import ArtifactError

_CHUNK = 1 << 20
"""Bytes that are read and hashed at once: they fit the CPU cache."""


_PART = 1 << 30
"""Most bytes of one read: Linux reads less than 2 GiB at once."""


def file_problem(root: Path, name: str, expected: dict[str, Any], into: memoryview | None = None) -> str | None:
    """Hash one file of an artifact and compare it with its manifest entry; returns what is wrong with it, or None.

    With `into` (exactly the file's size), the bytes are read into that memory and hashed chunk by chunk while they are
    in the CPU cache; this is how weights are loaded.
    """
    try:
        with open_plain(root / name, within=root) as file:
            if os.fstat(file.fileno()).st_size != expected["bytes"]:
                return f"{name}: {os.fstat(file.fileno()).st_size} bytes instead of {expected['bytes']}"
            digest = _hash_through(file.fileno(), expected["bytes"], into)
    except OSError as error:
        return f"{name}: {error.strerror or error}"
    return None if digest == expected["sha256"] else f"{name}: SHA-256 differs"


def read_part(root: Path, name: str, expected: dict[str, Any], offset: int, into: memoryview) -> str | None:
    """Read a part of a file of an artifact from `offset` on, without its hash; returns what is wrong, or None."""
    try:
        with open_plain(root / name, within=root) as file:
            size, done = os.fstat(file.fileno()).st_size, 0
            while size == expected["bytes"] and done < len(into):
                count = os.preadv(file.fileno(), [into[done : done + _PART]], offset + done)
                if count == 0:
                    return f"{name}: it ends before byte {offset + len(into)}"
                done += count
    except OSError as error:
        return f"{name}: {error.strerror or error}"
    return None if size == expected["bytes"] else f"{name}: {size} bytes instead of {expected['bytes']}"


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
