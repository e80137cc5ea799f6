"""Launches a step's kernels: one by one, as a CUDA graph, or with the time of each launch measured."""

from __future__ import annotations

import ctypes
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from qcompile.runtime.cuda.counts import PARTS, Counts, active_launches, grid
from qcompile.runtime.cuda.driver import Driver, LaunchCall, SharedCall
from qcompile.runtime.cuda.memory import DeviceMemory
from qcompile.runtime.cuda.profile import LaunchTimes
from qcompile.runtime.cuda.program import LaunchProgram

_MAX_GRAPHS = 64
GRAPH_FROM = 6
"""Steps with the same counts before a graph is captured, which takes 2.1 to 2.5 times as long as to queue one step
(benchmarks/gpu_serving.py). While requests come and go, few counts come again, and the host queues launches while the
GPU computes those before: graphs of all counts that came twice were captured four times as often."""
_MOST_SEEN = 4096
"""Most counts that are remembered without a graph."""
_WHOLE, _BEFORE_MASKS, _FROM_MASKS, BEFORE_HEAD = PARTS
Addresses = Mapping[tuple[str, str], int]
"""Addresses by kind and name of an operand (codegen/gpu/operands.py)."""


class Launcher:
    """The kernels of a launch plan, and the graphs made of them.

    `functions` are the kernels by label, `weights` addresses on the GPU by name, and `address_of` returns the address
    of a step's input or result.
    """

    def __init__(
        self,
        driver: Driver,
        plan: dict[str, Any],
        functions: Mapping[str, int],
        weights: Mapping[str, int],
        memory: DeviceMemory,
        address_of: Callable[[str], int],
    ) -> None:
        self._driver, self._plan, self.functions, self._weights = driver, plan, functions, weights
        self._memory, self._address_of = memory, address_of
        self.graphs: OrderedDict[tuple[Any, ...], ctypes.c_void_p] = OrderedDict()
        self._programs: dict[int, tuple[list[dict[str, Any]], LaunchProgram]] = {}  # by the id of their launches
        self._parts: dict[tuple[int, bool, str], list[dict[str, Any]]] = {}
        self._seen: dict[tuple[Any, ...], int] = {}  # steps queued launch by launch, by their counts
        self.profile: LaunchTimes | None = None
        self.published: Callable[[Counts, bool, str, int], None] | None = None
        """Called with what runs, before it is queued: what the other processes of a divided model repeat."""
        self.reallocations = 0
        """How often memory that graphs point to was freed."""

    def time(self, on: bool) -> None:
        """Start (resetting the times) or stop measuring the time of each launch."""
        if self.profile:
            self.profile.forget()
        self.profile = LaunchTimes(self._driver) if on else None

    def grow(self, counts: Counts) -> None:
        """Make the scratch memory large enough for these counts."""
        for name, size in self._memory.lacking(counts).items():
            if self._memory.scratch[name].address:
                self.forget()
            self._memory.replace_scratch(name, size)

    def forget(self) -> None:
        """Wait for the GPU and drop all graphs and prepared launches, before memory that they point to is freed."""
        self._driver.synchronize()
        self.reallocations += 1
        for graph in self.graphs.values():
            self._driver.drop(graph)
        self.graphs.clear()
        self._programs.clear()
        if self.profile:
            self.profile.forget()

    def run(self, counts: Counts, feed_back: bool, times: int = 1, masks: Callable[[], object] | None = None) -> None:
        """Queue `times` steps: as a graph if these counts were seen often enough (GRAPH_FROM), else launch by launch.

        masks: called when all launches before those that read masks are queued, to write the masks of a single step.
        """
        if masks is None:
            self.run_part(counts, feed_back, _WHOLE, times)
        else:
            self.run_in_parts(counts, feed_back, masks)()

    def run_in_parts(self, counts: Counts, feed_back: bool, masks: Callable[[], object]) -> Callable[[], None]:
        """Queue the launches of a step before those that read masks. Returns what calls `masks` and queues the rest."""
        self.run_part(counts, feed_back, _BEFORE_MASKS, 1)

        def rest() -> None:
            masks()
            self.run_part(counts, feed_back, _FROM_MASKS, 1)

        return rest

    def run_part(self, counts: Counts, feed_back: bool, part: str, times: int) -> None:
        """`run` for a part of the launches."""
        if self.published:
            self.published(counts, feed_back, part, times)
        key = (*counts.values(), feed_back, part)
        graph = self.graphs.get(key)
        seen = self._seen.get(key, 0) + times
        short = counts["queries"] <= self._plan["most_queries"]  # counts of long steps rarely repeat
        if graph is None and seen >= GRAPH_FROM and short and self.profile is None:
            self._seen.pop(key, None)
            graph = self._capture(key, counts, self._launches(feed_back, part))
        if graph is not None and self.profile is None:
            self.graphs.move_to_end(key)
            for _ in range(times):
                self._driver.replay(graph)
            return
        if short:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = seen
        for _ in range(times):
            if self.profile is None:
                self.launch(self._launches(feed_back, part), counts)
            else:
                self.profile.run(key, lambda: self.prepare(self._launches(feed_back, part), counts))

    def _launches(self, feed_back: bool, part: str) -> list[dict[str, Any]]:
        """The launches of a part of a step."""
        launches: list[dict[str, Any]] = self._plan["launches"]
        key = id(launches), feed_back, part
        if key not in self._parts:
            self._parts[key] = self._part(launches, feed_back, part)
        return self._parts[key]

    def _part(self, launches: list[dict[str, Any]], feed_back: bool, part: str) -> list[dict[str, Any]]:
        if part == BEFORE_HEAD:
            return launches[: [launch["name"] for launch in launches].index(self._plan["hidden"]["before"])]
        first = next((i for i, launch in enumerate(launches) if launch["by"] == "masked"), len(launches))
        if part == _BEFORE_MASKS:
            return launches[:first]
        rest = launches[first:] if part == _FROM_MASKS else launches
        return rest + (self._plan["feedback"] if feed_back else [])

    def _capture(self, key: tuple[Any, ...], counts: Counts, launches: list[dict[str, Any]]) -> ctypes.c_void_p:
        with self._driver.preparations.noted():
            ready = self._shared(launches, counts)
            with self._driver.captured() as result:
                self._driver.launch_all(ready)
        while len(self.graphs) >= _MAX_GRAPHS:
            self._driver.synchronize()
            self._driver.drop(self.graphs.popitem(last=False)[1])
        self.graphs[key] = result[0]
        return result[0]

    def prepare(
        self, launches: list[dict[str, Any]], counts: Counts, others: Addresses | None = None
    ) -> list[tuple[str, LaunchCall]]:
        """Prepare the launches of a step with these counts. Returns them with their names.

        `others` are addresses that are not this executor's own.
        """
        self.grow(counts)
        active = active_launches(launches, counts)
        return [(launch["name"], self._call(variant, counts, others or {})) for launch, variant in active]

    def launch(self, launches: list[dict[str, Any]], counts: Counts) -> None:
        """Queue a step launch by launch."""
        self._driver.launch_all(self._shared(launches, counts))

    def _shared(self, launches: list[dict[str, Any]], counts: Counts) -> list[SharedCall]:
        """The launches of a step with these counts, prepared for all steps; valid until the next call."""
        self.grow(counts)
        kept = self._programs.get(id(launches))
        if kept is None:

            def argument_of(operand: dict[str, Any], counts: Counts) -> int:
                return self._argument(operand, counts, {})

            kernels, stream = self._plan["kernels"], self._driver.stream
            kept = launches, LaunchProgram(launches, kernels, self.functions, argument_of, stream)
            self._programs[id(launches)] = kept
        return kept[1].calls(counts)

    def _call(self, variant: dict[str, Any], counts: Counts, others: Addresses) -> LaunchCall:
        kernel = self._plan["kernels"][variant["kernel"]]
        arguments = [self._argument(variant["args"][name], counts, others) for name in kernel["arguments"]]
        how = (kernel["threads"], kernel["shared_bytes"], kernel["prelaunch"])
        return LaunchCall(self._driver, self.functions[variant["kernel"]], grid(variant, counts), *how, arguments)

    def _argument(self, operand: dict[str, Any], counts: Counts, others: Addresses) -> int:
        """The value of an operand (codegen/gpu/operands.py)."""
        kind = operand["kind"]
        if kind == "number":
            return int(operand["value"])
        if kind == "cache":
            return self._memory.layer(operand["layer"])
        if kind == "slots":
            return self._memory.states
        if kind == "activation":
            return self._memory.activation(operand)
        if kind in ("peer", "rank"):
            return self._memory.peer(operand.get("of")) if kind == "peer" else self._memory.rank
        name, past = operand["name"], operand.get("past")
        if kind == "count":
            return counts[name]
        if kind == "weight":
            return self._weights[name]
        if kind == "scratch":
            return self._memory.scratch[name].address
        if (kind, name) in others:
            return others[kind, name]
        return self._address_of(name) + (4 * math.prod(counts[each] for each in past) if past else 0)
