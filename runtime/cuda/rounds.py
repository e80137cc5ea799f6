"""Rounds of speculation on a GPU: drafting, verification and acceptance of a round are one CUDA graph.

The state of the rounds (`state` in the plan) stays on the GPU, so rounds follow each other without the host, which
reads the results of many rounds at once. A sequence that has reached its end is still computed in further rounds, but
gains no tokens, and keys and values past its pages go to a spare page.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from qcompile.runtime.cuda.counts import Counts
from qcompile.runtime.cuda.driver import Driver, LaunchCall
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.inputs import GREEDY, SamplingInputs
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.speculation.stages import DraftStage, note_rounds
from qcompile.runtime.step import Rows

RESULTS = 1 << 16
"""Most tokens of the rounds of one call, including the target's tokens after a rejected draft, which are discarded."""
_MAX_GRAPHS = 32

Launches = list[tuple[str, LaunchCall]]


class State:
    """Inputs and results of rounds by name: int32 arrays on the GPU, with copies in pinned host memory."""

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
        self._offsets = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        self.addresses = {name: self._address + 4 * offset for name, offset in self._offsets.items()}
        """Address of each array on the GPU."""

    def write(self, name: str, items: Iterable[int], offset: int = 0) -> None:
        """Write to the host's copy of an array, from index `offset` on; `send` copies it to the GPU."""
        start, given = self._offsets[name] + offset, array("i", items)
        self._view[start : start + len(given)] = given

    def send(self, first: str, last: str, items: int) -> None:
        """Queue a copy to the GPU of all arrays from `first` to `last`, of `last` only `items` numbers."""
        start, end = self._offsets[first], self._offsets[last] + items
        self._driver.use()
        self._driver.upload(self._address + 4 * start, self._host_address + 4 * start, 4 * (end - start))

    def offset(self, name: str) -> int:
        """Index in `host` at which an array starts."""
        return self._offsets[name]

    def read(self, name: str, items: int) -> int:
        """Queue a copy of the array's first `items` numbers to the host; returns their index in `host`."""
        start = self._offsets[name]
        self._driver.download(self._host_address + 4 * start, self._address + 4 * start, 4 * items)
        return start

    def free(self) -> None:
        """Free the memory on both sides."""
        self._view.release()
        self._driver.free(self._address)
        self._driver.free_pinned(self._host_address)


class RoundInput(NamedTuple):
    """A sequence before its rounds: `computed` of its tokens, all but the last, are in the verifier's cache."""

    tokens: Sequence[int]
    computed: int
    pages: Sequence[int]
    left: int
    """Tokens that it may still gain."""
    sampling: SamplingInputs = GREEDY
    slot: int = 0
    """Slot of its recurrent states, if a path has any."""
    gamma: int = 0
    """Most drafts of a round."""

    @property
    def certain(self) -> int:
        """Positions of the sequence that will not be taken back; 0 if it has ended and is still computed."""
        return self.computed + 1 if self.left > 0 else 0


class RoundOutput(NamedTuple):
    """A sequence's new tokens, and for each round how many tokens it gained and how many were drafted."""

    tokens: list[int]
    gained: list[int]
    drafted: list[int]


