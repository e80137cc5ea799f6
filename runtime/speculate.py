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

from qcompile.runtime import gamma
from qcompile.runtime.accept import Distribution
from qcompile.runtime.executor import Executor, Rows
from qcompile.runtime.outputs import MOST_DRAFTS, SpeculationMetrics

if TYPE_CHECKING:
    from qcompile.runtime.scheduler import Request

_WINDOW = 2048
"""Tokens of the text, from its end, in which a lookup searches."""

_LAG = 8
"""Positions that a draft's cache may be behind for its next step to take them along."""


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

    kept and missed: drafts accepted and rounds that ended in a rejection, the older counting less (runtime/gamma.py);
    plain_tokens: tokens since its last round.
    """

    cached: list[int] = field(default_factory=list)
    kept: float = 0.0
    missed: float = 0.0
    plain_tokens: int = 0
    proposed: list[Distribution] = field(default_factory=list)
    """What the tokens of the round were drawn from."""
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)


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
        *(
            (name, ctypes.c_void_p)
            for name in ("level", "tokens", "first", "length", "limit", "gamma", "computed", "block_table")
        ),
        *((name, ctypes.c_void_p) for name in ("rounds_done", "drafted", "accepted", "seconds")),
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
        self._catch_up(requests)
        ends = [len(request.tokens) + most for request, most in zip(requests, gammas, strict=True)]
        call = _Call(self, requests, gammas, ends, 0)
        return call.run()

    def draw(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """As `propose`, each token drawn as the request asks; from what is left in `request.drafts.proposed`."""
        level = self.levels[0]
        drafts: list[list[int]] = [[] for _ in requests]
        if level.executor is None:
            drafts = self.propose(requests, gammas)
            for request, draft in zip(requests, drafts, strict=True):
                request.drafts.proposed = [(np.array([token]), np.ones(1)) for token in draft]
            return drafts
        self._catch_up(requests)
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
                token, found = requests[index].sampler.guess(logits[row], drafts[index])
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
        self._catch_up(requests)
        call = _Call(self, requests, gammas, ends, rounds)
        tokens = call.run()
        for index, request in enumerate(requests):
            request.computed = int(call.computed[0, index])
            metrics = request.drafts.metrics
            metrics.rounds += int(call.rounds_done[index])
            reached, kept, missed = int(call.rounds_done[index]), 0, 0
            for place in range(gammas[index]):
                drafted, accepted = int(call.drafted[index, place]), int(call.accepted[index, place])
                metrics.drafted[place] += drafted
                metrics.accepted[place] += accepted
                missed += min(reached, drafted) - accepted
                kept += accepted
                reached = accepted
            if gammas[index]:
                gamma.observe(request, kept, missed)
        return tokens, max(1, int(call.rounds_done.max()))

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Fill the drafts' own caches up to the target's where they lag: after a prompt, and after plain steps."""
        for index, level in enumerate(self.levels):
            if level.executor is None or level.shares_cache:
                continue
            most = level.executor.limits.max_tokens
            for request in requests:
                cached = request.drafts.cached
                while request.computed - cached[index] > _LAG:
                    start = cached[index]
                    tokens = request.tokens[start : min(request.computed, start + most)]
                    level.executor.step([Rows(tokens, start, request.pages, 0)], logits=False)
                    cached[index] += len(tokens)


class _Call:
    """The arrays of one call of qc_speculate."""

    def __init__(
        self,
        owner: Speculator,
        requests: Sequence[Request],
        gammas: Sequence[int],
        ends: Sequence[int],
        rounds: int,
    ) -> None:
        self.owner, self.requests = owner, requests
        count, levels = len(requests), len(owner.levels) + 1
        self.computed = np.empty((levels, count), np.int32)
        self.computed[0] = [request.computed for request in requests]
        for index, level in enumerate(owner.levels, start=1):
            shared = level.shares_cache or level.executor is None
            self.computed[index] = self.computed[0] if shared else [r.drafts.cached[index - 1] for r in requests]
        # A lookup searches the text; models need of it only what their caches lack.
        need = self.computed.min(0)
        if owner._looks_up:
            need = np.minimum(need, np.maximum(0, self.computed[0] - _WINDOW))
        self.first = need.astype(np.int32)
        self.length = np.array([len(r.tokens) for r in requests], np.int32) - self.first
        self.limit = np.array(ends, np.int32) - self.first
        self.gamma = np.array(gammas, np.int32)
        self.tokens = np.zeros((count, int(self.limit.max()) + 1), np.int32)
        self.pages = np.zeros((count, max(len(r.pages) for r in requests)), np.int32)
        for index, request in enumerate(requests):
            self.tokens[index, : self.length[index]] = request.tokens[self.first[index] :]
            self.pages[index, : len(request.pages)] = request.pages
        self.rounds_done = np.zeros(count, np.int32)
        self.drafted = np.zeros((count, MOST_DRAFTS), np.int32)
        self.accepted = np.zeros((count, MOST_DRAFTS), np.int32)
        self.seconds = np.zeros(levels, np.float64)
        self._sizes = (levels, count, rounds, owner.target.limits.max_tokens, *self.tokens.shape[1:])

    def run(self) -> list[list[int]]:
        """The tokens each request gained; the requests' own caches and times are noted."""
        before = self.length.copy()
        arrays = (self.tokens, self.first, self.length, self.limit, self.gamma, self.computed, self.pages)
        counts = (self.rounds_done, self.drafted, self.accepted, self.seconds)
        call: Any = _Speculation(
            *self._sizes,
            self.pages.shape[1],
            ctypes.addressof(self.owner._table),
            *(array.ctypes.data for array in arrays),
            *(array.ctypes.data for array in counts),
        )
        status = self.owner._library.qc_speculate(ctypes.byref(call))
        if status:
            raise RuntimeError(f"qc_speculate refused its arguments ({status})")
        verifying, drafting = float(self.seconds[0]), float(self.seconds[1:].sum())
        gained: list[list[int]] = []
        for index, request in enumerate(self.requests):
            request.drafts.cached[:] = self.computed[1:, index].tolist()
            metrics = request.drafts.metrics
            metrics.gamma = int(self.gamma[index])
            metrics.verify_seconds += verifying
            metrics.draft_seconds += drafting
            gained.append(self.tokens[index, before[index] : self.length[index]].tolist())
        return gained
