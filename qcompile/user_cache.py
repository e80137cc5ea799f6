"""What is kept between builds, in the user's cache folder: compiled kernels and traces of models."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Where it is kept: $QCOMPILE_CACHE, else ~/.cache/qcompile."""
    chosen = os.environ.get("QCOMPILE_CACHE")
    return Path(chosen) if chosen else Path("~/.cache/qcompile").expanduser()


def remember(path: Path, binary: bytes) -> None:
    """Write a cache entry whole or not at all. A cache that cannot be written is not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        os.replace(temporary, path)
    except OSError:
        pass
