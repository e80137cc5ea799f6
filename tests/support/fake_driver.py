"""A GPU's driver that only writes down what it is asked for, and a plan to run over it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qcompile.artifact.abi import GPU_ABI
from qcompile.runtime.preparations import Preparations
from qcompile.runtime.step import Limits

LIMITS = Limits(max_tokens=64, vocab=10, page_tokens=64, max_position=1024)


class FakeDriver:
    """Memory is numbers; launches, copies and graphs are lines of `log`."""

    stream = 7
    can_release = True

    def __init__(self) -> None:
        self.preparations = Preparations()
        self.log: list[Any] = []
        self.memory: dict[int, int] = {}
        self.pages: list[Any] = []
        self.events = 0
        self.passed: list[int] = []
        self.recorded: list[int] = []

    def use(self) -> None: ...

    def synchronize(self) -> None: ...

    def allocate(self, size: int, what: str) -> int:
        address = 1 << 20 if not self.memory else max(a + s for a, s in self.memory.items()) + 256
        self.memory[address] = size
        return address

    def allocate_releasable(self, size: int, what: str) -> int:
        return self.allocate(size, what)

    def free(self, address: int) -> None:
        del self.memory[address]

    def unload(self, module: str) -> None:
        self.log.append(f"unload {module}")

    def pinned(self, size: int) -> int:
        self.pages.append((ctypes.c_char * size)())
        return ctypes.addressof(self.pages[-1])

    def free_pinned(self, address: int) -> None:
        self.pages.clear()

    def upload(self, to: int, source: int, size: int, pinned: bool = True) -> None:
        self.sent, self.source = list((ctypes.c_int32 * (size // 4)).from_address(source)), source

    def download(self, to: int, source: int, size: int, pinned: bool = True) -> None: ...

    @contextmanager
    def captured(self) -> Iterator[list[Any]]:
        result: list[Any] = []
        yield result
        result.append("graph")
        self.log.append("captured")

    def launch_all(self, calls: Any) -> None:
        for call in calls:
            self.log.append((call.function, call.shape.grid, tuple(cell.value for cell in call.arguments)))

    def replay(self, graph: Any) -> None:
        self.log.append("replay")

    def drop(self, graph: Any) -> None:
        self.log.append("drop")

    def event(self) -> int:
        self.events += 1
        return self.events

    def drop_event(self, event: int) -> None:
        self.log.append("drop event")

    def record(self, event: int, in_graph: bool = False) -> None:
        if in_graph:
            self.log.append(f"record {event}")
        self.recorded.append(event)

    def wait_for(self, event: int) -> None:
        self.passed.append(event)

    def seconds_between(self, start: int, end: int) -> float:
        return 1.0 if (start, end) == (1, 2) else 10.0 * end


class FakeLaunch:
    """Stands for LaunchCall: running it writes down kernel, grid and arguments."""

    def __init__(self, driver: FakeDriver, function: Any, grid: Any, threads: int, shared: int, pre: bool, args: Any):
        self.function, self.grid, self.args, self.log = function, grid, list(args), driver.log

    def wait_for_all(self) -> None:
        self.log.append("wait")

    def run(self) -> None:
        self.log.append((self.function, tuple(self.grid), tuple(self.args)))


def variant(kernel: str, grid: list[Any], argument: dict[str, Any], most: int = 0) -> dict[str, Any]:
    """A variant of a launch; all kernels of PLAN have one argument. Names in `grid` are counts."""
    sizes = [{"count": size} if isinstance(size, str) else size for size in grid]
    return {"kernel": kernel, "grid": dict(zip("xyz", sizes, strict=True)), "args": {"a": argument}, "most": most}


TOKENS, TILES = {"kind": "count", "name": "tokens"}, {"count": "tokens", "divisor": 16}


PLAN: dict[str, Any] = {
    "abi": GPU_ABI,
    "split": 256,
    "most_queries": 16,
    "most_rows": 64,
    "group_splits": 16,
    "leaves": 4,
    "fine_splits": 0,
    "few_splits": 0,
    "shares": 132,
    "shared": False,
    "near_splits": 1,
    "arena_bytes": {"tokens": 100, "outputs": 10},
    "layer_page_bytes": [512, 512],
    "slot_bytes": 0,
    "text_tokens": 4096,
    "weights": 1,
    "peaks": {"memory_gb_s": 1, "int8_gops": 2, "f32_gflops": 3, "bf16_gflops": 4},
    "scratch": {"parts": {"bytes": 8, "counts": ["tokens", "merged"]}},
    "kernels": {
        k: {"threads": 32, "shared_bytes": 0, "prelaunch": False, "arguments": ["a"]}
        for k in ("few", "many", "split", "next", "follow")
    },
    "launches": [
        {
            "name": "gemm",
            "by": "tokens",
            "variants": [
                variant("few", [TILES, 3, 1], TOKENS, 4),
                variant("many", [TILES, 3, 1], {"kind": "weight", "name": "w"}),
            ],
        },
        {
            "name": "split",
            "by": "queries",
            "variants": [variant("split", ["splits", 1, "sequences"], {"kind": "cache", "layer": 1}, 16)],
        },
        {
            "name": "head",
            "by": "outputs",
            "variants": [
                variant("few", ["outputs", 1, 1], {"kind": "activation", "rows": "tokens", "bytes_per_row": 4})
            ],
        },
    ],
    "feedback": [
        {"name": "next", "by": "tokens", "variants": [variant("next", [1, 1, 1], {"kind": "scratch", "name": "parts"})]}
    ],
    "follow": [{"name": "follow", "by": "tokens", "variants": [variant("follow", [1, 1, 1], TOKENS)]}],
}
