"""Read an artifact: parse and check its manifest, and verify its files."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from qcompile.artifact.hashes import file_problem
from qcompile.artifact.layout import (
    AMENDED,
    FORMAT_VERSION,
    MANIFEST,
    SIGNATURE,
    SIGNED,
    UNSEALED,
    Manifest,
    canonical_json,
    relative,
    seal,
)
from qcompile.artifact.manifest import SHAPE, check_manifest, check_shape
from qcompile.artifact.plain_files import read_plain
from qcompile.errors import ArtifactError, UsageError


def read_manifest(path: str | Path) -> Manifest:
    """Parse and check `qcompile.json` of the artifact at `path`.

    Raises UsageError if there is no such directory, ArtifactError if the manifest is missing, damaged or of another
    format version.
    """
    root = Path(path)
    if not stat.S_ISDIR(_status(root).st_mode):
        raise UsageError(f"{root}: no such artifact directory")
    try:
        raw = read_plain(root / MANIFEST, within=root)
    except FileNotFoundError:
        model = (root / "config.json").exists()
        hint = ": this is a model, make an artifact of it with `qcompile build`" if model else ""
        raise ArtifactError(f"{root}: not an artifact (no {MANIFEST}){hint}") from None
    except OSError as error:
        raise ArtifactError(f"{root}: cannot read {MANIFEST}: {error.strerror}") from error
    return parse_manifest(root, raw)


def read_checked_manifest(path: str | Path) -> Manifest:
    """`read_manifest`, with every key checked that loading, inspecting and running use. Raises the same errors."""
    manifest = read_manifest(path)
    check_manifest(manifest, str(Path(path) / MANIFEST))
    return manifest


def read_same_manifest(path: str | Path, sealed: str) -> Manifest:
    """`read_checked_manifest` in another process, which must read the one with the hash `sealed`, as the first did.

    Raises ArtifactError if the artifact was replaced or amended in the meantime.
    """
    manifest = read_checked_manifest(path)
    if manifest["sha256"] != sealed:
        raise ArtifactError(f"{path} was replaced while it was loaded: load it again")
    return manifest


def parse_manifest(root: Path, raw: bytes) -> Manifest:
    """The manifest with the bytes `raw`, after checking it; errors name `root`."""
    damaged = ArtifactError(f"{root}: {MANIFEST} is damaged; build the artifact again")
    try:
        manifest = json.loads(raw)
        intact = isinstance(manifest, dict) and canonical_json(manifest) == raw
    except (ValueError, RecursionError):
        raise damaged from None
    if not intact or manifest.get("sha256") != seal(manifest):
        raise damaged
    if manifest.get("format_version") != FORMAT_VERSION:
        version = manifest.get("format_version")
        raise ArtifactError(f"{root}: artifact format {version}, this qcompile reads {FORMAT_VERSION}; rebuild it")
    checked: Manifest = manifest
    check_shape(checked, {"files": SHAPE["files"]}, str(root / MANIFEST))
    for name in checked["files"]:
        relative(name)
    return checked


def state(path: str | Path) -> tuple[int, ...]:
    """A state that changes when another artifact replaces the one at `path`, or its manifest is amended.

    Problems reported between two equal states belong to one artifact. Raises UsageError if there is none.
    """
    status = _status(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _status(path: str | Path) -> os.stat_result:
    """os.stat of `path`. Raises UsageError if it does not exist or cannot be read."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path}: no such artifact directory") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: give another path") from error


def verify(path: str | Path) -> list[str]:
    """All problems of the artifact at `path`, one line each; an empty list means that every bit is as built."""
    return examine(path)[1]


def examine(path: str | Path) -> tuple[Manifest | None, list[str]]:
    """The manifest of the artifact at `path`, None if it is damaged, and all problems of its files, one line each."""
    root = Path(path)
    while True:
        before = state(root)
        manifest = None
        try:
            manifest = read_manifest(root)
            problems = _problems(root, manifest["files"])
        except ArtifactError as error:
            problems = [str(error)]
        if not problems or state(root) == before:
            return manifest, problems


def unlisted_files(root: Path, files: dict[str, Any]) -> list[str]:
    """Files of the artifact at `root` that its manifest, which lists `files`, does not list. Nothing reads them."""
    present = {str(PurePosixPath(at, name).relative_to(root)) for at, _, names in os.walk(root) for name in names}
    return sorted(present - {*files, MANIFEST, *UNSEALED, AMENDED, SIGNATURE, SIGNED})


def _problems(root: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """Unlisted files at `root`, and problems with those listed in `files`."""
    problems = [f"{name}: not in the manifest" for name in unlisted_files(root, files)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(lambda item: file_problem(root, item[0], item[1]), sorted(files.items()))
        problems += [problem for problem in results if problem]
    return problems
