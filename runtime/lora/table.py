"""The table by which kernels of CPUs find the adapters of rows: LoraTable of codegen/cpu/templates/lora.h.

A KV page holds keys and values that one adapter computed, so pages tell kernels which adapter a sequence has: that of
its first page. Whoever gives a sequence its pages marks the first one (engine/scheduler.py, engine/forward.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qcompile.artifact.hashes import listed_file
from qcompile.artifact.layout import ADAPTER_TABLE, ADAPTERS_FILE
from qcompile.errors import UnsupportedError, UsageError, shown

if TYPE_CHECKING:
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
    """The adapters `named` (factors by name, None for a linear that is not changed), for a cache of `pages` pages.

    `address` is that of the model's table; the object must live as long as the model.
    """

    def __init__(self, named: Mapping[str, Sequence[SiteFactors | None]], pages: int, address: int) -> None:
        self._numbers = {name: number for number, name in enumerate(named, start=1)}
        self._pages: Any = (ctypes.c_int32 * pages)()
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
        self._pages[page] = 0 if name is None else self._numbers[name]


def open_table(
    root: Path, manifest: Mapping[str, Any], lora: Mapping[str, str | Path], pointers: Any, pages: int
) -> AdapterTable | None:
    """The adapters `lora`, folders by name, for the artifact at `root`; None if none are given.

    `pointers` are the addresses of the artifact's weights. Raises UsageError or UnsupportedError naming the adapter.
    """
    named = read_factors(root, manifest, lora)
    names = [entry["name"] for entry in manifest["runtime"]["weights"]]
    return AdapterTable(named, pages, pointers[names.index(ADAPTER_TABLE)]) if named else None


def read_factors(
    root: Path, manifest: Mapping[str, Any], lora: Mapping[str, str | Path]
) -> dict[str, list[SiteFactors | None]]:
    """By name: the factors of the adapters `lora` in each linear of the artifact at `root` that adapters may change.

    Raises UsageError or UnsupportedError naming the adapter.
    """
    if not lora:
        return {}
    if ADAPTERS_FILE not in manifest["files"]:
        raise UnsupportedError(
            f"{root} has no places for adapters: build it with --set lora.rank=16, or merge an adapter with --lora DIR"
        )
    from qcompile.artifact.adapted import Adapted
    from qcompile.checkpoints.adapters import read_adapter
    from qcompile.runtime.lora.factors import factors

    content = listed_file(root, manifest["files"], ADAPTERS_FILE)
    assert content is not None
    adapted = Adapted.from_bytes(content)
    return {name: factors(adapted, read_adapter(Path(folder))) for name, folder in lora.items()}


def check_names(lora: object) -> None:
    """Raise UsageError unless `lora` maps names to folders."""
    if not isinstance(lora, Mapping) or not all(
        isinstance(name, str) and name and isinstance(folder, str | Path) for name, folder in lora.items()
    ):
        raise UsageError(f"lora must be folders of adapters by name, not {shown(lora)}")
