"""The memory of an opened model on a GPU: activations, KV cache, scratch memory, results, and pinned host numbers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from qcompile.errors import ResourceError
from qcompile.runtime.cuda.counts import Counts
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.step import Limits

MOST_DECODED = 1 << 16
"""Most tokens that a multi-step decode leaves on the GPU before the host reads them."""
_ROW_ALIGNMENT = 64
"""Buffers have room for a multiple of this number of rows."""
_HANDLED = 1 << 21
"""Memory that other processes open takes whole pages of a GPU, which it shares with no other."""
_TILE_ROWS = 256
"""Most rows of a GEMM's tile: scratch memory by row has room for whole tiles."""


@dataclass(frozen=True)
class Scratch:
    """Scratch memory of `bytes` at `address`; 0 for both before it is first needed."""

    address: int = 0
    bytes: int = 0


class DeviceMemory:
    """Allocations of one executor. `rows` and `outputs`: the rows, and those with logits, that buffers have room for.

    A draft path that uses the cache of the path that it drafts for has the same `cache`, and owns none. Raises
    ResourceError when memory is short; `free` then frees what was allocated.
    """

    def __init__(self, driver: Driver, plan: Mapping[str, Any], limits: Limits, kv_pages: int) -> None:
        self._driver, self._plan, self._limits = driver, plan, limits
        self.rows = _aligned(limits.max_tokens)
        self.outputs = _aligned(limits.max_outputs)
        self._room = {"tokens": self.rows, "outputs": self.outputs}
        self.ring_entries = 2 * limits.ring_tokens // limits.page_tokens
        """Leading entries of a sequence's pages that hold the ring of a hierarchical cache."""
        # One spare page, or two with a ring, for keys and values computed past a sequence's end, which are discarded.
        pages = kv_pages + 1 + (self.ring_entries > 0)
        self.layer_places = [pages * each for each in accumulate(plan["layer_page_bytes"], initial=0)]
        """Where the cache of each layer begins, in bytes, and where the last one ends."""
        self.cache = 0
        self.states = 0
        """Address of the slots of recurrent states."""
        self.scratch: dict[str, Scratch] = dict.fromkeys(plan["scratch"], Scratch())
        self.results: dict[str, int] = {}
        """Addresses of a step's results: `argmax`, `decoded` and `logits`."""
        self.rank, self.peers = 0, list[int]()
        """Of a divided model, the number of this process and the peer memory of each (codegen/gpu/peer_memory.py)."""
        self.peer_memory = 0
        """The address of this process's peer memory, if the model is divided."""
        self.caches: list[int] = []
        """Addresses of caches and states, which a model that sleeps gives back: its own, and those of paths that draft
        for it."""
        self._arenas: dict[str, int] = {}
        self._owned: list[int] = []

    def allocate(self, size: int, what: str) -> int:
        """The address of `size` bytes, which `free` frees. `what` names them in an error."""
        address = self._driver.allocate(size, what)
        self._owned.append(address)
        return address

    def _allocate_cache(self, size: int, what: str) -> int:
        """As `allocate`, in memory that a model that sleeps gives back."""
        address = self._driver.allocate_releasable(size, what)
        self._owned.append(address)
        self.caches.append(address)
        return address

    def adopt(self, addresses: Iterable[int]) -> None:
        """Take ownership of memory that was allocated elsewhere."""
        self._owned += addresses

    def allocate_activations(self) -> None:
        """Allocate the arenas of activations."""
        for name, size in self._plan["arena_bytes"].items():
            self._arenas[name] = self.allocate(self._room[name] * size, "activations")

    def allocate_cache(self, shared: int = 0) -> None:
        """Allocate the KV cache, or use the one at `shared`; none if there is no attention."""
        if size := self.layer_places[-1]:
            self.cache = shared or self._allocate_cache(size, "the KV cache")

    def allocate_states(self, slots: int, shared: int = 0) -> None:
        """Allocate `slots` slots of recurrent states, or use those at `shared`; none if the path has no states."""
        if size := slots * self._plan["slot_bytes"]:
            self.states = shared or self._allocate_cache(size, "recurrent states")

    def allocate_results(self, shared_logits: int = 0) -> None:
        """Allocate the results of steps; logits may be shared with another path, or are where ranks gather them."""
        for name, count in (("argmax", self.outputs), ("decoded", MOST_DECODED)):
            self.results[name] = self.allocate(4 * count, "results")
        size, sums = 4 * self.outputs * self._limits.vocab, self._plan.get("sums")
        if sums:
            self.results["sums"] = self.allocate(sums["state"], "sums")
            self.peer_memory = self.allocate(peer_bytes(sums, self.rows), "sums of GPUs")
            self._driver.synchronize()  # zeroing, which must not come after what others write
        if sums and "logits" in sums:
            shared_logits = self.peer_memory + sums["logits"]
        self.results["logits"] = shared_logits or self.allocate(size, "logits")

    def activation(self, operand: Mapping[str, Any]) -> int:
        """The address of an activation, as a launch plan describes it."""
        start = self._arenas[operand["rows"]] + self._room[operand["rows"]] * operand["bytes_per_row"]
        return int(start + operand.get("column_bytes", 0))

    def peer(self, of: int | None) -> int:
        """The address of the peer memory of a rank, or of this one's own."""
        return self.peers[self.rank if of is None else of]

    def layer(self, layer: int) -> int:
        """The address of the cache of a layer."""
        return self.cache + self.layer_places[layer]

    def lacking(self, counts: Counts) -> dict[str, int]:
        """The bytes of each scratch memory that is too small for a step with these counts, by name."""
        needed = {}
        room = counts | {"outputs": self.outputs, "room": _aligned(self.rows, _TILE_ROWS)}
        for name, size in self._plan["scratch"].items():
            need = size["bytes"] * math.prod(room[count] for count in size["counts"])
            if self.scratch[name].bytes < need:
                needed[name] = need
        return needed

    def replace_scratch(self, name: str, size: int) -> None:
        """Give scratch memory `name` another place of `size` bytes. Nothing that knows the old place may run."""
        if old := self.scratch[name].address:
            self.scratch[name] = Scratch()  # stays valid if the allocation below fails
            self._driver.free(old)
        self.scratch[name] = Scratch(self._driver.allocate(size, f"scratch memory ({name})"), size)

    def free(self) -> None:
        """Free all memory."""
        for address in (*self._owned, *(scratch.address for scratch in self.scratch.values() if scratch.address)):
            self._driver.free(address)


