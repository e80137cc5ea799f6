"""Rounds of speculation on a GPU: a greedy round of drafts, verification and acceptance is one graph.

What a round goes by (`state` in the plan) stays on the GPU: rounds follow each other without the host, which then reads
what each brought. A sequence that has all it may get computes on into the spare page, and gains nothing.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

from qcompile.runtime.cuda import Counts, CudaExecutor
from qcompile.runtime.cuda_driver import Driver, LaunchCall
from qcompile.runtime.executor import Rows
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.speculate import Level, note
from qcompile.runtime.speculate_host import HostSpeculator

if TYPE_CHECKING:
    from qcompile.runtime.scheduler import Request

RESULTS = 1 << 16
"""Most tokens that the rounds of a call bring, with those that were not kept."""
_GRAPHS = 32

Launches = list[tuple[str, LaunchCall]]


class State:
    """Numbers that rounds go by and what they bring: int32 on the GPU, and copies on the host, by name."""

    def __init__(self, driver: Driver, sizes: Mapping[str, int]) -> None:
        self._driver, size = driver, 4 * sum(sizes.values())
        driver.use()
        self._address = driver.allocate(size, "rounds of drafts")
        try:
            self._host_address = driver.pinned(size)
        except BaseException:
            driver.free(self._address)
            raise
        self.host: Any = (ctypes.c_int32 * (size // 4)).from_address(self._host_address)
        self._view = memoryview(self.host).cast("B").cast("i")
        self._places = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        self.addresses = {name: self._address + 4 * place for name, place in self._places.items()}
        """Where everything is on the GPU."""

    def write(self, name: str, items: Iterable[int], offset: int = 0) -> None:
        """Write numbers, from one of this name on, for `send`."""
        start, given = self._places[name] + offset, array("i", items)
        self._view[start : start + len(given)] = given

    def send(self, first: str, last: str, items: int) -> None:
        """Have all from `first` on to so many numbers of `last` copied to the GPU."""
        start, end = self._places[first], self._places[last] + items
        self._driver.use()
        self._driver.upload(self._address + 4 * start, self._host_address + 4 * start, 4 * (end - start))

    def place(self, name: str) -> int:
        """Where something is in the copies."""
        return self._places[name]

    def read(self, name: str, items: int) -> int:
        """Have so many numbers copied to the host; where they will be."""
        place = self._places[name]
        self._driver.download(self._host_address + 4 * place, self._address + 4 * place, 4 * items)
        return place

    def free(self) -> None:
        """Give the memory back."""
        self._view.release()
        self._driver.free(self._address)
        self._driver.free_pinned(self._host_address)


class Part(NamedTuple):
    """A sequence in rounds: `computed` of its tokens, all but the last, are in the verifier's cache."""

    tokens: Sequence[int]
    computed: int
    pages: Sequence[int]
    left: int
    """Tokens that it may get."""


class Brought(NamedTuple):
    """What rounds brought a sequence: its new tokens, and for each round how many those were and were drafted."""

    tokens: list[int]
    gained: list[int]
    drafted: list[int]


