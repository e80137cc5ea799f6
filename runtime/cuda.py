"""Runs an artifact's GPU plan: the same interface as `executor.Executor`, over the CUDA driver.

The plan (kernels/<target>/*.plan.json) lists the launches of a step; codegen/gpu_launches.py has its words. Steps of
few rows a sequence become CUDA graphs by their counts; the longest context counts by powers of two of pages.
"""

from __future__ import annotations

import ctypes
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qcompile.errors import ArtifactError, ResourceError, UsageError
from qcompile.runtime.cuda_driver import Driver, LaunchCall
from qcompile.runtime.cuda_profile import LaunchTimes
from qcompile.runtime.executor import FloatArray, Limits, Rows
from qcompile.runtime.outputs import MOST_DRAFTS

GPU_ABI = 13
_GRAPHS = 64
_FEWEST_PAGES = 8
_DECODED = 1 << 16
_ROWS = 64

Counts = dict[str, int]


class CudaExecutor:
    """One opened model on a GPU. `step` and `decode` block until the GPU is done; not safe for two threads.

    `plan` is the parsed plan, `functions` its kernels by label, `weights` addresses on the GPU by name. A path that
    drafts works in the cache of the one it drafts for, `leader`, or with `own_cache` in one of its own, of as many
    pages. Raises ResourceError when memory is short.
    """

    threads = 0

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
        self._rows = -(-limits.max_tokens // _ROWS) * _ROWS
        self._owned: list[int] = []
        self._work: dict[str, tuple[int, int]] = dict.fromkeys(plan["work"], (0, 0))
        self._graphs: OrderedDict[tuple[Any, ...], ctypes.c_void_p] = OrderedDict()
        self._modules: list[ctypes.c_void_p] = []
        self._kept: dict[int, tuple[LaunchCall, list[tuple[int, str]]]] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._profile: LaunchTimes | None = None
        self.description = {"calls": [launch["name"] for launch in plan["launches"]], "weights": plan["weights"]}
        self.reallocations = 0
        """How often memory that graphs point to was given back."""
        self._closed = False
        self._host_address = 0
        try:
            self._allocate(leader, own_cache)
        except BaseException:
            self.close()
            raise

    # ---- memory -------------------------------------------------------------------------------

    def adopt(self, addresses: Iterable[int], modules: Iterable[ctypes.c_void_p] = ()) -> None:
        """Free this memory, which weights are in, and unload these modules of kernels when the model is closed."""
        self._owned += addresses
        self._modules += modules

    def _own(self, size: int, what: str) -> int:
        address = self.driver.allocate(size, what)
        self._owned.append(address)
        return address

    def _allocate(self, leader: CudaExecutor | None, own_cache: bool) -> None:
        rows, plan, limits = self._rows, self.plan, self.limits
        self.driver.use()
        self._arena = {name: self._own(rows * size, "activations") for name, size in plan["arena_bytes"].items()}
        # A page more than there are, or two, for what is computed beyond a sequence's end and forgotten.
        self._ring_entries = 2 * limits.ring_tokens // limits.page_tokens
        self._layer_bytes = (self.kv_pages + 1 + (self._ring_entries > 0)) * plan["layer_page_bytes"]
        cache = plan["layers"] * self._layer_bytes
        self._kv: int = leader._kv if leader and not own_cache else self._own(cache, "the KV cache")
        self._most_pages = _power(limits.pages_for(limits.max_position + MOST_DRAFTS))
        names = ("counter", "token_ids", "positions", "row_sequence", "output_rows", "query_start")
        self._places = {name: i * (rows + 4) for i, name in enumerate(names)}
        header = len(names) * (rows + 4)
        self._places["block_table"] = header
        items = header + rows * self._most_pages
        self._inputs = self._own(4 * items, "inputs")
        self._host_address = self.driver.pinned(4 * items)
        self._host: Any = (ctypes.c_int32 * items).from_address(self._host_address)
        self._results = {name: self._own(4 * n, "results") for name, n in (("argmax", rows), ("decoded", _DECODED))}
        shared = leader._results["logits"] if leader and leader.limits.vocab == limits.vocab else 0
        self._results["logits"] = shared or self._own(4 * rows * limits.vocab, "logits")
        self._argmax: Any = (ctypes.c_int32 * rows)()
        self._decoded: Any = (ctypes.c_int32 * _DECODED)()
        self._logits: FloatArray = np.empty((rows, limits.vocab), np.float32)

    def grow(self, counts: Counts) -> None:
        """Have scratch memory large enough for these counts."""
        for name, (size, over) in self.plan["work"].items():
            need = size * math.prod(self._rows if c == "outputs" else counts[c] for c in over)
            address, have = self._work[name]
            if have >= need:
                continue
            if address:
                self.driver.synchronize()
                self._forget()  # graphs and launches hold the old address
                self._work[name] = (0, 0)  # also where there is no memory for the new
                self.driver.free(address)
            self._work[name] = (self.driver.allocate(need, f"scratch memory ({name})"), need)

    def _forget(self) -> None:
        self.reallocations += 1
        for graph in self._graphs.values():
            self.driver.drop(graph)
        self._graphs.clear()
        self._kept.clear()
        if self._profile:
            self._profile.forget()

    # ---- a step -------------------------------------------------------------------------------

    def fill(self, sequences: Sequence[Rows], ahead: int = 0) -> Counts:
        """Write the rows into the inputs and send them; the step's counts.

        They may move so many positions `ahead` before they are filled in anew; past a sequence's pages its keys and
        values go to spare pages: those of a ring to another than what is rounded, as codes read as bf16 may be NaN,
        which beside a weight of 0 would reach rows that see none of it.
        """
        if self._closed:
            raise UsageError("the model is closed: load it again")
        self.driver.use()
        need = [self.limits.pages_for(rows.start + len(rows.tokens) + ahead) if ahead else 0 for rows in sequences]
        pages = max(*need, *(len(rows.pages) for rows in sequences))
        stride = min(max(_power(pages), _FEWEST_PAGES), self._most_pages)
        host, place = self._host, self._places
        at = outputs = 0
        host[place["counter"]] = 0
        host[place["query_start"]] = 0
        for index, rows in enumerate(sequences):
            count = len(rows.tokens)
            end = at + count
            host[place["token_ids"] + at : place["token_ids"] + end] = rows.tokens
            host[place["positions"] + at : place["positions"] + end] = range(rows.start, rows.start + count)
            host[place["row_sequence"] + at : place["row_sequence"] + end] = [index] * count
            first = place["block_table"] + index * stride
            host[first : first + len(rows.pages)] = rows.pages
            for entry in range(len(rows.pages), need[index]):
                host[first + entry] = self.kv_pages + (0 < self._ring_entries <= entry)
            if rows.outputs:
                first = place["output_rows"] + outputs
                host[first : first + rows.outputs] = range(end - rows.outputs, end)
                outputs += rows.outputs
            at = end
            host[place["query_start"] + index + 1] = at
        used = place["block_table"] + len(sequences) * stride
        self.driver.upload(self._inputs, self._host_address, 4 * used)
        plan, queries = self.plan, max(len(rows.tokens) for rows in sequences)
        splits = -(-min(_eighths(pages), stride) * self.limits.page_tokens // plan["split"])
        return {
            "tokens": at,
            "outputs": outputs,
            "sequences": len(sequences),
            "queries": queries,
            "splits": splits,
            "table_stride": stride,
            **attention_counts(plan, splits, at, len(sequences), queries),
        }

    def prepare(
        self, launches: list[dict[str, Any]], counts: Counts, others: Mapping[tuple[str, str], int] | None = None
    ) -> list[tuple[str, LaunchCall]]:
        """The launches of a step with these counts, by name, made ready.

        `others` are addresses that are not this executor's, by the words of the plan.
        """
        self.grow(counts)
        found = _chosen(launches, counts)
        return [(launch["name"], self._call(variant, counts, others or {})) for launch, variant in found]

    def _call(self, variant: dict[str, Any], counts: Counts, others: Mapping[tuple[str, str], int]) -> LaunchCall:
        kernel = self.plan["kernels"][variant["kernel"]]
        arguments = [self._argument(ref, counts, others) for ref in variant["args"]]
        how = (kernel["threads"], kernel["shared_bytes"], kernel["prelaunch"])
        function = self._functions[variant["kernel"]]
        return LaunchCall(self.driver, function, _grid(variant, counts), *how, arguments)

    def _launch(self, launches: list[dict[str, Any]], counts: Counts) -> None:
        """Put a step on the stream launch by launch: the GPU is at work on one while the next is made ready.

        What does not change from step to step is kept.
        """
        self.grow(counts)
        for _, variant in _chosen(launches, counts):
            kept = self._kept.get(id(variant))
            if kept:
                call, changing = kept
                call.change(_grid(variant, counts), [(place, counts[name]) for place, name in changing])
            else:
                call = self._call(variant, counts, {})
                changing = [(i, what) for i, (space, what, *_) in enumerate(variant["args"]) if space == "count"]
                self._kept[id(variant)] = call, changing
            call.run()

    def _argument(self, ref: list[Any], counts: Counts, others: Mapping[tuple[str, str], int]) -> int:
        space, what, *offset = ref
        if space == "count":
            return counts[what]
        if space in ("tokens", "outputs"):
            return self._arena[space] + self._rows * what + sum(offset)
        if space == "weight":
            return self._weights[what]
        if space == "kv":
            return self._kv + what * self._layer_bytes
        if space == "work":
            return self._work[what][0]
        return others[space, what] if (space, what) in others else self.place(what)

    def place(self, name: str) -> int:
        """Address of a step's input or result."""
        return self._inputs + 4 * self._places[name] if name in self._places else self._results[name]

    def _run(self, counts: Counts, feed_back: bool, times: int = 1) -> None:
        """Put `times` steps on the stream: a graph where it will be used again, else launch by launch."""
        key = (*counts.values(), feed_back)
        graph = self._graphs.get(key)
        again = times > 1 or key in self._seen
        short = counts["queries"] <= self.plan["most_queries"]  # long steps have any counts: few come again
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
        while len(self._graphs) >= _GRAPHS:
            self.driver.synchronize()
            self.driver.drop(self._graphs.popitem(last=False)[1])
        self._graphs[key] = result[0]
        return result[0]

    def step(self, sequences: Sequence[Rows], logits: bool) -> tuple[list[int], FloatArray | None]:
        """Run one step over at most `max_tokens` rows.

        Returns the argmax of every output row, and its logits [outputs, vocab] if asked: a view that the
        next call overwrites.
        """
        counts = self.fill(sequences)
        self._run(counts, feed_back=False)
        outputs = counts["outputs"]
        if outputs:
            self.driver.download(ctypes.addressof(self._argmax), self._results["argmax"], 4 * outputs)
        if outputs and logits:
            size = 4 * self.limits.vocab * outputs
            self.driver.download(self._logits.ctypes.data, self._results["logits"], size)
        self.driver.synchronize()
        return self._argmax[:outputs], self._logits[:outputs] if logits else None

    def decode(self, sequences: Sequence[Rows], steps: int) -> list[int]:
        """`steps` greedy tokens for each sequence (one row each), fed back on the GPU.

        The pages must have room for all of them. Returns [steps, sequences] flattened.
        """
        counts = self.fill(sequences, steps)
        each = max(1, min(steps, _DECODED // counts["tokens"]))
        found: list[int] = []
        while len(found) < steps * counts["tokens"]:
            times = min(each, steps - len(found) // counts["tokens"])
            if found:  # the counter starts over; tokens and positions are where the last steps left them
                self.driver.upload(self._inputs, self._host_address, 4)
            self._run(counts, feed_back=True, times=times)
            total = times * counts["tokens"]
            self.driver.download(ctypes.addressof(self._decoded), self._results["decoded"], 4 * total)
            self.driver.synchronize()
            found += self._decoded[:total]
        return found

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
        """A ceiling of this GPU by data sheet: 0 memory GB/s, 1 int8 GOPS, 2 f32 GFLOPS, 3 bf16 GFLOPS."""
        return float(self.plan["peaks"][what])

    def close(self) -> None:
        """Free the GPU's memory; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.driver.use()
        self.driver.synchronize()
        self._forget()
        for address in (*self._owned, *(address for address, _ in self._work.values() if address)):
            self.driver.free(address)
        for module in self._modules:
            self.driver.unload(module)
        if self._host_address:
            self.driver.free_pinned(self._host_address)


def attention_counts(plan: Mapping[str, Any], splits: int, tokens: int, sequences: int, queries: int) -> dict[str, int]:
    """The counts that attention's launches go by (codegen/gpu_plan.py), of contexts of `splits` splits at most."""
    decode = queries <= plan["most_queries"]
    fine = decode and splits * sequences <= plan["fine_splits"]
    few = fine and splits * sequences <= plan["few_splits"]
    merged = splits if decode else 0
    groups = -(-merged // plan["group_splits"]) if merged > plan["group_splits"] else 0
    slots = merged * (plan["leaves"] if fine else 1)
    return {
        "few": queries if few else 0,
        "fine": queries if fine and not few else 0,
        "coarse": 0 if fine else queries,
        "merged": 0 if fine else merged,
        "groups": 0 if fine else groups,
        "fine_merged": merged if fine else 0,
        "fine_groups": groups if fine else 0,
        "decode_tokens": tokens if decode else 0,
        "other_tokens": 0 if decode else tokens,
        "slots": slots,
        "shares": min(slots, max(1, plan["shares"] // (sequences if plan["shared"] else 1))),
    }


def _chosen(launches: list[dict[str, Any]], counts: Counts) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Launches that have something to do, each with its variant for as many rows."""
    for launch in launches:
        count = counts[launch["by"]]
        variant = next((v for v in launch["variants"] if not v["most"] or count <= v["most"]), None)
        if variant is not None and count and variant["kernel"]:
            yield launch, variant


def _grid(variant: dict[str, Any], counts: Counts) -> list[int]:
    return [_size(size, counts) for size in variant["grid"]]


def _size(size: Any, counts: Counts) -> int:
    if isinstance(size, list):
        count, divisor, times, plus = (*size, 1, 0)[:4]
        return -(-counts[count] // divisor) * times + plus
    return counts[size] if isinstance(size, str) else int(size)


def _power(value: int) -> int:
    """The least power of two that is at least `value`."""
    return 1 << (max(value, 1) - 1).bit_length()


def _eighths(value: int) -> int:
    """`value` rounded up to eighths of a power of two, so that graphs are few and their grids not much too large."""
    step = max(_power(value) // 8, _FEWEST_PAGES)
    return -(-value // step) * step


def kv_pages(free: int, page_bytes: int, most: int, share: float) -> int:
    """Pages that fit into `share` of `free` bytes, at most `most`. ResourceError when not one does."""
    pages = min(most, int(free * share) // page_bytes)
    if pages < 1:
        raise ResourceError(f"no GPU memory for one KV page of {page_bytes:,} bytes")
    return pages
