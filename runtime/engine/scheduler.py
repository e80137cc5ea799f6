"""Decides which rows go into the next step: running requests first, then new ones as pages allow.

First come, first served. A request is admitted when the pool has pages for all its tokens. Pages that hold the start of
its text already, computed for other requests, are its own too, unless it wants the logits of their positions. When a
running request needs a page and none is free, the newest running request is preempted: it gives up its pages and is
recomputed later. A row's results do not depend on its step, so its tokens are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from qcompile.runtime.detokenizer import Detokenizer
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.prefixes import CachedPage, Ending, drafted_positions
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics
from qcompile.runtime.sampling.logprobs import DoubleArray, Logprob
from qcompile.runtime.sampling.sampling import Sampler, SamplingParams
from qcompile.runtime.speculation.levels import DraftState
from qcompile.runtime.step import Rows


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
    """Positions whose keys and values are in the cache, while it runs."""
    pages: list[int] = field(default_factory=list)
    scored: int = 0
    """Positions whose next token is in the prompt and needs no report any more."""
    prompt_reports: list[DoubleArray] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Once all of the prompt is reported."""
    flying_rows: int = 0
    """Rows in steps that the executor still runs."""
    flying_tokens: int = 0
    """Tokens that these steps will append."""
    flying_output: int = 0
    """Which output of the last of these steps is the last of these tokens."""
    known: CachedPage | None = None
    """The last of its pages that others can find (runtime/engine/prefixes.py)."""
    held_text: str = ""
    """Text that may turn out to be the start of a stop text."""
    drafts: DraftState = field(default_factory=DraftState)

    @property
    def length(self) -> int:
        """Tokens that it has, or will have when the steps that run have ended."""
        return len(self.tokens) + self.flying_tokens

    @property
    def reached(self) -> int:
        """Positions whose keys and values are in the cache, or will be then."""
        return self.computed + self.flying_rows

    @property
    def pending(self) -> int:
        """Tokens that are in no step yet; 1 while decoding."""
        return self.length - self.reached

    def fly(self, rows: int, tokens: int, output: int) -> None:
        """Note that a step runs with so many of its rows, which appends so many tokens, the last by that output."""
        self.flying_rows += rows
        self.flying_tokens += tokens
        self.flying_output = output

    def land(self, rows: int, tokens: int) -> None:
        """Note that this step has ended."""
        self.flying_rows -= rows
        self.flying_tokens -= tokens

    @property
    def read(self) -> bool:
        """Whether all wanted log probabilities of its prompt are reported."""
        return self.scored >= self.prompt_length - 1

    @property
    def most_cached(self) -> int:
        """Positions that it need not compute if others did: those whose logits it does not report."""
        return len(self.tokens) if self.read else self.scored

    def note_known(self) -> None:
        """Keep the reports of the prompt's tokens that a step has written."""
        if (reports := self.sampler.take_known()) is not None:
            self.prompt_reports.append(reports)
            self.scored += len(reports)


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

        If a request's last token is among the rows, that row and those of its drafts give logits. So do rows before it
        whose next tokens are to be reported. A token that the step before has yet to give is -1 - i, if that is what
        its output i gives.
        """
        rows: list[Rows] = []
        for index, (request, count) in enumerate(zip(self.requests, self.counts, strict=True)):
            start, end = request.reached, request.reached + count
            tokens = request.tokens[start:end] or [-1 - request.flying_output]
            known = max(0, min(end, request.prompt_length - 1) - request.scored)
            outputs = known + int(end == request.length)
            if drafts and drafts[index]:
                tokens += drafts[index]
                outputs += len(drafts[index])
            rows.append(Rows(tokens, start, request.pages, outputs, known))
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
        """Remove a finished or cancelled request and free its pages; idempotent.

        What steps that run compute in vain is in the pages that are freed now: later steps follow them.
        """
        request.computed, request.flying_rows, request.flying_tokens = request.reached, 0, 0
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._give_back(request)

    def preempt(self) -> Request:
        """Preempt the newest running request: it gives its pages back and waits in front of all others."""
        request = self.running.pop()
        self._give_back(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        return request

    def schedule(self, burst: int) -> Plan | None:
        """The next step, with up to `burst` tokens for each request; None if there is no work.

        It may follow one that still runs: requests that reach their limit in that are not in it, and where pages are
        short there is none, as no request can be preempted then.
        """
        if not self._make_room():
            return None
        plan = Plan([], [], 1)
        budget = self.max_tokens
        going = [request for request in self.running if not request.flying_tokens or request.length < request.limit]
        decoding = [request for request in going if request.pending == 1]
        prefilling = [request for request in going if request.pending > 1]
        for request in decoding + prefilling:
            budget -= _append(plan, request, budget)
        if self.waiting and self.pool.prefixes is not None:
            for request in self.running:
                self._remember(request)
        reading = [request for request in going if request.length - request.computed > 1]
        while self.waiting and budget > 0 and self._admit(self.waiting[0], reading):
            reading.append(self.running[-1])
            budget -= _append(plan, self.running[-1], budget)
        if not plan.requests:
            return None
        return self.burst(plan, burst) if burst > 1 and len(decoding) == len(plan.requests) else plan

    def burst(self, plan: Plan, steps: int) -> Plan:
        """`plan` (all decoding) with as many steps, up to `steps`, as all its requests have room for."""
        if any(request.params.needs_logits(self.draws) for request in plan.requests):
            return plan
        steps = min(steps, min(request.limit - request.length for request in plan.requests))
        return Plan(plan.requests, plan.counts, self.reserve(plan.requests, steps))

    def _admit(self, request: Request, prefilling: Sequence[Request]) -> bool:
        """Start the first waiting request, if there are pages for all its tokens and one per running request, so that
        it is not preempted at once. It goes on from the longest prefix that is in the cache."""
        if len(self.running) >= self.max_batch:
            return False
        if self.pool.endings is not None:
            return self._go_on(request, self.pool.endings)
        found = self._find(request, prefilling)
        if found is None:
            return False
        shared = [one.page for one in found]
        missing = self.pool.pages_for(len(request.tokens)) - len(shared)
        idle = sum(not self.pool.held(page) for page in shared)
        if missing + idle + len(self.running) > self.pool.free:
            return False
        self.pool.share(shared)
        request.known = found[-1] if found else None
        levels = range(len(request.drafts.cached))
        drafted = [drafted_positions(found, level, self.pool.page_tokens) for level in levels]
        self._start([*shared, *self.pool.take(missing)], len(shared) * self.pool.page_tokens, drafted)
        return True

    def _go_on(self, request: Request, endings: Sequence[Ending]) -> bool:
        """`_admit` with a hierarchical cache, from the longest text that has ended and that this one begins with."""
        usable = (ending for ending in endings if len(ending.tokens) <= request.most_cached)
        begins = (ending for ending in usable if ending.begins(request.tokens))
        found = max(
            begins, key=lambda ending: len(ending.tokens), default=Ending([], [], [0] * len(request.drafts.cached))
        )
        need = self.pool.pages_for(len(request.tokens))
        if need + len(self.running) > self.pool.free:
            return False
        if found.tokens:
            self.pool.go_on(found)
        missing = need - len(found.pages)
        self._start([*found.pages, *self.pool.take(missing)], len(found.tokens), found.drafted)
        return True

    def _start(self, pages: list[int], computed: int, drafted: Sequence[int]) -> None:
        """Let the first waiting request run, with these pages, of which so many positions are computed."""
        request = self.waiting.popleft()
        request.pages, request.computed, request.drafts.cached = pages, computed, list(drafted)
        if not request.metrics.first_scheduled_time:  # later, what it has computed itself may be there
            request.metrics.cached_tokens = computed
        self.running.append(request)

    def _find(self, request: Request, prefilling: Sequence[Request]) -> list[CachedPage] | None:
        """The request's pages that are in the cache; None while one of `prefilling` computes the one after them."""
        if self.pool.prefixes is None:
            return []
        found = self.pool.prefixes.find(request.tokens)[: request.most_cached // self.pool.page_tokens]
        end = (len(found) + 1) * self.pool.page_tokens
        if (
            end < len(request.tokens)
            and end <= request.most_cached
            and any(other.computed < end and other.tokens[:end] == request.tokens[:end] for other in prefilling)
        ):
            return None
        return found

    def _remember(self, request: Request) -> None:
        """Let other requests find the pages that this one has filled."""
        full = min(request.computed, len(request.tokens)) // self.pool.page_tokens  # past its end it may have drafts
        if self.pool.prefixes is not None and full > (request.known.depth if request.known else 0):
            request.known = self.pool.prefixes.add(request.known, request.tokens, request.pages[:full])

    def _give_back(self, request: Request) -> None:
        """Free the request's pages; their text stays known until they are taken for another."""
        self._remember(request)
        if self.pool.prefixes is not None and request.drafts.cached:
            self.pool.prefixes.note_drafts(request.pages, request.drafts.cached)
        if self.pool.endings is not None and request.pages:
            self._keep(request)
        self.pool.give_back(request.pages)
        request.known = None

    def _keep(self, request: Request) -> None:
        """Keep the request's text and pages, over a hierarchical cache, for one that goes on from them.

        Positions past its end may have been computed: in another group, they may have rounded one that the next token
        after its end reads from the ring.
        """
        count = min(request.computed, len(request.tokens))
        if count and (request.computed - 1) // self.pool.group == (count - 1) // self.pool.group:
            drafted = [min(positions, count) for positions in request.drafts.cached]
            pages = self.pool.pages_for(count)
            self.pool.keep(Ending(request.tokens[:count], request.pages[:pages], drafted))
            del request.pages[:pages]

    def _make_room(self) -> bool:
        """Give running requests the pages that their next positions need; preempt the newest where none is free. False
        if none can be preempted, as a step runs."""
        at = 0
        while at < len(self.running):
            request = self.running[at]
            missing = self.pool.pages_for(request.length) - len(request.pages)
            if missing > self.pool.free:
                if any(running.flying_rows for running in self.running):
                    return False
                if self.preempt() is request:
                    return True
                continue
            if missing > 0:
                request.pages.extend(self.pool.take(missing))
            at += 1
        return True

    def reserve(self, requests: Sequence[Request], tokens: int) -> int:
        """Take pages for `tokens` more tokens of each request (or up to its limit), fewer where pages are short.

        Returns for how many. The last token of a sequence is not in the cache, so a single token always has room.
        """
        while True:
            missing = [
                self.pool.pages_for(min(request.length + tokens, request.limit) - 1) - len(request.pages)
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