class CudaRounds(HostSpeculator, ABC):
    """Greedy drafts of one level for the requests of an engine, as graphs. Not safe for two threads.

    What proposes is the subclass's; `sizes` are those of the numbers that it goes by beside those of all rounds.
    """

    tells_drafted = False
    """Whether `drafted` of the state says how many tokens were; else as many as asked for, or as there was room for."""

    def __init__(self, target: CudaExecutor, level: Level, sizes: Mapping[str, int]) -> None:
        super().__init__(target, [level])
        self.verifier, self._driver = target, target.driver
        every = dict.fromkeys(("last", "place", "left", "most"), target.limits.max_tokens)
        every |= {"pair_tokens": 2 * target.limits.max_tokens, "pair_positions": 2 * target.limits.max_tokens}
        results = {"counter": 1, "gained": RESULTS, "tokens": RESULTS}
        self.state = State(target.driver, {**every, **results, **sizes})
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
        self.state.free()
        super().close()

    # ---- what proposes ------------------------------------------------------------------------

    @abstractmethod
    def begin(self, parts: Sequence[Part], ahead: int) -> Counts:
        """Send what the first drafts go by, of sequences that may move so many positions ahead; counts of launches."""

    @abstractmethod
    def proposing(self, drafting: Counts, verifying: Counts, others: Mapping[tuple[str, str], int]) -> Launches:
        """The launches that draft, in order, made ready; `others` are addresses of the state."""

    @abstractmethod
    def draft_places(self) -> dict[str, int]:
        """Addresses of what drafts go by and are, by the names of the plan."""

    def moved(self) -> tuple[int, ...]:
        """How often memory that graphs point to was given back."""
        return (self.verifier.moved,)

    # ---- rounds -------------------------------------------------------------------------------

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """The greedy tokens of so many rounds for each request, at most up to length `ends[i]`; moves `computed`.

        Beside them is how many rounds were computed: fewer where all requests have ended. Drafts and verification are
        one graph here, so its time counts as verification's.
        """
        started = time.perf_counter()
        self._catch_up(requests, gammas)
        self.caught_up = time.perf_counter() - started
        lefts = [end - len(request.tokens) for end, request in zip(ends, requests, strict=True)]
        parts = [Part(r.tokens, r.computed, r.pages, left) for r, left in zip(requests, lefts, strict=True)]
        every, rounds = self.play(parts, gammas, rounds)
        seconds = time.perf_counter() - started - self.caught_up
        for request, most, brought in zip(requests, gammas, every, strict=True):
            request.computed += len(brought.tokens)
            request.drafts.metrics.verify_seconds += seconds
            request.drafts.metrics.gamma = most
            note(request, most, *_counted(brought.gained, brought.drafted))
        return [brought.tokens for brought in every], rounds

    def play(self, parts: Sequence[Part], gammas: Sequence[int], rounds: int) -> tuple[list[Brought], int]:
        """What at most so many rounds bring each sequence, and how many were made."""
        count, rows = len(parts), max(gammas) + 1
        rounds = max(1, min(rounds, RESULTS // (count * rows)))
        ahead = max(part.left for part in parts) + rows
        verified = [Rows([part.tokens[-1]] * rows, part.computed, part.pages, rows) for part in parts]
        self._send(parts, gammas)
        graph = self._graph(self.begin(parts, ahead), self.verifier.fill(verified, ahead))
        rounds = self._replay(graph, rounds, count, rows)
        gained, tokens = self.state.read("gained", rounds * count), self.state.read("tokens", rounds * count * rows)
        made = self.state.read("drafted", rounds * count) if self.tells_drafted else 0
        self._driver.synchronize()
        host, every = self.state.host, []
        for index, part in enumerate(parts):
            taken, told = (host[at + index : at + rounds * count : count] for at in (gained, made))
            firsts = range(tokens + index * rows, tokens + rounds * count * rows, count * rows)
            each = (host[first : first + some] for first, some in zip(firsts, taken, strict=True))
            drafted = told if self.tells_drafted else _asked(taken, gammas[index], part.left)
            every.append(Brought(list(chain.from_iterable(each)), taken, drafted))
        return every, rounds

    def _send(self, parts: Sequence[Part], gammas: Sequence[int]) -> None:
        """What the rounds begin with, to the GPU."""
        self.state.write("last", (part.tokens[-1] for part in parts))
        self.state.write("place", (part.computed for part in parts))
        self.state.write("left", (part.left for part in parts))
        self.state.write("most", gammas)
        self.state.write("pair_tokens", (token for part in parts for token in part.tokens[-2:]))
        self.state.write("pair_positions", (part.computed + back for part in parts for back in (-1, 0)))
        self.state.write("counter", [0])
        self.state.send("last", "counter", 1)

    def _replay(self, graph: ctypes.c_void_p, rounds: int, count: int, rows: int) -> int:
        """Put at most so many rounds on the stream, as replays of a graph, and no more than sequences want.

        As many as are needed where all drafts are kept follow each other; then the host looks what is left. How many.
        """
        place, done = self.state.place("left"), 0
        while done < rounds and (left := max(self.state.host[place : place + count])) > 0:
            few = min(rounds - done, -(-left // rows))
            for _ in range(few):
                self._driver.replay(graph)
            done += few
            if done < rounds:
                self.state.read("left", count)
                self._driver.synchronize()
        return done

    def _graph(self, drafting: Counts, verifying: Counts) -> ctypes.c_void_p:
        """A round of so many drafts."""
        key = self._key(drafting, verifying)
        if key not in self._graphs:
            calls = self._calls(drafting, verifying)  # which may move what graphs point to
            key = self._key(drafting, verifying)
            self._capture(key, calls)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _key(self, drafting: Counts, verifying: Counts) -> tuple[int, ...]:
        return (*drafting.values(), *verifying.values(), *self.moved())

    def _calls(self, drafting: Counts, verifying: Counts) -> list[LaunchCall]:
        """The launches of a round, in order."""
        others = {("state", name): address for name, address in self.state.addresses.items()}
        others |= {("draft", name): address for name, address in self.draft_places().items()}
        plan, prepare = self.verifier.plan, self.verifier.prepare
        before, after = (prepare([launch], verifying, others) for launch in plan["rounds"])
        verify = prepare(plan["launches"], verifying)
        return [call for _, call in (*self.proposing(drafting, verifying, others), *before, *verify, *after)]

    def _capture(self, key: tuple[int, ...], calls: list[LaunchCall]) -> None:
        with self._driver.captured() as result:
            for call in calls:
                call.run()
        while len(self._graphs) >= _GRAPHS:
            self._driver.synchronize()
            self._driver.drop(self._graphs.popitem(last=False)[1])
        self._graphs[key] = result[0]


def _asked(gained: Sequence[int], most: int, left: int) -> list[int]:
    """Tokens drafted in rounds that gained so many each, where `left` were allowed before the first."""
    before = accumulate(gained, initial=0)
    return [max(0, min(most, left - came - 1)) for came, _ in zip(before, gained, strict=False)]


def _counted(gained: Sequence[int], drafted: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """Of rounds that gained something: how many, and tokens drafted and kept by their place."""
    every, kept = [0] * (MOST_DRAFTS + 1), [0] * (MOST_DRAFTS + 1)  # rounds by how many
    for taken, made in zip(gained, drafted, strict=True):
        if taken:
            every[made] += 1
            kept[taken - 1] += 1
    return sum(every), _beyond(every), _beyond(kept)


def _beyond(counts: Sequence[int]) -> list[int]:
    """How many are larger than each place, where `counts[n]` are n."""
    return [*accumulate(reversed(counts))][-2::-1]
