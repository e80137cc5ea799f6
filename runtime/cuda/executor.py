"""Runs an artifact's GPU plan over the CUDA driver, with the interface of `executor.Executor`.

The plan (kernels/<target>/*.plan.json) lists the launches of a step; codegen/gpu/launches.py describes its format.
Steps of few rows per sequence become CUDA graphs, one for each combination of counts. The pages of the longest context
are rounded up in these counts, so that few graphs suffice.
"""

from __future__ import annotations

import ctypes
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from qcompile.artifact.abi import GPU_ABI
from qcompile.errors import ArtifactError, ResourceError, UsageError
from qcompile.runtime.cuda.counts import (
    MIN_PAGES,
    Counts,
    active_launches,
    attention_counts,
    attention_work,
    eighths,
    grid,
    power_of_two,
)
from qcompile.runtime.cuda.draws import CudaDraws
from qcompile.runtime.cuda.driver import Driver, LaunchCall
from qcompile.runtime.cuda.profile import LaunchTimes
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.sampling.sampling import Draws, FloatArray
from qcompile.runtime.step import Limits, Rows

_MAX_GRAPHS = 64
_PEAKS = ("memory_gb_s", "int8_gops", "f32_gflops", "bf16_gflops")
"""Names of peak rates in a plan, in the order of `probe`."""
_MAX_DECODED = 1 << 16
"""Most tokens that `decode` leaves on the GPU before it reads them back."""
_ROW_ALIGNMENT = 64
"""Buffers have room for a multiple of this many rows."""


