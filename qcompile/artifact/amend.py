"""Change entries of an artifact's manifest in place, as `qcompile tune` does."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from qcompile.artifact.layout import AMENDED, MANIFEST, Manifest, canonical_json, disk_errors, seal
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
        try:
            with open(here / AMENDED, "wb") as file:
                file.write(canonical_json(manifest))
                file.flush()
                os.fsync(file.fileno())
            os.replace(here / AMENDED, here / MANIFEST)
        except BaseException:
            (here / AMENDED).unlink(missing_ok=True)
            raise
        os.fsync(folder)
    return manifest