class PinnedNumbers:
    """Int32 numbers in pinned host memory, for copies to or from the GPU."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._address = driver, 0
        self._copied: Any = None

    def open(self, items: int) -> None:
        """Allocate memory for `items` numbers."""
        self._copied = self._driver.event()
        self._address = self._driver.pinned(4 * items)
        self._numbers: Any = (ctypes.c_int32 * items).from_address(self._address)

    def begin(self) -> Any:
        """The numbers, after the last copy."""
        self._driver.wait_for(self._copied)
        return self._numbers

    def send(self, to: int, items: int) -> None:
        """Queue a copy of the first `items` numbers to the GPU."""
        self._driver.upload(to, self._address, 4 * items)
        self._driver.record(self._copied)

    def fetch(self, source: int, items: int) -> None:
        """Queue a copy of `items` numbers from the GPU to the first ones."""
        if items:
            self._driver.download(self._address, source, 4 * items)
        self._driver.record(self._copied)

    def receive(self, content: memoryview, to: int) -> None:
        """Take numbers that another process has prepared, and queue their copy to the GPU."""
        self.begin()
        memoryview(self._numbers).cast("B")[: len(content)] = content
        self.send(to, len(content) // 4)

    def content(self, items: int) -> memoryview:
        """The bytes of the first `items` numbers."""
        return memoryview(self._numbers).cast("B")[: 4 * items]

    def free(self) -> None:
        """Free the memory."""
        if self._copied is not None:
            self._driver.drop_event(self._copied)
        if self._address:
            self._driver.free_pinned(self._address)


class MirroredNumbers:
    """Memory of `items` numbers of `size` bytes on the GPU, with a copy in pinned host memory."""

    def __init__(self, driver: Driver, items: int, size: int, what: str) -> None:
        self._driver, self._size, self.items = driver, size, items
        driver.use()
        self.address = driver.allocate(size * items, what)
        try:
            self.host_address = driver.pinned(size * items)
        except BaseException:
            driver.free(self.address)
            raise

    def send(self, items: int) -> None:
        """Queue a copy of the first numbers to the GPU."""
        self._driver.use()
        self._driver.upload(self.address, self.host_address, self._size * items)

    def content(self, items: int) -> memoryview:
        """The bytes of the first `items` numbers in host memory."""
        memory: Any = (ctypes.c_char * (self._size * items)).from_address(self.host_address)
        return memoryview(memory).cast("B")

    def fetch(self, items: int) -> None:
        """Queue a copy of the first numbers to the host."""
        self._driver.use()
        self._driver.download(self.host_address, self.address, self._size * items)

    def free(self) -> None:
        """Free the memory on both sides."""
        self._driver.free(self.address)
        self._driver.free_pinned(self.host_address)


def _aligned(rows: int, to: int = _ROW_ALIGNMENT) -> int:
    """`rows` rounded up to as many as buffers have room for."""
    return -(-rows // to) * to


def peer_bytes(sums: Mapping[str, int], rows: int) -> int:
    """Bytes of peer memory for steps of `rows` rows; `sums` is part of a launch plan."""
    groups = -(-_aligned(rows) // sums["ranks"])
    return _aligned(sums["data"] + groups * sums["group"], _HANDLED)


def activation_bytes(plan: Mapping[str, Any], limits: Limits) -> int:
    """Bytes of an executor's buffers: activations, logits, and scratch memory of the largest steps."""
    rows, outputs = _aligned(limits.max_tokens), _aligned(limits.max_outputs)
    scratch = (size["bytes"] for size in plan["scratch"].values() if size["counts"] in (["tokens"], ["room"]))
    of_rows, of_outputs = plan["arena_bytes"]["tokens"] + sum(scratch), plan["arena_bytes"]["outputs"]
    return int(rows * of_rows + outputs * (of_outputs + 4 * limits.vocab)) + _unpacked_bytes(plan, limits)


def _unpacked_bytes(plan: Mapping[str, Any], limits: Limits) -> int:
    """Bytes for the pages that are unpacked before attention of prompts; none if steps have too few rows for that."""
    pages = plan.get("unpacked_pages", 0)
    if not pages or limits.max_tokens < plan["unpacked_rows"]:
        return 0
    return int(pages * sum(size["bytes"] for size in plan["scratch"].values() if "unpacked_room" in size["counts"]))


def pages_in(free: int, page_bytes: int, most: int, share: float) -> int:
    """KV pages that fit into `share` of `free` bytes, at most `most`. Raises ResourceError when not one fits."""
    pages = min(most, int(free * share) // page_bytes) if page_bytes else most  # without attention, pages are empty
    if pages < 1:
        raise ResourceError(f"no GPU memory for one KV page of {page_bytes:,} bytes")
    return pages
