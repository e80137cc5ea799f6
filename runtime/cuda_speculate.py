"""Speculation on a GPU: a greedy round of drafts, verification and acceptance is one graph.

The path that drafts shares the target's cache, so both are at the same position when a round begins. What a round
goes by (`state` in the plan) stays on the GPU: rounds follow each other without the host, which then reads what each
brought. A sequence that has all it may get computes on into the spare page, and gains nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from qcompile.runtime import gamma
from qcompile.runtime.cuda import Counts, CudaExecutor
from qcompile.runtime.cuda_driver import LaunchCall
from qcompile.runtime.executor import Rows
from qcompile.runtime.speculate import Level, Speculator

if TYPE_CHECKING:
    from qcompile.runtime.scheduler import Request

_RESULTS = 1 << 16
_GRAPHS = 32
_INPUTS = ("last", "place", "left", "most", "counter")


class CudaSpeculator(Speculator):
    """Drafts of an artifact's own path for the requests of an engine. Not safe for two threads."""

    def __init__(self, target: CudaExecutor, draft: CudaExecutor, gamma: int, threshold: float = 0.0) -> None:
        executors: tuple[Any, Any] = target, draft  # with the methods that the base calls
        self.target, drafting = executors
        self.levels = (Level(drafting, gamma, True, threshold=threshold),)
        self.draft, self._verify = draft, target
        self.max_position = draft.limits.max_position
        self._most = target.limits.max_tokens
        driver = target.driver
        self._driver = driver
        driver.use()
        sizes = dict.fromkeys(_INPUTS, self._most) | {"gained": _RESULTS, "tokens": _RESULTS}
        self._state = driver.allocate(4 * sum(sizes.values()), "rounds of drafts")
        self._host_address = driver.pinned(4 * sum(sizes.values()))
        self._host: Any = (ctypes.c_int32 * sum(sizes.values())).from_address(self._host_address)
        starts = accumulate(sizes.values(), initial=0)
        self._places = dict(zip(sizes, starts, strict=False))
        self._graphs: OrderedDict[tuple[Any, ...], ctypes.c_void_p] = OrderedDict()
        self._closed = False

    def close(self) -> None:
        """Free what rounds took, and the path that drafts; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._driver.use()
        self._driver.synchronize()
        for graph in self._graphs.values():
            self._driver.drop(graph)
        self._driver.free(self._state)
        self._driver.free_pinned(self._host_address)
        self.draft.close()

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """At most `gammas[i]` drafts for `requests[i]`, all decoding, with pages for them."""
        started = time.perf_counter()
        rows = [Rows(request.tokens[-1:], request.computed, request.pages, 1) for request in requests]
        tokens = self.draft.decode(rows, max(gammas))
        for request in requests:
            request.drafts.metrics.draft_seconds += time.perf_counter() - started
        return [tokens[i :: len(requests)][:most] for i, most in enumerate(gammas)]

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """The greedy tokens of so many rounds for each request, at most up to length `ends[i]`; moves `computed`.

        Beside them is how many rounds were computed, whether requests had ended or not. Drafts and verification are
        one graph here, so its time counts as verification's.
        """
        count, rows = len(requests), max(gammas) + 1
        rounds = max(1, min(rounds, _RESULTS // (count * rows)))
        started = time.perf_counter()
        ahead = max(end - len(request.tokens) for end, request in zip(ends, requests, strict=True)) + rows
        drafts = [Rows(r.tokens[-1:], r.computed, r.pages, 1) for r in requests]
        verified = [Rows(r.tokens[-1:] * rows, r.computed, r.pages, rows) for r in requests]
        self._send(requests, gammas, ends)
        self._run(self.draft.fill(drafts, ahead), self._verify.fill(verified, ahead), rounds)
        gained = self._read("gained", rounds * count)
        tokens = self._read("tokens", rounds * count * rows)
        self._driver.synchronize()
        seconds = time.perf_counter() - started
        found: list[list[int]] = []
        for index, request in enumerate(requests):
            taken = self._host[gained + index : gained + rounds * count : count]
            firsts = range(tokens + index * rows, tokens + rounds * count * rows, count * rows)
            each = (self._host[first : first + some] for first, some in zip(firsts, taken, strict=True))
            found.append(list(chain.from_iterable(each)))
            request.computed += len(found[index])
            request.drafts.metrics.verify_seconds += seconds
            _note(request, gammas[index], ends[index] - len(request.tokens), taken)
        return found, rounds

    def _send(self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int]) -> None:
        """What the rounds begin with, to the GPU."""
        host = self._host
        values = {
            "last": [request.tokens[-1] for request in requests],
            "place": [request.computed for request in requests],
            "left": [end - len(request.tokens) for end, request in zip(ends, requests, strict=True)],
            "most": list(gammas),
            "counter": [0],
        }
        for name, items in values.items():
            host[self._places[name] : self._places[name] + len(items)] = items
        self._driver.use()
        self._driver.upload(self._state, self._host_address, 4 * (self._places["counter"] + 1))

    def _read(self, name: str, items: int) -> int:
        """Have so many items of a result copied to the host; where they will be."""
        place = self._places[name]
        self._driver.download(self._host_address + 4 * place, self._state + 4 * place, 4 * items)
        return place

    def _run(self, drafting: Counts, verifying: Counts, rounds: int) -> None:
        """Put rounds on the stream, as replays of one graph."""
        graph = self._graphs.get(self._key(drafting, verifying))
        if graph is None:
            calls = self._calls(drafting, verifying)  # which may move what graphs point to
            graph = self._capture(self._key(drafting, verifying), calls)
        for _ in range(rounds):
            self._driver.replay(graph)

    def _key(self, drafting: Counts, verifying: Counts) -> tuple[int, ...]:
        return (*drafting.values(), *verifying.values(), self.draft.moved, self._verify.moved)

    def _calls(self, drafting: Counts, verifying: Counts) -> list[LaunchCall]:
        """The launches of a round, in order."""
        draft, target = self.draft, self._verify
        others = {("state", name): self._state + 4 * place for name, place in self._places.items()}
        others |= {("draft", name): draft.place(name) for name in ("token_ids", "positions", "counter", "decoded")}
        before, after = (target.prepare([launch], verifying, others) for launch in target.plan["rounds"])
        each = draft.prepare(draft.plan["launches"] + draft.plan["feedback"], drafting)
        verify = target.prepare(target.plan["launches"], verifying)
        steps = [*each * (verifying["queries"] - 1), *before, *verify, *after]
        return [call for _, call in steps]

    def _capture(self, key: tuple[int, ...], calls: list[LaunchCall]) -> ctypes.c_void_p:
        with self._driver.captured() as result:
            for call in calls:
                call.run()
        while len(self._graphs) >= _GRAPHS:
            self._driver.synchronize()
            self._driver.drop(self._graphs.popitem(last=False)[1])
        self._graphs[key] = result[0]
        return result[0]


def _note(request: Request, most: int, left: int, gained: Sequence[int]) -> None:
    """Note rounds of at most `most` drafts that gained so many tokens each, of `left` that the request might get."""
    kept = missed = 0
    for taken in gained:
        if taken:
            drafted = min(most, left - 1)
            request.drafts.metrics.count(drafted, taken - 1)
            kept += taken - 1
            missed += taken <= drafted
            left -= taken
    request.drafts.metrics.gamma = most
    if most:
        gamma.observe(request, kept, missed)
