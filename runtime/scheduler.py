"""Decides which rows go into the next step: running requests first, then new ones as pages allow.

First come, first served. A request is admitted when the pool has pages for all its tokens. When a running request needs
a page and none is free, the newest running request is preempted: it gives up its pages and is recomputed later. A row's
results do not depend on its step, so its tokens are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from qcompile.runtime.blocks import BlockPool
from qcompile.runtime.executor import Rows
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics
from qcompile.runtime.sampling import Sampler, SamplingParams
from qcompile.runtime.speculate import DraftState
from qcompile.runtime.tokenizer import Detokenizer


@dataclass(eq=False, slots=True)
class Request:
    """One sample of one prompt. `tokens` is the prompt followed by the generated tokens."""

    id: int
    prompt_length: int
    tokens: list[int]
    limit: int
    """Length in tokens at which it ends: prompt plus max_tokens, or the context."""
    params: SamplingParams
    sampler: Sampler
    detokenizer: Detokenizer | None
    output: CompletionOutput
    metrics: RequestMetrics
    computed: int = 0
    """Positions whose keys and values are in the cache."""
    pages: list[int] = field(default_factory=list)
    held_text: str = ""
    """Text that may turn out to be the start of a stop text."""
    drafts: DraftState = field(default_factory=DraftState)

    @property
    def pending(self) -> int:
        """Tokens not in the cache yet; 1 while decoding."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: `counts[i]` rows for `requests[i]`; with `steps` > 1 a burst of that many greedy tokens."""

    requests: list[Request]
    counts: list[int]
    steps: int

    @property
    def decoding(self) -> bool:
        """Whether every request has only its last token to compute."""
        return all(request.pending == 1 for request in self.requests)

    def rows(self, drafts: Sequence[Sequence[int]] = ()) -> list[Rows]:
        """The rows of the step, with `drafts[i]` after the last token of `requests[i]`.

        If a request's last token is among the rows, that row and those of its drafts give logits.
        """
        rows: list[Rows] = []
        for index, (request, count) in enumerate(zip(self.requests, self.counts, strict=True)):
            end = request.computed + count
            tokens = request.tokens[request.computed : end]
            outputs = int(end == len(request.tokens))
            if drafts and drafts[index]:
                tokens += drafts[index]
                outputs += len(drafts[index])
            rows.append(Rows(tokens, request.computed, request.pages, outputs))
        return rows


class Scheduler:
    """Queues requests and assigns pages: up to `max_tokens` rows per step, up to `max_batch` running requests."""

    def __init__(self, pool: BlockPool, max_tokens: int, max_batch: int, draws: bool = False) -> None:
        self.pool, self.max_tokens, self.max_batch = pool, max_tokens, max_batch
        self.draws = draws
        """Whether the executor draws tokens of requests with a temperature."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def release(self, request: Request) -> None:
        """Remove a finished or cancelled request and free its pages."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.pool.give_back(request.pages)

    def preempt(self) -> Request:
        """Preempt the newest running request: it gives its pages back and waits in front of all others."""
        request = self.running.pop()
        self.pool.give_back(request.pages)
        request.computed = 0
        request.drafts.cached = [0] * len(request.drafts.cached)
        self.waiting.appendleft(request)
        self.preemptions += 1
        return request

    def schedule(self, burst: int) -> Plan | None:
        """The next step, with up to `burst` tokens for each request; None if there is no work."""
        self._make_room()
        plan = Plan([], [], 1)
        budget = self.max_tokens
        decoding = [request for request in self.running if request.pending == 1]
        prefilling = [request for request in self.running if request.pending > 1]
        for request in decoding + prefilling:
            budget -= _append(plan, request, budget)
        while self.waiting and budget > 0 and self._admissible(self.waiting[0]):
            request = self.waiting.popleft()
            request.pages.extend(self.pool.take(self.pool.pages_for(len(request.tokens))))
            self.running.append(request)
            budget -= _append(plan, request, budget)
        if not plan.requests:
            return None
        return self.burst(plan, burst) if burst > 1 and len(decoding) == len(plan.requests) else plan

    def burst(self, plan: Plan, steps: int) -> Plan:
        """`plan` (all decoding) with as many steps, up to `steps`, as all its requests have room for."""
        if any(request.params.needs_logits(self.draws) for request in plan.requests):
            return plan
        steps = min(steps, min(request.limit - len(request.tokens) for request in plan.requests))
        return Plan(plan.requests, plan.counts, self.reserve(plan.requests, steps))

    def _admissible(self, request: Request) -> bool:
        """Whether there are pages for all its tokens, and one per running request, so it is not preempted at once."""
        need = self.pool.pages_for(len(request.tokens)) + len(self.running)
        return len(self.running) < self.max_batch and need <= self.pool.free

    def _make_room(self) -> None:
        """Give running requests the pages that their next positions need; preempt the newest where none is free."""
        at = 0
        while at < len(self.running):
            request = self.running[at]
            missing = self.pool.pages_for(len(request.tokens)) - len(request.pages)
            if missing > self.pool.free:
                if self.preempt() is request:
                    return
                continue
            if missing > 0:
                request.pages.extend(self.pool.take(missing))
            at += 1

    def reserve(self, requests: Sequence[Request], tokens: int) -> int:
        """Take pages for `tokens` more tokens of each request (or up to its limit), fewer where pages are short.

        Returns for how many. The last token of a sequence is not in the cache, so a single token always has room.
        """
        while True:
            missing = [
                self.pool.pages_for(min(len(request.tokens) + tokens, request.limit) - 1) - len(request.pages)
                for request in requests
            ]
            if tokens == 1 or sum(max(count, 0) for count in missing) <= self.pool.free:
                break
            tokens //= 2
        for request, count in zip(requests, missing, strict=True):
            if count > 0:
                request.pages.extend(self.pool.take(count))
        return tokens


def _append(plan: Plan, request: Request, budget: int) -> int:
    """Put as many of the request's pending tokens into the step as fit. Returns how many."""
    count = min(request.pending, budget)
    if count:
        plan.requests.append(request)
        plan.counts.append(count)
    return count
