"""The table by which kernels of CPUs find the adapters of rows: LoraTable of codegen/cpu/templates/lora.h.

A KV page holds keys and values that one adapter computed, so pages tell kernels which adapter a sequence has: that of
its first page. Whoever gives a sequence its pages marks the first one (engine/scheduler.py, engine/forward.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from qcompile.artifact.hashes import listed_file
from qcompile.artifact.layout import ADAPTER_TABLE, ADAPTERS_FILE, adapters_file
from qcompile.errors import ArtifactError, UnsupportedError, UsageError, shown

if TYPE_CHECKING:
    from qcompile.runtime.loader import LoadedArtifact
    from qcompile.runtime.lora.factors import SiteFactors


class _Site(ctypes.Structure):
    """`LoraSite`: an adapter's factors in one linear."""

    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("ranks", ctypes.c_int64),
    ]


class _Table(ctypes.Structure):
    """`LoraTable`."""

    _fields_ = [("adapter", ctypes.c_void_p), ("sites", ctypes.c_void_p), ("count", ctypes.c_int64)]


class Adapters(Protocol):
    """The adapters that requests may have."""

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names in the order given."""

    def mark(self, page: int, name: str | None) -> None:
        """Note that the sequence that begins in page `page` has the adapter `name`, or none."""


class AdapterTable:
    """The adapters `named` (factors by name, None for a linear that is not changed).

    `address` is that of the model's table; the object must live as long as the model. `pages` is a ctypes array with a
    number for each page of the cache, which all ranks of a divided model share. `settle` waits until no rank runs a
    step any more: a rank may still read the numbers of a step of which rank 0 has the result.
    """

    def __init__(
        self,
        named: Mapping[str, Sequence[SiteFactors | None]],
        pages: Any,
        address: int,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._numbers = {name: number for number, name in enumerate(named, start=1)}
        self._pages, self._settle = pages, settle
        count = max((len(sites) for sites in named.values()), default=0)
        self._sites: Any = (_Site * (count * len(named)))()
        self._kept = list(named.values())
        entries = (site for sites in named.values() for site in sites)
        for entry, site in zip(self._sites, entries, strict=True):
            if site is not None:
                entry.a, entry.b, entry.blocks = site.a.data_ptr(), site.b.data_ptr(), site.blocks.ctypes.data
                entry.ranks = site.ranks
        table = _Table(ctypes.addressof(self._pages), ctypes.addressof(self._sites), count)
        ctypes.memmove(address, ctypes.addressof(table), ctypes.sizeof(table))

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names in the order given."""
        return tuple(self._numbers)

    def mark(self, page: int, name: str | None) -> None:
        """Note that the sequence that begins in page `page` has the adapter `name`, or none."""
        number = 0 if name is None else self._numbers[name]
        if self._pages[page] != number:
            if self._settle:
                self._settle()
            self._pages[page] = number


def open_table(
    artifact: LoadedArtifact,
    named: Mapping[str, Sequence[SiteFactors | None]],
    pages: Any,
    settle: Callable[[], None] | None = None,
) -> AdapterTable | None:
    """The adapters `named` for a loaded artifact, as AdapterTable describes; None if there are none."""
    if not named:
        return None
    return AdapterTable(named, pages, artifact.pointers[artifact.names.index(ADAPTER_TABLE)], settle)


class ReadAdapters(NamedTuple):
    """Adapters that requests may have, as they were read.

    named: by name, the factors in each linear that adapters may change, or in a rank's part of these linears. folders:
    the name and the folder of each, and the hash of the files in it that were read.
    """

    named: dict[str, list[SiteFactors | None]]
    folders: tuple[tuple[str, str, str], ...]


def read_same_adapters(
    root: Path, manifest: Mapping[str, Any], folders: Sequence[Sequence[str]], rank: int
) -> dict[str, list[SiteFactors | None]]:
    """The factors of rank `rank` of the adapters that rank 0 has read from `folders`, as ReadAdapters has them.

    Raises UsageError if an adapter is not the one that rank 0 has read.
    """
    read = read_adapters(root, manifest, {name: folder for name, folder, _ in folders}, rank)
    for (name, folder, digest), (*_, own) in zip(folders, read.folders, strict=True):
        if own != digest:
            raise UsageError(f"adapter {name}: {folder} has changed while the model was loaded; load it again")
    return read.named


def read_adapters(
    root: Path, manifest: Mapping[str, Any], lora: Mapping[str, str | Path], rank: int = 0
) -> ReadAdapters:
    """The adapters `lora`, folders by name, for rank `rank` of the artifact at `root`.

    Raises UsageError or UnsupportedError naming the adapter.
    """
    if not lora:
        return ReadAdapters({}, ())
    if ADAPTERS_FILE not in manifest["files"]:
        raise UnsupportedError(
            f"{root} has no places for adapters: build it with --set lora.rank=16, or merge an adapter with --lora DIR"
        )
    from qcompile.artifact.adapted import Adapted
    from qcompile.checkpoints.adapters import read_adapter
    from qcompile.runtime.lora.factors import factors

    content = listed_file(root, manifest["files"], name := adapters_file(rank))
    if content is None:
        raise ArtifactError(f"{root}: {name} is missing; build it again")
    adapted = Adapted.from_bytes(content)
    read = {name: read_adapter(Path(folder).absolute()) for name, folder in lora.items()}
    folders = tuple((name, str(adapter.directory), adapter.digest) for name, adapter in read.items())
    return ReadAdapters({name: factors(adapted, adapter) for name, adapter in read.items()}, folders)


def check_names(lora: object) -> None:
    """Raise UsageError unless `lora` maps names to folders."""
    if not isinstance(lora, Mapping) or not all(
        isinstance(name, str) and name and isinstance(folder, str | Path) for name, folder in lora.items()
    ):
        raise UsageError(f"lora must be folders of adapters by name, not {shown(lora)}")
