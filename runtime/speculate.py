"""Speculation: the levels that draft, and what each request has of them.

Level 0 is the target. Every level below proposes tokens to the one above it, which computes them in one step; the
last may look the text up instead of computing. Drafting and greedy rounds run inside the artifact's library
(codegen/templates/cpu/speculate.h), so nothing of Python comes between two tokens.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from qcompile.errors import OverflowedError
from qcompile.runtime import gamma
from qcompile.runtime.accept import Distribution
from qcompile.runtime.executor import Executor, Rows
from qcompile.runtime.outputs import MOST_DRAFTS, SpeculationMetrics

if TYPE_CHECKING:
    from qcompile.runtime.scheduler import Request

_WINDOW = 2048
"""Tokens of the text, from its end, in which a lookup searches."""

_LAG = 8
"""Positions that a draft's cache may be behind, at most, for its next step to take them along."""


@dataclass(frozen=True)
class Level:
    """A level that drafts: an opened path with its own cache or the target's, or a lookup (`executor` None).

    gamma: tokens it proposes at once. match: the longest end of the text a lookup looks for. threshold: drafting
    stops after a token less probable than this.
    """

    executor: Executor | None
    gamma: int
    shares_cache: bool = False
    match: int = 0
    threshold: float = 0.0


@dataclass(slots=True)
class DraftState:
    """A request's share in speculation. `cached` is how many positions each level's own cache holds.

    kept and missed: drafts accepted and rounds that brought no more, the older counting less (runtime/gamma.py).
    """

    cached: list[int] = field(default_factory=list)
    kept: float = 0.0
    missed: float = 0.0
    proposed: list[Distribution] = field(default_factory=list)
    """What the tokens of the round were drawn from."""
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)


_ARRAYS = (
    *("tokens", "first", "length", "limit", "gamma", "computed", "block_table"),
    *("rounds_done", "drafted", "accepted", "seconds"),
)
"""Of `qc_speculation`, in its order."""


class _Level(ctypes.Structure):
    """`qc_level` of the library."""

    _fields_ = [
        ("step", ctypes.c_void_p),
        ("model", ctypes.c_void_p),
        ("vocab", ctypes.c_int32),
        ("cache", ctypes.c_int32),
        ("gamma", ctypes.c_int32),
        ("match", ctypes.c_int32),
        ("threshold", ctypes.c_float),
    ]


