"""Adapters of requests on a GPU: their factors, and which adapter each sequence has (codegen/gpu/lora.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from qcompile.runtime.cuda.driver import Driver

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 256
"""Bytes to a multiple of which each array of factors begins."""


class Factors(Protocol):
    """An adapter's factors in one linear, as runtime/lora/factors.py lays them out."""

    @property
    def a(self) -> Tensor: ...
    @property
    def b(self) -> Tensor: ...
    @property
    def blocks(self) -> np.ndarray[Any, Any]: ...
    @property
    def ranks(self) -> int: ...


Sites = Sequence[Factors | None]


def plan_for(plan: dict[str, Any], named: Mapping[str, Sites] | None) -> dict[str, Any]:
    """A launch plan without the launches of linears that none of the adapters `named` changes: these would do nothing.

    PEFT's default, query and value alone, changes one of the four linears of most layers.
    """
    if not named:
        return plan
    changed = {number for sites in named.values() for number, site in enumerate(sites) if site is not None}
    return plan | {"launches": [each for each in plan["launches"] if each.get("site") in {None, *changed}]}


class NamedFactors(Protocol):
    """Adapters that requests may have, as runtime/lora/table.py has read them."""

    @property
    def named(self) -> Mapping[str, Sites]:
        """By name: the factors in each linear, or in a rank's part of it."""

    @property
    def folders(self) -> Sequence[Sequence[str]]:
        """The name and the folder of each, and the hash of its files."""


class DeviceAdapters:
    """The adapters `named` (factors by name, None for a linear that is not changed), copied to a GPU.

    `table` is the address of the weight ADAPTER_TABLE there. Allocations are added to `held`. Raises ResourceError.
    """

    def __init__(self, driver: Driver, named: Mapping[str, Sites], table: int, held: list[int]) -> None:
        self._numbers = {name: number for number, name in enumerate(named, start=1)}
        self._by_page: dict[int, int] = {}
        entries = np.stack([_sent(driver, sites, held) for sites in named.values()])  # [adapters, sites, 4]
        held.append(driver.allocate(entries.nbytes, "adapters"))
        facts = np.array([0, held[-1], entries.shape[1]], np.int64)
        for address, content in ((held[-1], entries), (table, facts)):
            driver.upload(address, content.ctypes.data, content.nbytes, pinned=False)
        driver.synchronize()

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names in the order given."""
        return tuple(self._numbers)

    def mark(self, page: int, name: str | None) -> None:
        """Note that the sequence that begins in page `page` has the adapter `name`, or none."""
        self._by_page[page] = 0 if name is None else self._numbers[name]

    def number(self, page: int) -> int:
        """The number, from 1 on, of the adapter of the sequence that begins in page `page`; 0 if it has none."""
        return self._by_page.get(page, 0)


def _sent(driver: Driver, sites: Sites, held: list[int]) -> np.ndarray[Any, Any]:
    """Copy an adapter's factors to the GPU; for each site the addresses of A, B and B's blocks, and the ranks."""
    entries = np.zeros((len(sites), 4), np.int64)
    parts: list[bytes] = []
    end = 0
    for entry, site in zip(entries, sites, strict=True):
        if site is None:
            continue
        for column, content in enumerate((_bytes(site.a), _bytes(site.b), site.blocks.tobytes())):
            size = -(-len(content) // _ALIGNMENT) * _ALIGNMENT
            parts.append(content.ljust(size, b"\0"))
            entry[column], end = end, end + size
        entry[3] = site.ranks
    host = np.frombuffer(b"".join(parts) or bytes(_ALIGNMENT), np.uint8)
    held.append(driver.allocate(host.nbytes, "adapters"))
    driver.upload(held[-1], host.ctypes.data, host.nbytes, pinned=False)
    driver.synchronize()
    entries[:, :3] += held[-1]
    return entries


def _bytes(tensor: Tensor) -> bytes:
    """The content of a contiguous tensor."""
    import torch

    content: bytes = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return content
