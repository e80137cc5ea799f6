"""A checkpoint in which some tensors stand for others: a layer's names then read the tensors of a module like it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import Checkpoint, require_finite

Result = TypeVar("Result")


class RenamedCheckpoint(Checkpoint):
    """The checkpoint `inner`, in which the tensor with a name of `sources` is the one that `sources` has for it."""

    def __init__(self, inner: Checkpoint, sources: Mapping[str, str]) -> None:
        # Not the base's: the headers have been read.
        self.inner, self.sources = inner, dict(sources)
        self.directory, self.kinds, self.values_read = inner.directory, inner.kinds, False
        self.entries = {name: inner.entries[self.sources.get(name, name)] for name in inner.entries}
        self._read: set[str] = set()

    def raw(self, name: str) -> Tensor:
        self.values_read = True
        self._read.add(name)
        return self.inner.raw(self.sources.get(name, name))

    def load(self, name: str) -> Tensor:
        """As for any checkpoint; an error has the name by which the tensor is stored."""
        value = self.raw(name).to(torch.float32)
        require_finite(self.sources.get(name, name), value)
        return value

    def in_few_bits(self, name: str) -> bool:
        return self.inner.in_few_bits(self.sources.get(name, name))

    def of_linear(self, name: str) -> bool:
        return self.inner.of_linear(self.sources.get(name, name))

    def stored_type(self, name: str) -> torch.dtype | None:
        return self.inner.stored_type(self.sources.get(name, name))

    def read_by(self, compute: Callable[[], object]) -> set[str]:
        """The names of the tensors of which `compute` reads the values."""
        kept, self._read = self._read, set()
        try:
            compute()
            return self._read
        finally:
            self._read = kept

    def instead(self, name: str, source: str, compute: Callable[[], Result]) -> Result:
        """What `compute` gives where `name` is the tensor `source`."""
        kept = dict(self.sources)
        self.sources[name] = source
        try:
            return compute()
        finally:
            self.sources = kept
