"""Speculation: the levels that draft, and what each request has of them.

Level 0 is the target. Every level below proposes tokens to the one above it, which computes them in one step and
keeps those it would have chosen itself, and one more (Leviathan et al. 2023, greedy case; ML-SpecQD 3.2 for levels
below levels); the last may look the text up instead of computing. Where rounds are computed is the subclass's:
in the artifact's library (speculate_library.py), on a GPU (cuda_rounds.py), or by the host (speculate_host.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from qcompile.errors import OverflowedError
from qcompile.runtime import gamma
from qcompile.runtime.accept import Distribution
from qcompile.runtime.executor import Rows, StepExecutor
from qcompile.runtime.outputs import MOST_DRAFTS, SpeculationMetrics

if TYPE_CHECKING:
    from qcompile.runtime.scheduler import Request

WINDOW = 2048
"""Tokens of the text, from its end, in which a lookup searches."""


@dataclass(frozen=True)
class Level:
    """A level that drafts: an opened path with its own cache or the target's, or a lookup (`executor` None).

    gamma: tokens it proposes at once. match: the longest end of the text a lookup looks for. threshold: drafting
    stops after a token less probable than this.
    """

    executor: StepExecutor | None
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


class Gained(NamedTuple):
    """What a call brought a request: tokens, positions its levels' caches hold (the target's first), rounds, and how
    many tokens were drafted and accepted by their place in a round."""

    tokens: list[int]
    computed: list[int]
    rounds: int
    drafted: list[int]
    accepted: list[int]


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

    most_lag = 8
    """Positions that a draft's own cache may be behind, at most, for its next step to take them along."""

    caught_up = 0.0
    """Seconds that the last call of `rounds` took to fill the drafts' own caches before."""

    def __init__(self, target: StepExecutor, levels: Sequence[Level]) -> None:
        self.target, self.levels = target, tuple(levels)
        models = [level.executor for level in levels if level.executor]
        self.max_position = min([executor.limits.max_position for executor in models], default=1 << 30)

    def most(self, requests: int) -> int:
        """The most tokens that can be drafted for each of so many requests."""
        return min(MOST_DRAFTS - 1, self.target.limits.max_tokens // requests - 2)

    def start(self, request: Request) -> None:
        """A new request."""
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
        return [gained.tokens for gained in self._noted(requests, gammas, ends, 0)]

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
        every = self._noted(requests, gammas, ends, rounds)
        for request, most, gained in zip(requests, gammas, every, strict=True):
            request.computed = gained.computed[0]
            note(request, most, gained.rounds, gained.drafted, gained.accepted)
        return [gained.tokens for gained in every], max(1, *(gained.rounds for gained in every))

    def _noted(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> list[Gained]:
        """`_extend`, with its times and what is in the drafts' own caches noted."""
        every, seconds = self._extend(requests, gammas, ends, rounds)
        for request, most, gained in zip(requests, gammas, every, strict=True):
            request.drafts.cached[:] = gained.computed[1:]
            metrics = request.drafts.metrics
            metrics.gamma = most
            metrics.verify_seconds += seconds[0]
            metrics.draft_seconds += sum(seconds[1:])
        return every

    def _extend(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[list[Gained], Sequence[float]]:
        """What so many rounds add to each text, up to length `ends[i]`, and the seconds each level took.

        With 0 rounds, what the drafts propose.
        """
        raise NotImplementedError

    def _starts(self, requests: Sequence[Request]) -> tuple[list[int], list[list[int]]]:
        """From which token on a call must know each text; and what each level's cache holds, level by level."""
        own = [request.computed for request in requests]
        computed = [own]
        for index, level in enumerate(self.levels):
            shared = level.shares_cache or level.executor is None
            computed.append(own if shared else [request.drafts.cached[index] for request in requests])
        # A lookup searches the text; models need of it only what their caches lack.
        first = [min(column) for column in zip(*computed, strict=True)]
        if any(level.executor is None for level in self.levels):
            first = [min(start, max(0, place - WINDOW)) for start, place in zip(first, own, strict=True)]
        return first, computed

    def _catch_up(self, requests: Sequence[Request], gammas: Sequence[int]) -> None:
        """Fill the drafts' own caches up to the target's where they lag: after a prompt, and after plain steps.

        They may lag by as much as the drafts' steps have room for, with all requests' and what is drafted. Who wants no
        drafts is left out: its text may be longer than a draft's context.
        """
        lag = min(self.most_lag, self.target.limits.max_tokens // len(requests) - max(gammas))
        drafting = [request for request, most in zip(requests, gammas, strict=True) if most]
        for index, level in enumerate(self.levels):
            if level.executor is None or level.shares_cache:
                continue
            while behind := [r for r in drafting if r.computed - r.drafts.cached[index] > lag]:
                rows: list[Rows] = []
                room = level.executor.limits.max_tokens
                for request in behind:
                    start = request.drafts.cached[index]
                    tokens = request.tokens[start : min(request.computed, start + room)]
                    rows += [Rows(tokens, start, request.pages, 0)] if tokens else []
                    request.drafts.cached[index] += len(tokens)
                    room -= len(tokens)
                level.executor.step(rows, logits=False)


def note(request: Request, most: int, rounds: int, drafted: list[int], accepted: list[int]) -> None:
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