class _Speculation(ctypes.Structure):
    """`qc_speculation` of the library."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("levels", "sequences", "rounds", "max_rows", "stride", "block_stride")),
        ("level", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    ]


class Drafter(Protocol):
    """What drafts for an engine."""

    max_position: int

    def most(self, requests: int) -> int: ...
    def start(self, request: Request) -> None: ...
    def settle(self, request: Request) -> None: ...
    def release(self, request: Request) -> None: ...
    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]: ...
    def draw(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]: ...
    def close(self) -> None: ...


class Speculator:
    """Drafts of an artifact's own levels for the requests of an engine. Not safe for two threads."""

    caught_up = 0.0
    """Seconds that the last call of `rounds` took to fill the drafts' own caches before."""

    def __init__(self, target: Executor, levels: Sequence[Level]) -> None:
        self.target, self.levels = target, tuple(levels)
        self._library = target.library
        models = [level.executor for level in levels if level.executor]
        self.max_position = min([executor.limits.max_position for executor in models], default=1 << 30)
        self._looks_up = any(level.executor is None for level in levels)
        everyone = [Level(target, 0, True), *levels]
        table = [
            _Level(
                ctypes.cast(level.executor.library.qc_step, ctypes.c_void_p) if level.executor else None,
                level.executor.handle if level.executor else None,
                level.executor.limits.vocab if level.executor else 0,
                0 if level.shares_cache else index,
                level.gamma,
                level.match,
                level.threshold,
            )
            for index, level in enumerate(everyone)
        ]
        self._table = (_Level * len(table))(*table)
        self._memory = _Memory(len(table), 0, 0, 0)

    def most(self, requests: int) -> int:
        """The most tokens that can be drafted for each of so many requests."""
        return min(MOST_DRAFTS - 1, self.target.limits.max_tokens // requests - 2)

    def start(self, request: Request) -> None:
        """A new request, or one whose cache was taken from it."""
        request.drafts.cached = [0] * len(self.levels)

    def settle(self, request: Request) -> None:
        """The target decided: what lies behind `request.computed` in a draft's cache is void."""
        cached = request.drafts.cached
        cached[:] = [min(positions, request.computed) for positions in cached]

    def release(self, request: Request) -> None:
        """A request has ended; its drafts had nothing but its pages."""

    def close(self) -> None:
        """Close the paths that draft."""
        for level in self.levels:
            if level.executor:
                level.executor.close()

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """At most `gammas[i]` drafts for `requests[i]`, all decoding, with pages for them."""
        self._catch_up(requests, gammas)
        ends = [len(request.tokens) + most for request, most in zip(requests, gammas, strict=True)]
        return self._call(requests, gammas, ends, 0)

    def draw(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """As `propose`, each token drawn as the request asks; from what is left in `request.drafts.proposed`."""
        level = self.levels[0]
        drafts: list[list[int]] = [[] for _ in requests]
        if level.executor is None:
            drafts = self.propose(requests, gammas)
            for request, draft in zip(requests, drafts, strict=True):
                request.drafts.proposed = [(np.array([token]), np.ones(1)) for token in draft]
            return drafts
        self._catch_up(requests, gammas)
        started = time.perf_counter()
        for request in requests:
            request.drafts.proposed = []
            if level.shares_cache:
                request.drafts.cached[0] = request.computed
        for _ in range(max(gammas)):
            active = [index for index, most in enumerate(gammas) if len(drafts[index]) < most]
            rows = []
            for index in active:
                request, start = requests[index], requests[index].drafts.cached[0]
                pending = request.tokens[start:] + drafts[index][max(0, start - len(request.tokens)) :]
                rows.append(Rows(pending, start, request.pages, 1))
                request.drafts.cached[0] += len(pending)
            logits = level.executor.step(rows, logits=True)[1]
            assert logits is not None
            for row, index in enumerate(active):
                try:
                    token, found = requests[index].sampler.guess(logits[row], drafts[index])
                except OverflowedError:  # the draft's own logits: what it would draw is nobody's guess
                    token, found = 0, (np.array([0]), np.ones(1))
                drafts[index].append(token)
                requests[index].drafts.proposed.append(found)
        for request in requests:
            request.drafts.metrics.draft_seconds += time.perf_counter() - started
        return drafts

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """The greedy tokens of so many rounds for each request, at most up to length `ends[i]`; moves `computed`.

        Beside them is how many rounds the request that took the most took.
        """
        started = time.perf_counter()
        self._catch_up(requests, gammas)
        self.caught_up = time.perf_counter() - started
        tokens = self._call(requests, gammas, ends, rounds)
        memory = self._memory
        for index, request in enumerate(requests):
            request.computed = memory.computed[index]
            _note(request, gammas[index], *memory.found(index))
        return tokens, max(1, *memory.rounds_done[: len(requests)])

    def _call(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> list[list[int]]:
        """What qc_speculate adds to each text; the drafts' own caches and times are noted."""
        memory, before = self._fill(requests, gammas, ends, rounds)
        if self._library.qc_speculate(ctypes.byref(memory.call)):
            raise RuntimeError("qc_speculate refused its arguments")
        count, columns = len(requests), memory.sizes[1]
        verifying, drafting = memory.seconds[0], sum(memory.seconds[1:])
        gained: list[list[int]] = []
        for index, request in enumerate(requests):
            request.drafts.cached[:] = memory.computed[count + index : count * (len(self.levels) + 1) : count]
            metrics = request.drafts.metrics
            metrics.gamma = gammas[index]
            metrics.verify_seconds += verifying
            metrics.draft_seconds += drafting
            row = index * columns
            gained.append(memory.tokens[row + before[index] : row + memory.length[index]])
        return gained

    def _fill(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[_Memory, list[int]]:
        """Write a call's arguments; also how many tokens of each text they have."""
        count = len(requests)
        own = [request.computed for request in requests]
        computed = [own]
        for index, level in enumerate(self.levels):
            shared = level.shares_cache or level.executor is None
            computed.append(own if shared else [request.drafts.cached[index] for request in requests])
        # A lookup searches the text; models need of it only what their caches lack.
        first = [min(column) for column in zip(*computed, strict=True)]
        if self._looks_up:
            first = [min(start, max(0, place - _WINDOW)) for start, place in zip(first, own, strict=True)]
        before = [len(request.tokens) - start for request, start in zip(requests, first, strict=True)]
        limits = [end - start for end, start in zip(ends, first, strict=True)]
        need = count, max(limits) + 1, max(len(request.pages) for request in requests)
        if not self._memory.fits(*need):
            self._memory = _Memory(len(self.levels) + 1, *(2 * size for size in need))
            self._memory.call.level = ctypes.addressof(self._table)
        memory = self._memory
        _, columns, pages = memory.sizes
        memory.first[:count], memory.length[:count] = first, before
        memory.limit[:count], memory.gamma[:count] = limits, list(gammas)
        memory.computed[: count * len(computed)] = [place for level in computed for place in level]
        for index, request in enumerate(requests):
            row = index * columns
            memory.tokens[row : row + before[index]] = request.tokens[first[index] :]
            memory.pages[index * pages : index * pages + len(request.pages)] = request.pages
        memory.clear()
        memory.call.sequences, memory.call.rounds = count, rounds
        memory.call.max_rows = self.target.limits.max_tokens
        return memory, before

    def _catch_up(self, requests: Sequence[Request], gammas: Sequence[int]) -> None:
        """Fill the drafts' own caches up to the target's where they lag: after a prompt, and after plain steps.

        They may lag by as much as the drafts' steps have room for, with all requests' and what is drafted.
        """
        lag = min(_LAG, self.target.limits.max_tokens // len(requests) - max(gammas))
        for index, level in enumerate(self.levels):
            if level.executor is None or level.shares_cache:
                continue
            most = level.executor.limits.max_tokens
            for request in requests:
                cached = request.drafts.cached
                while request.computed - cached[index] > lag:
                    start = cached[index]
                    tokens = request.tokens[start : min(request.computed, start + most)]
                    level.executor.step([Rows(tokens, start, request.pages, 0)], logits=False)
                    cached[index] += len(tokens)


def _note(request: Request, most: int, rounds: int, drafted: list[int], accepted: list[int]) -> None:
    """Note rounds of at most `most` drafts: how many were drafted and kept by their place."""
    metrics = request.drafts.metrics
    metrics.rounds += rounds
    reached, kept, missed = rounds, 0, 0
    for place in range(MOST_DRAFTS):
        if place >= most:
            if not drafted[place]:
                break
            reached = min(reached, drafted[place])  # a lookup that went further than was asked for
        metrics.drafted[place] += drafted[place]
        metrics.accepted[place] += accepted[place]
        missed += reached - accepted[place]  # also where a lookup found nothing
        kept += accepted[place]
        reached = accepted[place]
    if most:
        gamma.observe(request, kept, missed)


class _Memory:
    """The arrays of calls of qc_speculate, kept for the next call that fits.

    Arrays of ctypes take and give slices of lists faster than numpy's, of which a call would make a dozen.
    """

    def __init__(self, levels: int, sequences: int, columns: int, pages: int) -> None:
        self.sizes = sequences, columns, pages

        def numbers(count: int) -> Any:
            return (ctypes.c_int32 * count)()

        self.tokens, self.pages = numbers(sequences * columns), numbers(sequences * pages)
        self.first, self.length, self.limit, self.gamma = (numbers(sequences) for _ in range(4))
        self.computed = numbers(levels * sequences)
        counts = sequences * (1 + 2 * MOST_DRAFTS)
        self._results: Any = (ctypes.c_char * (4 * counts + 8 * levels))()
        self.seconds = (ctypes.c_double * levels).from_buffer(self._results)
        at = 8 * levels
        self.rounds_done = (ctypes.c_int32 * sequences).from_buffer(self._results, at)
        at += 4 * sequences
        self.drafted = (ctypes.c_int32 * (sequences * MOST_DRAFTS)).from_buffer(self._results, at)
        at += 4 * sequences * MOST_DRAFTS
        self.accepted = (ctypes.c_int32 * (sequences * MOST_DRAFTS)).from_buffer(self._results, at)
        arrays = (self.tokens, self.first, self.length, self.limit, self.gamma, self.computed, self.pages)
        results = (self.rounds_done, self.drafted, self.accepted, self.seconds)
        self.call = _Speculation(levels=levels, stride=columns, block_stride=pages)
        for name, array in zip(_ARRAYS, arrays + results, strict=True):
            setattr(self.call, name, ctypes.addressof(array))

    def fits(self, sequences: int, columns: int, pages: int) -> bool:
        """Whether so many sequences of so many tokens and pages have room."""
        return sequences <= self.sizes[0] and columns <= self.sizes[1] and pages <= self.sizes[2]

    def clear(self) -> None:
        """Results to zero."""
        ctypes.memset(self._results, 0, len(self._results))

    def found(self, index: int) -> tuple[int, list[int], list[int]]:
        """Rounds of a sequence, and its tokens drafted and accepted by place."""
        places = slice(index * MOST_DRAFTS, (index + 1) * MOST_DRAFTS)
        return self.rounds_done[index], self.drafted[places], self.accepted[places]