class CudaExecutor:
    """An opened model on a GPU. `step` and `decode` block until the GPU is done. Not safe for two threads.

    `plan` is the parsed plan, `functions` its kernels by label, `weights` addresses on the GPU by name. A draft path
    uses the cache of the path that it drafts for, `leader`, or with `own_cache` one of its own with as many pages.
    Raises ResourceError when memory is short.
    """

    threads, draws, overlaps = 0, True, True

    def __init__(
        self,
        driver: Driver,
        plan: dict[str, Any],
        functions: Mapping[str, int],
        weights: Mapping[str, int],
        kv_pages: int,
        limits: Limits,
        leader: CudaExecutor | None = None,
        own_cache: bool = False,
    ) -> None:
        if plan.get("abi") != GPU_ABI:
            raise ArtifactError(f"GPU plan {plan.get('abi')}, this qcompile has {GPU_ABI}: build the artifact again")
        if limits.max_tokens > plan["most_rows"]:
            raise UsageError(f"{limits.max_tokens} rows a step, the artifact's kernels take {plan['most_rows']}")
        self.driver, self.plan, self.limits, self.kv_pages = driver, plan, limits, kv_pages
        self._functions, self._weights = functions, weights
        self._rows = -(-limits.max_tokens // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self._owned: list[int] = []
        self._work: dict[str, tuple[int, int]] = dict.fromkeys(plan["scratch"], (0, 0))
        self._graphs: OrderedDict[tuple[Any, ...], ctypes.c_void_p] = OrderedDict()
        self._modules: list[ctypes.c_void_p] = []
        self._prepared: dict[int, tuple[LaunchCall, list[tuple[int, dict[str, Any]]]]] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._profile: LaunchTimes | None = None
        self.description = {"calls": [launch["name"] for launch in plan["launches"]], "weights": plan["weights"]}
        self.reallocations = 0
        """How often memory that graphs point to was freed."""
        self._closed = False
        # A step may be queued while the one before it runs: its inputs and tokens take turns in the host's memory.
        self._hosts = _HostNumbers(driver), _HostNumbers(driver)
        self._found = _HostNumbers(driver), _HostNumbers(driver)
        self._turn = 0
        self._waits: dict[int, Callable[[], list[int]]] = {}  # by turn, for the tokens of what `start` has queued
        self._draws: CudaDraws | None = None
        try:
            self._allocate(leader, own_cache)
        except BaseException:
            self.close()
            raise

    # ---- memory -------------------------------------------------------------------------------

    def adopt(self, addresses: Iterable[int], modules: Iterable[ctypes.c_void_p] = ()) -> None:
        """Take ownership of the weights' memory and of modules of kernels, to free them when the model is closed."""
        self._owned += addresses
        self._modules += modules

    def _allocate_owned(self, size: int, what: str) -> int:
        address = self.driver.allocate(size, what)
        self._owned.append(address)
        return address

    def _allocate(self, leader: CudaExecutor | None, own_cache: bool) -> None:
        rows, plan, limits = self._rows, self.plan, self.limits
        self.driver.use()
        self._arena = {
            name: self._allocate_owned(rows * size, "activations") for name, size in plan["arena_bytes"].items()
        }
        # One spare page, or two with a ring, for keys and values computed past a sequence's end, which are discarded.
        self._ring_entries = 2 * limits.ring_tokens // limits.page_tokens
        self._layer_bytes = (self.kv_pages + 1 + (self._ring_entries > 0)) * plan["layer_page_bytes"]
        cache = plan["layers"] * self._layer_bytes
        self._kv: int = leader._kv if leader and not own_cache else self._allocate_owned(cache, "the KV cache")
        self._most_pages = power_of_two(limits.pages_for(limits.max_position + MOST_DRAFTS))
        names = ("counter", "token_ids", "positions", "row_sequence", "output_rows", "query_start", "prompt_start")
        self._input_offsets = {name: i * (rows + 4) for i, name in enumerate(names)}
        header = len(names) * (rows + 4)
        self._input_offsets["block_table"] = header
        items = header + rows * self._most_pages
        self._inputs = self._allocate_owned(4 * items, "inputs")
        for inputs, found in zip(self._hosts, self._found, strict=True):
            inputs.open(items)
            found.open(max(rows, _MAX_DECODED))
        self._draws = CudaDraws(self.driver, rows)
        self._results = {
            name: self._allocate_owned(4 * n, "results") for name, n in (("argmax", rows), ("decoded", _MAX_DECODED))
        }
        shared = leader._results["logits"] if leader and leader.limits.vocab == limits.vocab else 0
        self._results["logits"] = shared or self._allocate_owned(4 * rows * limits.vocab, "logits")
        self._logits: FloatArray = np.empty((rows, limits.vocab), np.float32)

    def grow(self, counts: Counts) -> None:
        """Make the scratch memory large enough for these counts."""
        for name, size in self.plan["scratch"].items():
            need = size["bytes"] * math.prod(self._rows if c == "outputs" else counts[c] for c in size["counts"])
            address, have = self._work[name]
            if have >= need:
                continue
            if address:
                self.driver.synchronize()
                self._drop_graphs()  # graphs and launches hold the old address
                self._work[name] = (0, 0)  # stays valid if the allocation below fails
                self.driver.free(address)
            self._work[name] = (self.driver.allocate(need, f"scratch memory ({name})"), need)

    def _drop_graphs(self) -> None:
        self.reallocations += 1
        for graph in self._graphs.values():
            self.driver.drop(graph)
        self._graphs.clear()
        self._prepared.clear()
        if self._profile:
            self._profile.forget()

    # ---- a step -------------------------------------------------------------------------------

    def fill(
        self, sequences: Sequence[Rows], ahead: int = 0, draws: Sequence[Draws] = (), behind: bool = False
    ) -> Counts:
        """Write the rows into the inputs and queue their copy to the GPU. Returns the step's counts.

        Waits for what `start` has queued, or with `behind` for all but the last of that. `draws` are those of each
        sequence; without any, all are greedy. Sequences may advance `ahead` positions before the next call. Keys and
        values past a sequence's pages go to spare pages. Bf16 entries of a ring and quantized ones have different spare
        pages: codes read as bf16 may be NaN, and NaN times an attention weight of 0 would spoil rows that do not see
        those positions.
        """
        if self._closed or self._draws is None:
            raise UsageError("the model is closed: load it again")
        self._turn = 1 - self._turn
        for turn in (self._turn,) if behind else (self._turn, 1 - self._turn):
            if turn in self._waits:
                self._waits[turn]()
        self.driver.use()
        need = [self.limits.pages_for(rows.start + len(rows.tokens) + ahead) if ahead else 0 for rows in sequences]
        pages = [max(least, len(rows.pages)) for least, rows in zip(need, sequences, strict=True)]
        stride = min(max(power_of_two(max(pages)), MIN_PAGES), self._most_pages)
        lengths = [len(rows.tokens) for rows in sequences]
        decoding, prompts = attention_work(self.plan, lengths, pages, lambda count: self._splits(count, stride))
        starts = list(accumulate(lengths, initial=0))
        ends = zip(sequences, starts[1:], strict=True)
        values: dict[str, list[int]] = {
            "counter": [0],
            "token_ids": [token for rows in sequences for token in rows.tokens],
            "positions": [rows.start + i for rows, count in zip(sequences, lengths, strict=True) for i in range(count)],
            "row_sequence": [index for index, count in enumerate(lengths) for _ in range(count)],
            "output_rows": [row for rows, end in ends for row in range(end - rows.outputs, end)],
            "query_start": starts,
            "prompt_start": starts[decoding.sequences :],
        }
        inputs, offsets = self._hosts[self._turn], self._input_offsets
        host = inputs.begin()
        for name, items in values.items():
            host[offsets[name] : offsets[name] + len(items)] = items
        for first, rows, most in zip(range(offsets["block_table"], len(host), stride), sequences, need, strict=False):
            host[first : first + len(rows.pages)] = rows.pages
            for entry in range(len(rows.pages), most):
                host[first + entry] = self.kv_pages + (0 < self._ring_entries <= entry)
        used = offsets["block_table"] + len(sequences) * stride
        inputs.send(self._inputs, used)
        if self._draws.lacks_room(draws):
            self.driver.synchronize()
            self._drop_graphs()  # graphs and launches hold the old address
            self._draws.grow(draws)
        return {
            "tokens": starts[-1],
            "outputs": len(values["output_rows"]),
            "sequences": len(sequences),
            "queries": max(lengths),
            "table_stride": stride,
            **self._draws.send(draws, len(values["output_rows"])),
            **attention_counts(self.plan, decoding, prompts),
        }

    def _splits(self, pages: int, stride: int) -> int:
        """Attention splits of a context of so many pages."""
        return -(-min(eighths(pages), stride) * self.limits.page_tokens // self.plan["split"])

    def prepare(
        self, launches: list[dict[str, Any]], counts: Counts, others: Mapping[tuple[str, str], int] | None = None
    ) -> list[tuple[str, LaunchCall]]:
        """Prepare the launches of a step with these counts. Returns them with their names.

        `others` are addresses that are not this executor's own, by (space, name) as in the plan.
        """
        self.grow(counts)
        found = active_launches(launches, counts)
        return [(launch["name"], self._call(variant, counts, others or {})) for launch, variant in found]

    def _call(self, variant: dict[str, Any], counts: Counts, others: Mapping[tuple[str, str], int]) -> LaunchCall:
        kernel = self.plan["kernels"][variant["kernel"]]
        arguments = [self._argument(variant["args"][name], counts, others) for name in kernel["arguments"]]
        how = (kernel["threads"], kernel["shared_bytes"], kernel["prelaunch"])
        function = self._functions[variant["kernel"]]
        return LaunchCall(self.driver, function, grid(variant, counts), *how, arguments)

    def _launch(self, launches: list[dict[str, Any]], counts: Counts) -> None:
        """Queue a step launch by launch: while one runs on the GPU, the next is prepared.

        Prepared launches are kept, so that later steps change only grids and counts.
        """
        self.grow(counts)
        for _, variant in active_launches(launches, counts):
            kept = self._prepared.get(id(variant))
            if kept:
                call, changing = kept
                call.change(grid(variant, counts), [(i, self._argument(ref, counts, {})) for i, ref in changing])
            else:
                call = self._call(variant, counts, {})
                names = self.plan["kernels"][variant["kernel"]]["arguments"]
                operands = [variant["args"][name] for name in names]
                changing = [(i, operand) for i, operand in enumerate(operands) if _changes(operand)]
                self._prepared[id(variant)] = call, changing
            call.run()

    def _argument(self, operand: dict[str, Any], counts: Counts, others: Mapping[tuple[str, str], int]) -> int:
        """The value of an operand (codegen/gpu/operands.py); `others` are addresses by kind and name."""
        kind = operand["kind"]
        if kind == "number":
            return int(operand["value"])
        if kind == "cache":
            return int(self._kv + operand["layer"] * self._layer_bytes)
        if kind == "activation":
            start: int = self._arena[operand["rows"]] + self._rows * operand["bytes_per_row"]
            return start + int(operand.get("column_bytes", 0))
        name, past = operand["name"], operand.get("past")
        if kind == "count":
            return counts[name]
        if kind == "weight":
            return self._weights[name]
        if kind == "scratch":
            return self._work[name][0]
        if (kind, name) in others:
            return others[kind, name]
        return self.address(name) + (4 * math.prod(counts[each] for each in past) if past else 0)

    def address(self, name: str) -> int:
        """Address of a step's input or result on the GPU."""
        if self._draws and name in self._draws.addresses:
            return self._draws.addresses[name]
        return self._inputs + 4 * self._input_offsets[name] if name in self._input_offsets else self._results[name]

    def _run(self, counts: Counts, feed_back: bool, times: int = 1) -> None:
        """Queue `times` steps: as a graph if these counts were seen before or repeat now, else launch by launch."""
        key = (*counts.values(), feed_back)
        graph = self._graphs.get(key)
        again = times > 1 or key in self._seen
        short = counts["queries"] <= self.plan["most_queries"]  # counts of long steps rarely repeat
        if graph is None and again and short and self._profile is None:
            graph = self._capture(key, counts, feed_back)
        if graph is not None and self._profile is None:
            self._graphs.move_to_end(key)
            for _ in range(times):
                self.driver.replay(graph)
            return
        if short:
            self._seen.add(key)
        for _ in range(times):
            if self._profile is None:
                self._launch(self._launches(feed_back), counts)
            else:
                self._profile.run(key, lambda: self.prepare(self._launches(feed_back), counts))

    def _launches(self, feed_back: bool) -> list[dict[str, Any]]:
        return self.plan["launches"] + (self.plan["feedback"] if feed_back else [])

    def _capture(self, key: tuple[Any, ...], counts: Counts, feed_back: bool) -> ctypes.c_void_p:
        ready = self.prepare(self._launches(feed_back), counts)
        with self.driver.captured() as result:
            for _, call in ready:
                call.run()
        while len(self._graphs) >= _MAX_GRAPHS:
            self.driver.synchronize()
            self.driver.drop(self._graphs.popitem(last=False)[1])
        self._graphs[key] = result[0]
        return result[0]

    def step(
        self, sequences: Sequence[Rows], logits: bool, draws: Sequence[Draws] = ()
    ) -> tuple[list[int], FloatArray | None]:
        """Run one step over at most `max_tokens` rows.

        Returns the argmax of every output row, or its draw if its sequence has a temperature, and if asked its logits
        [outputs, vocab] (with penalties, if its sequence has any), a view that the next call overwrites.
        """
        counts = self.fill(sequences, draws=draws)
        self._run(counts, feed_back=False)
        outputs = counts["outputs"]
        if outputs and logits:
            size = 4 * self.limits.vocab * outputs
            self.driver.download(self._logits.ctypes.data, self._results["logits"], size, pinned=False)
        return self._fetch("argmax", outputs, last=True)(), self._logits[:outputs] if logits else None

    def decode(self, sequences: Sequence[Rows], steps: int, draws: Sequence[Draws] = ()) -> list[int]:
        """`steps` tokens for each sequence (one row each), fed back on the GPU.

        The pages must have room for all of them. Returns [steps, sequences], flattened.
        """
        counts = self.fill(sequences, steps, draws)
        each = max(1, min(steps, _MAX_DECODED // counts["tokens"]))
        found: list[int] = []
        while len(found) < steps * counts["tokens"]:
            times = min(each, steps - len(found) // counts["tokens"])
            if found:  # reset the counter; the GPU has updated tokens and positions itself
                self._hosts[self._turn].send(self._inputs, 1)
            self._run(counts, feed_back=True, times=times)
            last = len(found) + times * counts["tokens"] == steps * counts["tokens"]
            found += self._fetch("decoded", times * counts["tokens"], last)()
        return found

    def start(self, sequences: Sequence[Rows], steps: int, draws: Sequence[Draws] = ()) -> Callable[[], list[int]]:
        """Queue `decode`, or with one step `step`. Returns a function that waits for its tokens.

        Where a token is negative, -1 - i, a kernel replaces it by output i of what was queued before.
        """
        assert steps * len(sequences) <= _MAX_DECODED  # as all bursts of an engine are
        burst, reports = steps > 1, any(draw.reports is not None for draw in draws)
        behind = not (reports or (self._draws and self._draws.reporting))
        counts = self.fill(sequences, steps * burst, draws, behind)
        if any(token < 0 for rows in sequences for token in rows.tokens):
            self._launch(self.plan["follow"], counts)
        self._run(counts, feed_back=burst, times=steps)
        results = ("decoded", steps * counts["tokens"]) if burst else ("argmax", counts["outputs"])
        turn, fetch = self._turn, self._fetch(*results, last=True)
        tokens: list[int] | None = None

        def wait() -> list[int]:
            nonlocal tokens
            if tokens is None:
                del self._waits[turn]
                tokens = fetch()
            return tokens

        self._waits[turn] = wait
        return wait

    def _fetch(self, name: str, count: int, last: bool) -> Callable[[], list[int]]:
        """Queue a copy to the host of the first tokens of a result, and of the reports that the draws of `fill` ask for
        if this is the last copy after that. Returns a function that waits for both, and returns the tokens."""
        if last:
            self.fetch_reports()
        found = self._found[self._turn]
        found.fetch(self._results[name], count)

        def wait() -> list[int]:
            self.driver.use()
            tokens: list[int] = found.begin()[:count]
            if last:
                self.deliver_reports()
            return tokens

        return wait

    def fetch_reports(self) -> None:
        """Queue a copy to the host of the reports that the draws of the last `fill` ask for."""
        if self._draws:
            self._draws.fetch()

    def deliver_reports(self) -> None:
        """Write fetched reports into the draws, after the copy is done."""
        if self._draws:
            self._draws.deliver()

    # ---- profile ------------------------------------------------------------------------------

    def profile(self, on: bool) -> None:
        """Start (resetting the counters) or stop timing each launch."""
        if self._profile:
            self._profile.forget()
        self._profile = LaunchTimes(self.driver) if on else None

    def profile_read(self) -> dict[str, tuple[float, int]]:
        """Seconds and number of runs of each launch since `profile(True)`, in the order they run."""
        return dict(self._profile.found) if self._profile else {}

    def probe(self, what: int) -> float:
        """A peak of this GPU from its data sheet: 0 memory GB/s, 1 int8 GOPS, 2 f32 GFLOPS, 3 bf16 GFLOPS."""
        return float(self.plan["peaks"][_PEAKS[what]])

    def close(self) -> None:
        """Free the GPU's memory; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.driver.use()
        self.driver.synchronize()
        self._drop_graphs()
        for address in (*self._owned, *(address for address, _ in self._work.values() if address)):
            self.driver.free(address)
        for module in self._modules:
            self.driver.unload(module)
        if self._draws:
            self._draws.free()
        for host in (*self._hosts, *self._found):
            host.free()


class _HostNumbers:
    """Pinned memory for copies to or from the GPU: int32."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._address = driver, 0
        self._copied: Any = None

    def open(self, items: int) -> None:
        """Allocate memory for so many numbers."""
        self._copied = self._driver.event()
        self._address = self._driver.pinned(4 * items)
        self._numbers: Any = (ctypes.c_int32 * items).from_address(self._address)

    def begin(self) -> Any:
        """The numbers, after the last copy."""
        self._driver.wait_for(self._copied)
        return self._numbers

    def send(self, to: int, items: int) -> None:
        """Queue a copy of the first numbers to the GPU."""
        self._driver.upload(to, self._address, 4 * items)
        self._driver.record(self._copied)

    def fetch(self, source: int, items: int) -> None:
        """Queue a copy of so many numbers to the first ones."""
        if items:
            self._driver.download(self._address, source, 4 * items)
        self._driver.record(self._copied)

    def free(self) -> None:
        """Free the memory."""
        if self._copied is not None:
            self._driver.drop_event(self._copied)
        if self._address:
            self._driver.free_pinned(self._address)


def _changes(operand: dict[str, Any]) -> bool:
    """Whether an operand depends on the step's counts."""
    return operand["kind"] == "count" or "past" in operand


def kv_pages(free: int, page_bytes: int, most: int, share: float) -> int:
    """Pages that fit into `share` of `free` bytes, at most `most`. Raises ResourceError when not one fits."""
    pages = min(most, int(free * share) // page_bytes)
    if pages < 1:
        raise ResourceError(f"no GPU memory for one KV page of {page_bytes:,} bytes")
    return pages
