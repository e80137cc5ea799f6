"""Speculative decoding by draft stages.

Stage 0 is the target. Every other stage drafts tokens for the stage before it, which computes them in one step and
keeps those that it would have chosen itself, and one token more (Leviathan et al. 2023, greedy case; ML-SpecQD 3.2 for
more than two stages). The last stage may be an n-gram lookup instead of a model. The manifest of an artifact calls
stages "levels".

Subclasses of Speculator run the rounds: in the artifact's library (runtime/cpu/speculate.py), on a GPU
(runtime/cuda/rounds.py), or step by step from the host (runtime/speculation/host.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from qcompile.errors import OverflowedError
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.inputs import GREEDY
from qcompile.runtime.speculation.lookup import WINDOW
from qcompile.runtime.step import Rows, StepExecutor


@dataclass(frozen=True)
class DraftStage:
    """A stage that drafts: an opened path of the artifact, or an n-gram lookup.

    executor: None for a lookup. gamma: tokens that the stage proposes at once. shares_cache: whether the path uses the
    target's cache and not one of its own. match: longest suffix of the text that a lookup searches for. threshold:
    drafting stops after a token less probable than this.
    """

    executor: StepExecutor | None
    gamma: int
    shares_cache: bool = False
    match: int = 0
    threshold: float = 0.0


class StageResult(NamedTuple):
    """A request's results of one call of the stages.

    tokens: its new tokens. computed: positions that each stage's cache holds, the target's first. rounds: number of
    rounds. drafted, accepted: numbers of tokens by their position in a round.
    """

    tokens: list[int]
    computed: list[int]
    rounds: int
    drafted: list[int]
    accepted: list[int]


class Drafter(Protocol):
    """Proposes tokens for the requests of an engine."""

    max_position: int
    """Most positions of a text that it can draft for."""

    @property
    def has_states(self) -> bool:
        """Whether a draft has recurrent states."""

    def most(self, requests: int) -> int:
        """The most tokens that can be drafted for each of `requests` requests."""

    def behind(self, requests: Sequence[Request]) -> int:
        """Positions of `requests` that the drafts' own caches lack."""

    def start(self, request: Request) -> None:
        """Prepare the state of a new request."""

    def settle(self, request: Request) -> None:
        """A step has verified drafts of the request, or has appended a token without drafts."""

    def rest(self, steps: int) -> bool:
        """The target's next call has no drafts, but `steps` steps of requests that all decode; 0 if they do not.

        Returns whether `note` reads what that call returns, and so must come before the call after it. If not, `note`
        may come as soon as the call has started.
        """

    def note(self, requests: Sequence[Request], rows: Sequence[Rows], steps: int) -> None:
        """The target has computed `rows`, one for each request, or the rows of `steps` decode steps from these on.

        The tokens that follow are appended to the requests. A request that has ended has no pages.
        """

    def release(self, request: Request) -> None:
        """A request has ended: free what the drafts hold of it."""

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """Up to `gammas[i]` greedy drafts for `requests[i]`. All must be decoding and have pages for the drafts."""

    def draw(self, requests: Sequence[Request], gammas: Sequence[int], distributions: bool) -> list[list[int]]:
        """As `propose`, but sampled with the requests' parameters.

        With `distributions`, the distribution of each draft is left in `request.drafts.proposed`.
        """

    def close(self) -> None:
        """Close the draft models."""


