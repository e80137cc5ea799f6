"""Gives the memory of a CPU model's weights and caches back to the system, and reads the weights again."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from qcompile.artifact.layout import ADAPTER_TABLE, ADAPTER_TABLE_BYTES
from qcompile.runtime.loader import Arena, LoadedArtifact, read_weights


class CpuMemory:
    """The weights of `artifact` and the arenas of its caches, as `runtime.engine.sleep.ReleasableMemory`.

    Weights are read from the artifact again, so both levels are the same: to keep a copy in memory would free none.
    """

    def __init__(self, artifact: LoadedArtifact, caches: Sequence[Arena]) -> None:
        self._artifact = replace(artifact, root=artifact.root.absolute())  # the working directory may change
        self._caches = tuple({cache.address: cache for cache in caches}.values())
        # What loading has written over the weights that were read: the table of adapters.
        self._written = [
            (address, ADAPTER_TABLE_BYTES)
            for address, name in zip(artifact.pointers, artifact.names, strict=True)
            if name == ADAPTER_TABLE
        ]
        self._contents: list[bytes] = []

    def release(self, level: int) -> None:
        """Give all pages back; they read as zeros."""
        self._contents = [ctypes.string_at(address, size) for address, size in self._written]
        for arena in (self._artifact.weights, *self._caches):
            arena.release(0, arena.size)

    def restore(self) -> None:
        """Read and verify the weights. The caches take memory when they are used."""
        read_weights(self._artifact)
        for (address, _), content in zip(self._written, self._contents, strict=True):
            ctypes.memmove(address, content, len(content))
