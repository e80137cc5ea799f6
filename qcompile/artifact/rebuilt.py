"""Kernels of an artifact that were compiled again, from its graph, to be loaded in place of the artifact's own."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qcompile
from qcompile import user_cache
from qcompile.artifact.layout import Manifest
from qcompile.errors import ArtifactError, ResourceError, UnsupportedError

_SOURCES = (".py", ".h", ".jinja")
"""Suffixes of files of the package on which a kernel may depend."""


@dataclass(frozen=True)
class RebuiltKernels:
    """Libraries to load in place of files of an artifact, by the files' names; `sealed` is its manifest's hash."""

    sealed: str
    libraries: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """A hash of the libraries, by which ranks of a divided model know that they load the same."""
        digest = hashlib.sha256()
        for name, content in sorted(self.libraries.items()):
            digest.update(name.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()

    def check(self, root: Path, manifest: Manifest, drafts: bool) -> None:
        """Raise ArtifactError for another artifact, UnsupportedError if a library that would be loaded is missing.

        drafts: whether those of the artifact are wanted.
        """
        if manifest["sha256"] != self.sealed:
            raise ArtifactError(f"{root} was replaced after its kernels were rebuilt: rebuild them again")
        check_rebuildable(root, manifest)
        # The manifest calls draft stages "levels": the format of artifacts is stable.
        stages = manifest["runtime"].get("levels") or []
        if drafts and (missing := [s["path"] for s in stages if "library" in s and s["library"] not in self.libraries]):
            raise UnsupportedError(f"{root}: kernels of {missing[0]} are not rebuilt: load without drafts (gamma 0)")


def check_rebuildable(root: Path, manifest: Manifest) -> None:
    """Raise UnsupportedError, with the reason, for an artifact of which kernels are not rebuilt."""
    if manifest["target"].get("kind", "cpu") != "cpu":
        name = manifest["target"]["name"]
        raise UnsupportedError(f"{root}: kernels are rebuilt for CPUs only, and these are for {name}")


def check_runtime(root: Path, manifest: Manifest, cache: Mapping[str, Any], weights: Mapping[str, int]) -> None:
    """Raise ArtifactError unless the manifest has what rebuilt kernels have: facts of the cache, and weights in order.

    The runtime gives kernels the memory that the manifest asks for. weights: their bytes by name. The weights of all
    ranks of a divided model have these sizes.
    """
    runtime = manifest["runtime"]
    entries = runtime["weights"]
    first, *others = runtime.get("ranks") or [range(min(len(weights), len(entries)))]
    stored = [(entries[place]["name"], entries[place]["bytes"]) for place in first]
    fits = stored == list(weights.items())
    fits = fits and all([entries[place]["bytes"] for place in each] == [*weights.values()] for each in others)
    wrong = ["its cache"] * (runtime["kv"] != cache) + ["its weights"] * (not fits)
    wrong += ["its vocabulary"] * (runtime["vocab_size"] != manifest["model"]["vocab_size"])
    if wrong:
        raise ArtifactError(f"{root}: its graph does not fit {wrong[0]}: build it again")


def recall(root: Path, manifest: Manifest) -> RebuiltKernels | None:
    """The kernels of an artifact that this version has rebuilt before; None if there are none.

    Raises UnsupportedError as `check_rebuildable` does.
    """
    check_rebuildable(root, manifest)
    kept = user_cache.recall(_place(manifest))
    return None if kept is None else _of(manifest, kept)


def recall_same(root: Path, manifest: Manifest, digest: str) -> RebuiltKernels | None:
    """The kernels that another rank has rebuilt, which have this `digest`; None if it is empty: there are none.

    Raises ResourceError if the user's cache has them no more.
    """
    if not digest:
        return None
    kernels = recall(root, manifest)
    if kernels is None or kernels.digest != digest:
        raise ResourceError(
            f"{root}: the cache {user_cache.cache_dir()} has its rebuilt kernels no more: load it again"
        )
    return kernels


def remember(manifest: Manifest, library: bytes) -> RebuiltKernels:
    """Keep the library of an artifact's model in the user's cache."""
    user_cache.remember(_place(manifest), library)
    return _of(manifest, library)


def _of(manifest: Manifest, library: bytes) -> RebuiltKernels:
    return RebuiltKernels(manifest["sha256"], {manifest["runtime"]["library"]: library})


def _place(manifest: Manifest) -> Path:
    """The cache entry of an artifact's rebuilt library. The manifest's hash covers the graph and the target."""
    key = hashlib.sha256(_source_digest() + manifest["sha256"].encode()).hexdigest()
    return user_cache.cache_dir() / f"{key}.so"


@functools.cache
def _source_digest() -> bytes:
    """A hash of the package's sources: another version may make other kernels."""
    package = Path(qcompile.__file__).parent
    digest = hashlib.sha256()
    for folder in (package, *(path for path in sorted(package.iterdir()) if path.is_symlink())):
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SOURCES:
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()
