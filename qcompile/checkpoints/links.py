"""Refuses links that leave a checkpoint: one of somebody else could name any file of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from qcompile.errors import UsageError
from qcompile.user_cache import cache_dir


def check_links(directory: Path) -> None:
    """Raise UsageError for a file of the directory that is a link to a file elsewhere.

    The directories of the hub's cache consist of links to the folder `blobs` beside them, and those that stand for GGUF
    files, in the user's cache, of links to these.
    """
    real = os.path.realpath(directory)
    if real.startswith(os.path.join(os.path.realpath(cache_dir()), "")):
        return
    parent = os.path.dirname(real)
    blobs = [os.path.join(os.path.dirname(parent), "blobs", "")] if os.path.basename(parent) == "snapshots" else []
    for entry in os.scandir(directory):
        target = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
        if entry.is_symlink() and not target.startswith((os.path.join(real, ""), *blobs)):
            raise UsageError(f"{entry.path} is a link to {target}, outside of the checkpoint: copy the file")
