"""Change entries of an artifact's manifest in place, as `qcompile tune` does."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from qcompile.artifact.layout import MANIFEST, Manifest, canonical_json, disk_errors, seal
from qcompile.artifact.reader import parse_manifest


def amend(path: str | Path, **entries: object) -> Manifest:
    """Override `entries` in the manifest of the artifact at `path` and replace it in one rename.

    Amendments are serialized by a lock, and use the folder's descriptor instead of its name, so that an artifact that
    replaces it meanwhile is not modified.
    """
    root = Path(os.path.realpath(path))
    with disk_errors(root / MANIFEST, "tune a copy of the artifact elsewhere"), ExitStack() as stack:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)
        here = Path(f"/proc/self/fd/{folder}")
        manifest = parse_manifest(root, (here / MANIFEST).read_bytes()) | entries
        manifest["sha256"] = seal(manifest)
        replace_file(folder, MANIFEST, canonical_json(manifest))
    return manifest


def replace_file(folder: int, name: str, content: bytes) -> None:
    """Replace the file `name` of the folder with the descriptor `folder` in one rename. Raises OSError.

    The caller holds the folder's lock.
    """
    here = Path(f"/proc/self/fd/{folder}")
    new = here / f".{name}.new"
    new.unlink(missing_ok=True)  # of one that was killed, or a link that somebody else made
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, here / name)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    os.fsync(folder)