class CudaRounds(HostSpeculator, ABC):
    """Speculation with one draft stage for the requests of an engine, as graphs. Not safe for two threads.

    Requests with a temperature draw their tokens on the GPU, and those that draft use the same random numbers. The
    subclass drafts; `sizes` are those of the arrays that it adds to the state.
    """

    reports_drafted = False
    """Whether `drafted` in the state tells how many tokens were drafted. If not, it is gamma or what there was room
    for."""

    def __init__(self, target: CudaExecutor, stage: DraftStage, sizes: Mapping[str, int]) -> None:
        super().__init__(target, [stage])
        self.verifier, self._driver = target, target.driver
        rows = target.limits.max_outputs
        every = dict.fromkeys(("last", "place", "left", "most"), rows)
        every |= {"pair_tokens": 2 * rows, "pair_positions": 2 * rows}
        results = {"counter": 1, "gained": RESULTS, "tokens": RESULTS}
        self.state = State(target.driver, {**every, **results, **sizes})
        self._graphs: OrderedDict[tuple[Any, ...], ctypes.c_void_p] = OrderedDict()
        self._closed = False

    def close(self) -> None:
        """Free the graphs and the state, and close the draft path; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._driver.use()
        self._driver.synchronize()
        for graph in self._graphs.values():
            self._driver.drop(graph)
        self.state.free()
        super().close()

    # ---- drafting, by the subclass ------------------------------------------------------------

    @abstractmethod
    def send_draft_inputs(self, sequences: Sequence[RoundInput], ahead: int) -> Counts:
        """Send the inputs of the first round's drafts; sequences may advance `ahead` positions. Launch counts."""

    @abstractmethod
    def draft_launches(self, drafting: Counts, verifying: Counts, others: Mapping[tuple[str, str], int]) -> Launches:
        """The launches that draft, in order and prepared; `others` are addresses of the state."""

    @abstractmethod
    def draft_addresses(self) -> dict[str, int]:
        """Addresses of the draft path's inputs and results, by their names in the plan."""

    def reallocations(self) -> tuple[int, ...]:
        """How often each executor has freed memory that graphs point to."""
        return (self.verifier.launcher.reallocations,)

    # ---- rounds -------------------------------------------------------------------------------

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """Run up to `rounds` rounds; request i grows to at most `ends[i]` tokens. Advances `computed`.

        Returns each request's new tokens, and the number of rounds run: fewer where all requests reached their ends.
        Drafting and verification are one graph, so all of its time counts as verification.
        """
        self._note_catch_up(requests, gammas)
        started = time.perf_counter()
        lefts = [end - len(request.sequence.tokens) for end, request in zip(ends, requests, strict=True)]
        most = min(rounds * (max(gammas) + 1), RESULTS // len(requests))
        sampling = [
            r.sampler.inputs(r.sequence.computed, min(left, most)) for r, left in zip(requests, lefts, strict=True)
        ]
        sequences = [
            RoundInput(each.tokens, each.computed, each.pages, left, inputs, each.slot, gamma)
            for each, left, inputs, gamma in zip((r.sequence for r in requests), lefts, sampling, gammas, strict=True)
        ]
        outputs, rounds = self.run_rounds(sequences, gammas, rounds)
        seconds = time.perf_counter() - started
        for request, gamma, output in zip(requests, gammas, outputs, strict=True):
            request.sequence.computed += len(output.tokens)
            request.sampler.took(output.tokens)
            request.drafts.metrics.verify_seconds += seconds
            request.drafts.metrics.gamma = gamma
            note_rounds(request, gamma, *_round_counts(output.gained, output.drafted))
        return [output.tokens for output in outputs], rounds

    def run_rounds(
        self, sequences: Sequence[RoundInput], gammas: Sequence[int], rounds: int
    ) -> tuple[list[RoundOutput], int]:
        """Run up to `rounds` rounds; returns the results of each sequence, and the number of rounds run."""
        count, rows = len(sequences), max(gammas) + 1
        rounds = max(1, min(rounds, RESULTS // (count * rows)))
        ahead = max(sequence.left for sequence in sequences) + rows
        verified = [
            Rows([s.tokens[-1]] * rows, s.computed, s.pages, rows, slot=s.slot, certain=s.certain) for s in sequences
        ]
        self._send(sequences, gammas)
        verifying = self.verifier.fill(verified, ahead, [sequence.sampling for sequence in sequences])
        graph = self._graph(self.send_draft_inputs(sequences, ahead), verifying)
        rounds = self._replay(graph, rounds, count, rows)
        gained, tokens = self.state.read("gained", rounds * count), self.state.read("tokens", rounds * count * rows)
        made = self.state.read("drafted", rounds * count) if self.reports_drafted else 0
        self.verifier.fetch_reports()
        self._driver.synchronize()
        self.verifier.deliver_reports()
        host, outputs = self.state.host, []
        for index, sequence in enumerate(sequences):
            taken, told = (host[at + index : at + rounds * count : count] for at in (gained, made))
            firsts = range(tokens + index * rows, tokens + rounds * count * rows, count * rows)
            by_round = (host[first : first + some] for first, some in zip(firsts, taken, strict=True))
            drafted = told if self.reports_drafted else _requested_drafts(taken, gammas[index], sequence.left)
            outputs.append(RoundOutput(list(chain.from_iterable(by_round)), taken, drafted))
        return outputs, rounds

    def _send(self, sequences: Sequence[RoundInput], gammas: Sequence[int]) -> None:
        """Send the state before the first round to the GPU."""
        self.state.write("last", (sequence.tokens[-1] for sequence in sequences))
        self.state.write("place", (sequence.computed for sequence in sequences))
        self.state.write("left", (sequence.left for sequence in sequences))
        self.state.write("most", gammas)
        self.state.write("pair_tokens", (token for sequence in sequences for token in sequence.tokens[-2:]))
        self.state.write("pair_positions", (sequence.computed + back for sequence in sequences for back in (-1, 0)))
        self.state.write("counter", [0])
        self.state.send("last", "counter", 1)

    def _replay(self, graph: ctypes.c_void_p, rounds: int, count: int, rows: int) -> int:
        """Launch the graph once a round, until all sequences have ended or `rounds` were run. Returns how many were.

        Replays are queued in batches of as many as suffice if all drafts are accepted; after each batch the host reads
        how many tokens the sequences still lack.
        """
        start, done = self.state.offset("left"), 0
        while done < rounds and (left := max(self.state.host[start : start + count])) > 0:
            batch = min(rounds - done, -(-left // rows))
            for _ in range(batch):
                self._driver.replay(graph)
            done += batch
            if done < rounds:
                self.state.read("left", count)
                self._driver.synchronize()
        return done

    def _graph(self, drafting: Counts, verifying: Counts) -> ctypes.c_void_p:
        """The graph of a round with these launch counts, captured when it is first used."""
        key = self._key(drafting, verifying)
        if key not in self._graphs:
            with self._driver.preparations.noted():
                calls = self._calls(drafting, verifying)  # may reallocate memory, which changes the key
                key = self._key(drafting, verifying)
                self._capture(key, calls)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _key(self, drafting: Counts, verifying: Counts) -> tuple[int, ...]:
        return (*drafting.values(), *verifying.values(), *self.reallocations())

    def _calls(self, drafting: Counts, verifying: Counts) -> list[LaunchCall]:
        """The launches of a round, in order."""
        others = {("state", name): address for name, address in self.state.addresses.items()}
        others |= {("draft", name): address for name, address in self.draft_addresses().items()}
        plan, prepare = self.verifier.plan, self.verifier.launcher.prepare
        before, *after = (prepare([launch], verifying, others)[0] for launch in plan["rounds"])
        verify = prepare(plan["launches"], verifying)
        return [call for _, call in (*self.draft_launches(drafting, verifying, others), before, *verify, *after)]

    def _capture(self, key: tuple[int, ...], calls: list[LaunchCall]) -> None:
        with self._driver.captured() as result:
            for call in calls:
                call.run()
        while len(self._graphs) >= _MAX_GRAPHS:
            self._driver.synchronize()
            self._driver.drop(self._graphs.popitem(last=False)[1])
        self._graphs[key] = result[0]


def _requested_drafts(gained: Sequence[int], gamma: int, left: int) -> list[int]:
    """Tokens drafted in each round: gamma, or as many as there was room for. `left`: tokens allowed before the first
    round."""
    before = accumulate(gained, initial=0)
    return [max(0, min(gamma, left - total - 1)) for total, _ in zip(before, gained, strict=False)]


def _round_counts(gained: Sequence[int], drafted: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """The number of rounds that gained tokens, and their drafted and accepted tokens by position in the round."""
    by_drafted, by_kept = [0] * (MOST_DRAFTS + 1), [0] * (MOST_DRAFTS + 1)  # rounds by number of tokens
    for taken, made in zip(gained, drafted, strict=True):
        if taken:
            by_drafted[made] += 1
            by_kept[taken - 1] += 1
    return sum(by_drafted), _counts_above(by_drafted), _counts_above(by_kept)


def _counts_above(histogram: Sequence[int]) -> list[int]:
    """For each i below the last index of a histogram, how many values are larger than i."""
    return [*accumulate(reversed(histogram))][-2::-1]