class Speculator:
    """Drafts for the requests of an engine with the artifact's own draft stages. Not safe for two threads."""

    most_lag = 8
    """Most positions that a draft's own cache may lag behind the target's; the draft's next step computes them too."""

    catch_up_seconds = 0.0
    """Seconds that the last call of `rounds` spent to fill the drafts' own caches first, without preparations."""

    def __init__(self, target: StepExecutor, stages: Sequence[DraftStage]) -> None:
        self.target, self.stages = target, tuple(stages)
        models = [stage.executor for stage in stages if stage.executor]
        self.max_position = min([executor.limits.max_position for executor in models], default=1 << 30)

    @property
    def has_states(self) -> bool:
        """Whether a draft has recurrent states."""
        return any(stage.executor.state_slots for stage in self.stages if stage.executor)

    def most(self, requests: int) -> int:
        """The most tokens that can be drafted for each of `requests` requests."""
        return min(MOST_DRAFTS - 1, self.target.limits.max_outputs // requests - 2)

    def behind(self, requests: Sequence[Request]) -> int:
        """Positions of `requests` that the drafts' own caches lack."""
        own = [index for index, stage in enumerate(self.stages) if stage.executor and not stage.shares_cache]
        return sum(max(0, each.sequence.computed - each.drafts.cached[index]) for each in requests for index in own)

    def start(self, request: Request) -> None:
        """Prepare the state of a new request."""
        request.drafts.cached = [0] * len(self.stages)

    def settle(self, request: Request) -> None:
        """After verification: entries of the drafts' caches past the target's computed positions are invalid."""
        cached = request.drafts.cached
        cached[:] = [min(positions, request.sequence.computed) for positions in cached]

    def rest(self, steps: int) -> bool:
        """A call without drafts follows: drafts need nothing of it."""
        return False

    def note(self, requests: Sequence[Request], rows: Sequence[Rows], steps: int) -> None:
        """The target has computed rows: nothing to note, as drafts read the text alone."""

    def release(self, request: Request) -> None:
        """A request has ended: nothing to free, as its drafts hold no memory other than its pages."""

    def close(self) -> None:
        """Close the draft paths."""
        for stage in self.stages:
            if stage.executor:
                stage.executor.close()

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """Up to `gammas[i]` greedy drafts for `requests[i]`. All must be decoding and have pages for the drafts."""
        self._catch_up(requests, gammas)
        ends = [len(request.sequence.tokens) + most for request, most in zip(requests, gammas, strict=True)]
        return [result.tokens for result in self._extend_and_note(requests, gammas, ends, 0)]

    def samples_in_rounds(self, requests: Sequence[Request]) -> bool:
        """Whether `rounds` can sample the tokens of these requests; if not, it is for greedy requests only."""
        return False

    def draw(self, requests: Sequence[Request], gammas: Sequence[int], distributions: bool) -> list[list[int]]:
        """As `propose`, but tokens are sampled with the request's parameters. With `distributions`, these are left in
        `request.drafts.proposed`."""
        stage = self.stages[0]
        if stage.executor is None:
            return self._draw_by_lookup(requests, gammas)
        self._catch_up(requests, gammas)
        started = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in requests]
        for request in requests:
            request.drafts.proposed = []
            if stage.shares_cache:
                request.drafts.cached[0] = request.sequence.computed
        for _ in range(max(gammas)):
            active = [index for index, most in enumerate(gammas) if len(drafts[index]) < most]
            by_executor = [
                not requests[i].params.needs_logits(stage.executor.samples and not distributions) for i in active
            ]
            self._draw_one_each(requests, drafts, active, by_executor)
        for request in requests:
            request.drafts.metrics.draft_seconds += time.perf_counter() - started
        return drafts

    def _draw_by_lookup(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """`draw` where the first stage is a lookup: each draft counts as proposed with probability 1."""
        drafts = self.propose(requests, gammas)
        for request, draft in zip(requests, drafts, strict=True):
            request.drafts.proposed = [(np.array([token]), np.ones(1)) for token in draft]
        return drafts

    def _draw_one_each(
        self, requests: Sequence[Request], drafts: list[list[int]], active: Sequence[int], by_executor: Sequence[bool]
    ) -> None:
        """Run one step of the first stage, and append one token to the drafts of the `active` requests.

        by_executor: for each active request, whether the executor samples its token, and not the host from logits.
        """
        executor, rows = self.stages[0].executor, []
        assert executor
        for index in active:
            request, start = requests[index], requests[index].drafts.cached[0]
            tokens = request.sequence.tokens
            pending = tokens[start:] + drafts[index][max(0, start - len(tokens)) :]
            certain = 0 if self.stages[0].shares_cache else len(tokens)
            rows.append(Rows(pending, start, request.sequence.pages, 1, slot=request.sequence.slot, certain=certain))
            request.drafts.cached[0] += len(pending)
        sampling = [
            requests[i].sampler.inputs(requests[i].sequence.computed, len(drafts[i]) + 1, drafts[i]).unreported
            if sampled
            else GREEDY
            for i, sampled in zip(active, by_executor, strict=True)
        ]
        chosen, logits = executor.step(rows, not all(by_executor), sampling)
        for row, index in enumerate(active):
            if by_executor[row] or logits is None:
                drafts[index].append(max(chosen[row], 0))
                continue
            try:
                token, distribution = requests[index].sampler.guess(logits[row], drafts[index])
            except OverflowedError:  # the draft's logits are not finite: any token will do
                token, distribution = 0, (np.array([0]), np.ones(1))
            drafts[index].append(token)
            requests[index].drafts.proposed.append(distribution)

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """Run up to `rounds` rounds; request i grows to at most `ends[i]` tokens. Advances `sequence.computed`.

        Returns each request's new tokens, and the number of rounds of the request that took the most.
        """
        self._note_catch_up(requests, gammas)
        results = self._extend_and_note(requests, gammas, ends, rounds)
        for request, most, result in zip(requests, gammas, results, strict=True):
            request.sequence.computed = result.computed[0]
            request.sampler.took(result.tokens)
            note_rounds(request, most, result.rounds, result.drafted, result.accepted)
        return [result.tokens for result in results], max(1, *(result.rounds for result in results))

    def _extend_and_note(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> list[StageResult]:
        """`_extend`; notes the times and the positions in the drafts' own caches."""
        results, seconds = self._extend(requests, gammas, ends, rounds)
        for request, most, result in zip(requests, gammas, results, strict=True):
            request.drafts.cached[:] = result.computed[1:]
            metrics = request.drafts.metrics
            metrics.gamma = most
            metrics.verify_seconds += seconds[0]
            metrics.draft_seconds += sum(seconds[1:])
        return results

    def _extend(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[list[StageResult], Sequence[float]]:
        """Run up to `rounds` rounds; text i grows to at most `ends[i]` tokens. Also returns the seconds of each stage.

        With 0 rounds, the results are the drafts' proposals.
        """
        raise NotImplementedError

    def _text_starts(self, requests: Sequence[Request]) -> tuple[list[int], list[list[int]]]:
        """The first token of each text that a call needs, and the positions that each stage's cache holds, by stage."""
        own = [request.sequence.computed for request in requests]
        computed = [own]
        for index, stage in enumerate(self.stages):
            shared = stage.shares_cache or stage.executor is None
            computed.append(own if shared else [request.drafts.cached[index] for request in requests])
        # Models need only the tokens that their caches lack, a lookup the window that it searches.
        first = [min(column) for column in zip(*computed, strict=True)]
        if any(stage.executor is None for stage in self.stages):
            first = [min(start, max(0, place - WINDOW)) for start, place in zip(first, own, strict=True)]
        return first, computed

    def _note_catch_up(self, requests: Sequence[Request], gammas: Sequence[int]) -> None:
        """`_catch_up`, with a note of the time it takes."""
        started = time.monotonic()
        self._catch_up(requests, gammas)
        ended = time.monotonic()
        self.catch_up_seconds = ended - started - self.target.preparations.within(started, ended)

    def _catch_up(self, requests: Sequence[Request], gammas: Sequence[int]) -> None:
        """Fill the drafts' own caches where they lag behind the target's: after a prompt, and after plain steps.

        A lag may remain that fits into the drafts' steps together with the drafts of all requests. Requests without
        drafts are left out: their texts may be longer than a draft's context.
        """
        lag = min(self.most_lag, self.target.limits.max_outputs // len(requests) - max(gammas))
        drafting = [request for request, most in zip(requests, gammas, strict=True) if most]
        for index, stage in enumerate(self.stages):
            if stage.executor is None or stage.shares_cache:
                continue
            while behind := [r for r in drafting if r.sequence.computed - r.drafts.cached[index] > lag]:
                rows: list[Rows] = []
                room = stage.executor.limits.max_tokens
                for request in behind:
                    sequence, start = request.sequence, request.drafts.cached[index]
                    tokens = sequence.tokens[start : min(sequence.computed, start + room)]
                    rows += [Rows(tokens, start, sequence.pages, 0, slot=sequence.slot)] if tokens else []
                    request.drafts.cached[index] += len(tokens)
                    room -= len(tokens)
                stage.executor.step(rows, logits=False)


def note_rounds(request: Request, most: int, rounds: int, drafted: list[int], accepted: list[int]) -> None:
    """Note rounds of at most `most` drafts; `drafted` and `accepted` count tokens by their position in the round."""
    metrics = request.drafts.metrics
    metrics.rounds += rounds
    reached, kept, missed = rounds, 0, 0
    for place in range(MOST_DRAFTS):
        if place >= most:
            if not drafted[place]:
                break
            reached = min(reached, drafted[place])  # a lookup has proposed more than `most`
        metrics.drafted[place] += drafted[place]
        metrics.accepted[place] += accepted[place]
        missed += reached - accepted[place]  # also where a lookup found nothing
        kept += accepted[place]
        reached = accepted[place]
    if most:
        request.drafts.observe(kept, missed)


def top_probability(logits: FloatArray) -> float:
    """Probability of the most probable token. logits: [vocab]."""
    return float(1 / np.exp(logits - logits.max()).sum())
