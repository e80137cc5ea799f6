"""What every part of an artifact's code must agree on: names, format version, canonical JSON, and the manifest's hash.

An artifact is a directory with `qcompile.json` (the manifest) and the files that the manifest lists. The manifest
contains every file's SHA-256 and its own: it is canonical JSON, so a reader serializes what it parsed and compares
bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from qcompile.errors import ArtifactError, ResourceError

FORMAT_VERSION = 1
MANIFEST = "qcompile.json"
SIGNATURE = "qcompile.sig"
"""The signature over the manifest (artifact/signature.py). It is made after the manifest, which does not list it."""
AMENDED, SIGNED = f".{MANIFEST}.new", f".{SIGNATURE}.new"
"""Names of an amended manifest and of a signature while they are being written. A killed `amend` or `sign` leaves it,
and the next overwrites it."""
ADAPTERS_FILE, ADAPTER_TABLE = "adapters.safetensors", "lora.table"
"""The file about linears that adapters may change (artifact/adapted.py), and the weight by which kernels find adapters,
of ADAPTER_TABLE_BYTES bytes, to which the runtime writes (runtime/lora/table.py)."""
ADAPTER_TABLE_BYTES = 64


def adapters_file(rank: int) -> str:
    """The name of ADAPTERS_FILE of a rank of a divided model."""
    return f"{ADAPTERS_FILE.removesuffix('.safetensors')}-{rank:05}.safetensors" if rank else ADAPTERS_FILE


CONFIG_FILE = "source/config.json"
"""The configuration of the checkpoint, for exports. It is in a folder, as a folder with config.json is a checkpoint."""
PASSES_FILE = "passes.json"
UNSEALED = (PASSES_FILE,)
"""Files about a particular build, such as its times: they differ between builds, so no hash covers them."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}

Manifest = dict[str, Any]


def canonical_json(value: object) -> bytes:
    """The only JSON encoding of this format: equal values give equal bytes."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def seal(manifest: Manifest) -> str:
    """SHA-256 of the manifest without its own hash."""
    return hashlib.sha256(canonical_json({k: v for k, v in manifest.items() if k != "sha256"})).hexdigest()


@contextmanager
def disk_errors(path: Path, instead: str = "choose another directory") -> Iterator[None]:
    """Report disk errors in one line with the path and the reason; `instead` is the advice for read-only places."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(f"no space left on the disk for {path}: free some space") from error
        if error.errno in _READ_ONLY:
            raise ResourceError(f"cannot write {path}: {error.strerror}; {instead}") from error
        raise ResourceError(f"cannot write {path}: {error.strerror or error}") from error


def fsync_directory(path: Path) -> None:
    """Write a directory's entries to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def relative(name: str) -> PurePosixPath:
    """`name` as a path inside the artifact. Raises ArtifactError if it leads outside."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or str(path) != name:
        raise ArtifactError(f"file name {name!r} leaves the artifact")
    return path
