"""The user's cache folder, with compiled kernels and traces of models that are kept between builds."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from qcompile.artifact import swap

_SEAL = 32


def cache_dir() -> Path:
    """The folder: $QCOMPILE_CACHE, else ~/.cache/qcompile; for users without a home, one that cannot be created."""
    chosen = os.environ.get("QCOMPILE_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "qcompile"
    except RuntimeError:  # no HOME and no account for this uid: nothing can be stored below a device
        return Path(os.devnull) / "qcompile"


def remember(path: Path, content: bytes) -> None:
    """Write a cache entry and its SHA-256, atomically. Failing to write the cache is not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with swap.whole_file(path) as file:
            file.write(content + hashlib.sha256(content).digest())
    except OSError:
        pass


def recall(path: Path) -> bytes | None:
    """What `remember` stored at `path`; None if there is nothing or it is damaged, which the next build repairs."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    content, seal = entry[:-_SEAL], entry[-_SEAL:]
    return content if hashlib.sha256(content).digest() == seal else None
