"""What is kept between builds, in the user's cache folder: compiled kernels and traces of models."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from qcompile import swap

_SEAL = 32


def cache_dir() -> Path:
    """Where it is kept: $QCOMPILE_CACHE, else ~/.cache/qcompile; nowhere for who has no home."""
    chosen = os.environ.get("QCOMPILE_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "qcompile"
    except RuntimeError:  # no HOME, and no account of this number: nothing can be kept, as nothing is below a device
        return Path(os.devnull) / "qcompile"


def remember(path: Path, content: bytes) -> None:
    """Write a cache entry and its SHA-256, whole or not at all. A cache that cannot be written is not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with swap.whole_file(path) as file:
            file.write(content + hashlib.sha256(content).digest())
    except OSError:
        pass


def recall(path: Path) -> bytes | None:
    """What `remember` kept at `path`; None where that is nothing, or not what it was: the next to remember mends it."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    content, seal = entry[:-_SEAL], entry[-_SEAL:]
    return content if hashlib.sha256(content).digest() == seal else None
