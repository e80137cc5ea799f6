"""The identity of a checkpoint: a hash of the contents of all files that a build may read.

Hashes of files are kept in the user's cache with the files' sizes, times and inodes: the second time, none is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from qcompile import user_cache
from qcompile.checkpoints.tokenizer_sources import PATTERNS
from qcompile.clock import Progress
from qcompile.errors import UsageError

READ = ("*.json", "*.safetensors", "*.py", "*.gguf", *PATTERNS, "chat_template.jinja")
"""Files that a build may read, by pattern."""
_CHUNK = 1 << 22
_SETTLED = 2_000_000_000
"""Nanoseconds after which a file that is written again gets another time on any file system."""

_Stamp = list[int]


def identity(directory: Path, progress: Progress) -> str:
    """The hash of the checkpoint in `directory`, in hexadecimal. Raises UsageError for files that cannot be read."""
    try:
        files = {path.name: path for pattern in READ for path in directory.glob(pattern) if path.is_file()}
        stamps = {name: _stamp(path) for name, path in files.items()}
        kept = user_cache.cache_dir() / "identities" / hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()
        known = _recall(kept)
        fresh = {name: known[name][1] for name in files if known.get(name, (None,))[0] == stamps[name]}
        missing = sorted(set(files) - set(fresh))
        total, done = sum(stamps[name][0] for name in missing), 0
        began = time.time_ns()
        for name in missing:
            digest = hashlib.sha256()
            for piece in _pieces(files[name]):
                digest.update(piece)
                done += len(piece)
                progress("reading the checkpoint", done, total)
            fresh[name] = digest.hexdigest()
        settled = {n: (stamps[n], fresh[n]) for n in files if max(stamps[n][1:3]) < began - _SETTLED}
        if missing and all(_stamp(files[name]) == stamps[name] for name in missing):
            user_cache.remember(kept, json.dumps(settled).encode())
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory}: {error.strerror}: give a checkpoint that can be read"
        ) from error
    lines = "".join(f"{name} {fresh[name]}\n" for name in sorted(fresh))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _stamp(path: Path) -> _Stamp:
    """What changes when a file does: its size, the times of its content and of its entry, and its inode."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _recall(path: Path) -> dict[str, tuple[_Stamp, str]]:
    """The stamps and hashes that were kept at `path`."""
    content = user_cache.recall(path)
    return {} if content is None else {name: (stamp, digest) for name, (stamp, digest) in json.loads(content).items()}


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_CHUNK):
            yield piece
