"""Speculative decoding: the levels that draft, and each request's state in them.

Level 0 is the target. Every other level proposes tokens to the one above it, which computes them in one step and keeps
those that it would have chosen itself, and one token more (Leviathan et al. 2023, greedy case; ML-SpecQD 3.2 for more
than two levels). The last level may be an n-gram lookup instead of a model. Subclasses run the rounds: in the
artifact's library (runtime/cpu/speculate.py), on a GPU (runtime/cuda/rounds.py), or step by step from the host
(runtime/speculation/host.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from qcompile.errors import OverflowedError
from qcompile.runtime.outputs import MOST_DRAFTS, SpeculationMetrics
from qcompile.runtime.sampling.accept import Distribution
from qcompile.runtime.sampling.sampling import GREEDY
from qcompile.runtime.speculation import gamma
from qcompile.runtime.step import Rows, StepExecutor

if TYPE_CHECKING:
    from qcompile.runtime.engine.scheduler import Request

WINDOW = 2048
"""Tokens at the end of the text in which a lookup searches."""


@dataclass(frozen=True)
class Level:
    """A level that drafts: an opened path with its own cache or the target's, or a lookup (`executor` None).

    gamma: tokens that it proposes at once. match: longest suffix of the text that a lookup searches for. threshold:
    drafting stops after a token less probable than this.
    """

    executor: StepExecutor | None
    gamma: int
    shares_cache: bool = False
    match: int = 0
    threshold: float = 0.0


@dataclass(slots=True)
class DraftState:
    """A request's state in speculation. `cached` is how many positions each level's own cache holds.

    kept and missed: accepted drafts, and rounds that ended with a rejection; older ones count less
    (runtime/speculation/gamma.py).
    """

    cached: list[int] = field(default_factory=list)
    kept: float = 0.0
    missed: float = 0.0
    proposed: list[Distribution] = field(default_factory=list)
    """The distributions that the tokens of the round were drawn from."""
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)


class Gained(NamedTuple):
    """A request's results of one call: new tokens, positions held by each level's cache (the target's first), number of
    rounds, and numbers of drafted and accepted tokens by their position in a round."""

    tokens: list[int]
    computed: list[int]
    rounds: int
    drafted: list[int]
    accepted: list[int]


class Drafter(Protocol):
    """Proposes tokens for the requests of an engine."""

    max_position: int

    def most(self, requests: int) -> int: ...
    def start(self, request: Request) -> None: ...
    def settle(self, request: Request) -> None: ...
    def release(self, request: Request) -> None: ...
    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]: ...
    def draw(self, requests: Sequence[Request], gammas: Sequence[int], distributions: bool) -> list[list[int]]: ...
    def close(self) -> None: ...


class Speculator:
    """Drafts for the requests of an engine with the artifact's own levels. Not safe for two threads."""

    most_lag = 8
    """Most positions that a draft's own cache may lag behind; its next step computes them too."""

    catch_up_seconds = 0.0
    """Seconds that the last call of `rounds` spent to fill the drafts' own caches first."""

    def __init__(self, target: StepExecutor, levels: Sequence[Level]) -> None:
        self.target, self.levels = target, tuple(levels)
        models = [level.executor for level in levels if level.executor]
        self.max_position = min([executor.limits.max_position for executor in models], default=1 << 30)

    def most(self, requests: int) -> int:
        """The most tokens that can be drafted for each of this many requests."""
        return min(MOST_DRAFTS - 1, self.target.limits.max_tokens // requests - 2)

    def start(self, request: Request) -> None:
        """Prepare the state of a new request."""
        request.drafts.cached = [0] * len(self.levels)

    def settle(self, request: Request) -> None:
        """After verification: entries of the drafts' caches past `request.computed` are invalid."""
        cached = request.drafts.cached
        cached[:] = [min(positions, request.computed) for positions in cached]

    def release(self, request: Request) -> None:
        """A request has ended. Its drafts hold no memory other than its pages."""

    def close(self) -> None:
        """Close the draft paths."""
        for level in self.levels:
            if level.executor:
                level.executor.close()

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """Up to `gammas[i]` greedy drafts for `requests[i]`. All must be decoding and have pages for the drafts."""
        self._catch_up(requests, gammas)
        ends = [len(request.tokens) + most for request, most in zip(requests, gammas, strict=True)]
        return [gained.tokens for gained in self._extend_and_note(requests, gammas, ends, 0)]

    def draws_in_rounds(self, requests: Sequence[Request]) -> bool:
        """Whether `rounds` can draw the tokens of these requests; if not, it is for greedy ones only."""
        return False

    def draw(self, requests: Sequence[Request], gammas: Sequence[int], distributions: bool) -> list[list[int]]:
        """As `propose`, but tokens are sampled with the request's parameters. With `distributions`, these are left in
        `request.drafts.proposed`."""
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
            by_executor = [
                not requests[i].params.needs_logits(level.executor.draws and not distributions) for i in active
            ]
            draws = [
                requests[i].sampler.draws(requests[i].computed, len(drafts[i]) + 1, drafts[i]).unreported
                if drawn
                else GREEDY
                for i, drawn in zip(active, by_executor, strict=True)
            ]
            chosen, logits = level.executor.step(rows, not all(by_executor), draws)
            for row, index in enumerate(active):
                if by_executor[row] or logits is None:
                    drafts[index].append(max(chosen[row], 0))
                    continue
                try:
                    token, found = requests[index].sampler.guess(logits[row], drafts[index])
                except OverflowedError:  # the draft's logits are not finite: any token will do
                    token, found = 0, (np.array([0]), np.ones(1))
                drafts[index].append(token)
                requests[index].drafts.proposed.append(found)
        for request in requests:
            request.drafts.metrics.draft_seconds += time.perf_counter() - started
        return drafts

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """Run up to `rounds` rounds; request i grows to at most `ends[i]` tokens. Advances `computed`.

        Returns each request's new tokens, and the number of rounds of the request that took the most.
        """
        started = time.perf_counter()
        self._catch_up(requests, gammas)
        self.catch_up_seconds = time.perf_counter() - started
        results = self._extend_and_note(requests, gammas, ends, rounds)
        for request, most, gained in zip(requests, gammas, results, strict=True):
            request.computed = gained.computed[0]
            request.sampler.took(gained.tokens)
            note(request, most, gained.rounds, gained.drafted, gained.accepted)
        return [gained.tokens for gained in results], max(1, *(gained.rounds for gained in results))

    def _extend_and_note(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> list[Gained]:
        """`_extend`; notes the times and the state of the drafts' own caches."""
        results, seconds = self._extend(requests, gammas, ends, rounds)
        for request, most, gained in zip(requests, gammas, results, strict=True):
            request.drafts.cached[:] = gained.computed[1:]
            metrics = request.drafts.metrics
            metrics.gamma = most
            metrics.verify_seconds += seconds[0]
            metrics.draft_seconds += sum(seconds[1:])
        return results

    def _extend(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[list[Gained], Sequence[float]]:
        """Run up to `rounds` rounds; text i grows to at most `ends[i]` tokens. Also returns the seconds of each level.

        With 0 rounds, the results are the drafts' proposals.
        """
        raise NotImplementedError

    def _text_starts(self, requests: Sequence[Request]) -> tuple[list[int], list[list[int]]]:
        """The first token of each text that a call needs, and how many positions each level's cache holds, by level."""
        own = [request.computed for request in requests]
        computed = [own]
        for index, level in enumerate(self.levels):
            shared = level.shares_cache or level.executor is None
            computed.append(own if shared else [request.drafts.cached[index] for request in requests])
        # Models need only the tokens that their caches lack, a lookup the window that it searches.
        first = [min(column) for column in zip(*computed, strict=True)]
        if any(level.executor is None for level in self.levels):
            first = [min(start, max(0, place - WINDOW)) for start, place in zip(first, own, strict=True)]
        return first, computed

    def _catch_up(self, requests: Sequence[Request], gammas: Sequence[int]) -> None:
        """Fill the drafts' own caches where they lag behind the target's: after a prompt, and after plain steps.

        They may keep a lag that fits into the drafts' steps together with the drafts of all requests. Requests without
        drafts are left out: their texts may be longer than a draft's context.
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
    """Note rounds of at most `most` drafts; `drafted` and `accepted` count tokens by their position in the round."""
    metrics = request.drafts.metrics
    metrics.rounds += rounds
    reached, kept, missed = rounds, 0, 0
    for place in range(MOST_DRAFTS):
        if place >= most:
            if not drafted[place]:
                break
            reached = min(reached, drafted[place])  # a lookup proposed more than was asked for
        metrics.drafted[place] += drafted[place]
        metrics.accepted[place] += accepted[place]
        missed += reached - accepted[place]  # also where a lookup found nothing
        kept += accepted[place]
        reached = accepted[place]
    if most:
        gamma.observe(request, kept, missed)
