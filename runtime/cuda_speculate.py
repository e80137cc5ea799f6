"""Speculation on a GPU: a greedy round of drafts, verification and acceptance is one graph.

Where the path that drafts shares the target's cache, both are at the same position when a round begins. A cache of the
draft's own lacks one token then, or two where all drafts were kept: its first step always takes both, which gives the
one that was there the same bits again. What a round goes by (`state` in the plan) stays on the GPU: rounds follow each
other without the host, which then reads what each brought. A sequence that has all it may get computes on into the
spare page, and gains nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from qcompile.runtime import gamma
from qcompile.runtime.cuda import Counts, CudaExecutor, attention_counts
from qcompile.runtime.cuda_driver import Driver, LaunchCall
from qcompile.runtime.executor import Rows
from qcompile.runtime.speculate import Level
from qcompile.runtime.speculate_host import HostSpeculator

if TYPE_CHECKING:
    from qcompile.runtime.scheduler import Request

_RESULTS = 1 << 16
_GRAPHS = 32


class _State:
    """Numbers that rounds go by and what they bring: int32 on the GPU, and copies on the host, by name."""

    def __init__(self, driver: Driver, sizes: Mapping[str, int]) -> None:
        self._driver, size = driver, 4 * sum(sizes.values())
        driver.use()
        self._address = driver.allocate(size, "rounds of drafts")
        self._host_address = driver.pinned(size)
        self.host: Any = (ctypes.c_int32 * (size // 4)).from_address(self._host_address)
        self._places = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))

    @property
    def addresses(self) -> dict[str, int]:
        """Where everything is on the GPU."""
        return {name: self._address + 4 * place for name, place in self._places.items()}

    def send(self, values: Mapping[str, Sequence[int]]) -> None:
        """Write these and have all from the first to the last of them copied to the GPU."""
        places = [self._places[name] for name in values]
        for place, items in zip(places, values.values(), strict=True):
            self.host[place : place + len(items)] = items
        first, end = min(places), max(place + len(items) for place, items in zip(places, values.values(), strict=True))
        self._driver.use()
        self._driver.upload(self._address + 4 * first, self._host_address + 4 * first, 4 * (end - first))

    def read(self, name: str, items: int) -> int:
        """Have so many items of a result copied to the host; where they will be."""
        place = self._places[name]
        self._driver.download(self._host_address + 4 * place, self._address + 4 * place, 4 * items)
        return place

    def free(self) -> None:
        """Give the memory back."""
        self._driver.free(self._address)
        self._driver.free_pinned(self._host_address)


class CudaSpeculator(HostSpeculator):
    """Greedy drafts of one model for the requests of an engine, as graphs. Not safe for two threads.

    The model works in the target's cache or in one of its own, and drafts without a threshold.
    """

    most_lag = 1

    def __init__(self, target: CudaExecutor, level: Level) -> None:
        super().__init__(target, [level])
        assert isinstance(level.executor, CudaExecutor) and not level.threshold
        self.draft, self._verify, self._driver = level.executor, target, target.driver
        most = target.limits.max_tokens
        sizes = dict.fromkeys(("last", "place", "left", "most"), most) | {"pair_tokens": 2 * most}
        sizes |= {"pair_positions": 2 * most, "counter": 1}
        pairs: dict[str, Sequence[int]] = {"row_sequence": [i // 2 for i in range(2 * most)]}
        pairs |= {"output_rows": range(1, 2 * most, 2), "query_start": range(0, 2 * most + 1, 2)}
        sizes |= {name: len(items) for name, items in pairs.items()}
        self._state = _State(target.driver, sizes | {"gained": _RESULTS, "tokens": _RESULTS})
        self._state.send(pairs)
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
        self._state.free()
        super().close()

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """The greedy tokens of so many rounds for each request, at most up to length `ends[i]`; moves `computed`.

        Beside them is how many rounds were computed, whether requests had ended or not. Drafts and verification are
        one graph here, so its time counts as verification's. Where no token precedes the last one yet, the host asks
        for the steps of a round.
        """
        shared = self.levels[0].shares_cache
        if not (shared or all(request.computed for request in requests)):
            return super().rounds(requests, gammas, 1, ends)
        count, rows = len(requests), max(gammas) + 1
        rounds = max(1, min(rounds, _RESULTS // (count * rows)))
        started = time.perf_counter()
        self._catch_up(requests, gammas)
        self.caught_up = time.perf_counter() - started
        ahead = max(end - len(request.tokens) for end, request in zip(ends, requests, strict=True)) + rows
        drafts = [Rows(r.tokens[-1:], r.computed, r.pages, 1) for r in requests]
        verified = [Rows(r.tokens[-1:] * rows, r.computed, r.pages, rows) for r in requests]
        self._send(requests, gammas, ends)
        self._run(self.draft.fill(drafts, ahead), self._verify.fill(verified, ahead), rounds)
        gained = self._state.read("gained", rounds * count)
        tokens = self._state.read("tokens", rounds * count * rows)
        self._driver.synchronize()
        seconds = time.perf_counter() - started - self.caught_up
        found: list[list[int]] = []
        for index, request in enumerate(requests):
            taken = self._state.host[gained + index : gained + rounds * count : count]
            firsts = range(tokens + index * rows, tokens + rounds * count * rows, count * rows)
            each = (self._state.host[first : first + some] for first, some in zip(firsts, taken, strict=True))
            found.append(list(chain.from_iterable(each)))
            request.computed += len(found[index])
            if not shared:
                request.drafts.cached[0] = request.computed - 1  # at least
            request.drafts.metrics.verify_seconds += seconds
            _note(request, gammas[index], ends[index] - len(request.tokens), taken)
        return found, rounds

    def _send(self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int]) -> None:
        """What the rounds begin with, to the GPU."""
        places = [request.computed for request in requests]
        self._state.send(
            {
                "last": [request.tokens[-1] for request in requests],
                "place": places,
                "left": [end - len(request.tokens) for end, request in zip(ends, requests, strict=True)],
                "most": gammas,
                "pair_tokens": [token for request in requests for token in request.tokens[-2:]],
                "pair_positions": [position for place in places for position in (place - 1, place)],
                "counter": [0],
            }
        )

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
        others = {("state", name): address for name, address in self._state.addresses.items()}
        others |= {("draft", name): draft.place(name) for name in ("token_ids", "positions", "counter", "decoded")}
        before, after = (target.prepare([launch], verifying, others) for launch in target.plan["rounds"])
        first, each = self._drafting(drafting)
        verify = target.prepare(target.plan["launches"], verifying)
        steps = [*first, *each * (verifying["queries"] - 2), *before, *verify, *after]
        return [call for _, call in steps]

    def _drafting(self, counts: Counts) -> tuple[list[tuple[str, LaunchCall]], list[tuple[str, LaunchCall]]]:
        """The launches of the first step of drafts, and of each that follows it."""
        draft = self.draft
        steps, feedback = draft.plan["launches"], draft.plan["feedback"]
        if self.levels[0].shares_cache:
            each = draft.prepare(steps + feedback, counts)
            return each, each
        pairs = _of_pairs(draft.plan, counts)
        for sizes in (pairs, counts):  # before anything points to what grows
            draft.grow(sizes)
        state = self._state.addresses
        inputs = {("input", name): state[name] for name in ("row_sequence", "output_rows", "query_start")}
        inputs |= {("input", "token_ids"): state["pair_tokens"], ("input", "positions"): state["pair_positions"]}
        fed = draft.prepare(feedback, counts)
        return draft.prepare(steps, pairs, inputs) + fed, draft.prepare(steps, counts) + fed

    def _capture(self, key: tuple[int, ...], calls: list[LaunchCall]) -> ctypes.c_void_p:
        with self._driver.captured() as result:
            for call in calls:
                call.run()
        while len(self._graphs) >= _GRAPHS:
            self._driver.synchronize()
            self._driver.drop(self._graphs.popitem(last=False)[1])
        self._graphs[key] = result[0]
        return result[0]


def _of_pairs(plan: Mapping[str, Any], counts: Counts) -> Counts:
    """The counts of a step of the last two tokens of each sequence, from those of a step of the last ones."""
    sequences = counts["sequences"]
    own = {"tokens": 2 * sequences, "queries": 2}
    return counts | own | attention_counts(plan, counts["splits"], own["tokens"], sequences, own["queries"])


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
