"""Decides which rows the next step has: those of running requests first, then of waiting ones as pages allow.

Requests are served in the order of their priorities, and of their arrival. A request is admitted when the pool has
pages for all its tokens. Pages that already hold the start of its text, computed for other requests, are shared, unless
the request wants the logits of their positions. When a running request needs a page and none is free, the newest
running request is preempted: it gives its pages back and is recomputed later. A row's results do not depend on its
step, so its tokens are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.plan import StepPlan, StepRoom
from qcompile.runtime.engine.prefixes import CachedPage, CachedText, cached_positions
from qcompile.runtime.engine.slots import NO_SLOT, SlotPool
from qcompile.runtime.engine.snapshots import Snapshots
from qcompile.runtime.lora.table import Adapters
from qcompile.runtime.request import Request


class Scheduler:
    """Queues requests and assigns pages.

    A step has up to `max_tokens` rows, `max_outputs` of them with logits (0: all). Up to `max_batch` requests run.
    """

    def __init__(
        self, pool: BlockPool, max_tokens: int, max_batch: int, samples: bool = False, max_outputs: int = 0
    ) -> None:
        self.pool, self.max_tokens, self.max_batch = pool, max_tokens, max_batch
        self.max_outputs = max_outputs or max_tokens
        self.slots = SlotPool(max_batch)
        """The slots of recurrent states."""
        self.snapshots: Snapshots | None = None
        """Copies of recurrent states, without which a model with states reuses no pages; None: it has no states."""
        self.drafts_have_states = False
        """Whether a draft has recurrent states of its own, which no cached page holds."""
        self.adapters: Adapters | None = None
        """The adapters that requests may have; None if there are none."""
        self.samples = samples
        """Whether the executor samples the tokens of requests with a temperature."""
        self.asks_for_masks = True
        """Whether calls of several steps ask for the masks of their later steps (`StepExecutor.asks_for_masks`)."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request behind those with the same or a lower `priority`: lower numbers run first."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].params.priority > request.params.priority:
            place -= 1
        self.waiting.insert(place, request)

    def release(self, request: Request) -> None:
        """Remove a finished or cancelled request and free its pages; idempotent.

        Pending steps still write to these pages, but later steps run after them.
        """
        request.sequence.abandon_steps()
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

    def schedule(self, steps: int) -> StepPlan | None:
        """The next step, or a multi-step decode of up to `steps` steps. None if there is nothing to compute.

        The step may follow a pending one: requests that reach their limit in the pending step are left out, and if a
        request needs a page and none is free, the result is None, as no request can be preempted then.
        """
        self._keep_states()
        if not self._make_room():
            return None
        plan = StepPlan([], [], 1)
        room = StepRoom(self.max_tokens, self.max_outputs)
        unfinished = [request for request in self.running if not _ends_in_pending_step(request)]
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in unfinished:
            (decoding if request.sequence.decodes else prefilling).append(request)
        for request in decoding + prefilling:
            room.append(plan, request)
        if self.waiting and self.pool.prefixes is not None:
            for request in self.running:
                self._note_full_pages(request)
        if self.waiting:
            self._admit_waiting(plan, room, unfinished)
        if not plan.requests:
            return None
        return self.extend(plan, steps) if steps > 1 and len(decoding) == len(plan.requests) else plan

    def extend(self, plan: StepPlan, steps: int) -> StepPlan:
        """`plan`, in which all requests decode, as a multi-step decode.

        It gets up to `steps` steps, as many as all requests have room for. It stays one step if a request needs logits
        on the host, or masks that the executor cannot ask for.
        """
        if any(request.params.needs_logits(self.samples) for request in plan.requests):
            return plan
        if not self.asks_for_masks and any(request.sampler.grammar for request in plan.requests):
            return plan
        steps = min(steps, *(request.call_length - request.sequence.length for request in plan.requests))
        return StepPlan(plan.requests, plan.counts, self.reserve(plan.requests, steps))

    def reserve(self, requests: Sequence[Request], tokens: int) -> int:
        """Take pages for up to `tokens` more tokens of each request, or up to its limit; fewer where pages are short.

        Returns the number of tokens that have room. The last token of a sequence is not in the cache, so a single
        token always has room.
        """
        while True:
            missing = [
                self.pool.pages_for(min(request.sequence.length + tokens, request.spec.max_length) - 1)
                - len(request.sequence.pages)
                for request in requests
            ]
            if tokens == 1 or sum(max(count, 0) for count in missing) <= self.pool.free:
                break
            tokens //= 2
        for request, count in zip(requests, missing, strict=True):
            if count > 0:
                request.sequence.pages.extend(self.pool.take(count))
        return tokens

    def _make_room(self) -> bool:
        """Give running requests the pages that their next positions need; preempt the newest request if none is free.

        False if a request would have to be preempted while a step is pending.
        """
        at = 0
        size = self.pool.page_tokens
        while at < len(self.running):
            request = self.running[at]
            if request.sequence.length <= request.sequence.room:
                at += 1
                continue
            missing = self.pool.pages_for(request.sequence.length) - len(request.sequence.pages)
            if missing > 0 and missing > self.pool.free:
                if any(running.sequence.pending_rows for running in self.running):
                    return False
                if self.preempt() is request:
                    return True
                continue
            if missing > 0:
                request.sequence.pages.extend(self.pool.take(missing))
            request.sequence.room = -(-request.sequence.length // size) * size
            at += 1
        return True

    # ---- admission ------------------------------------------------------------------------------

    def _admit_waiting(self, plan: StepPlan, room: StepRoom, unfinished: Sequence[Request]) -> None:
        """Start waiting requests as rows and pages allow, beside the `unfinished` ones that run."""
        computing = [request for request in unfinished if request.sequence.length - request.sequence.computed > 1]
        while self.waiting and room.rows > 0 and self._admit(self.waiting[0], computing):
            computing.append(self.running[-1])
            room.append(plan, self.running[-1])

    def _admit(self, request: Request, computing: Sequence[Request]) -> bool:
        """Start the first waiting request if the pool has enough pages. Returns whether it was started.

        Enough are pages for all its tokens, and one more for each running request, so that it is not preempted at once.
        The request continues from the longest prefix of its text that is in the cache. `computing` are the requests
        that have more than one token to compute.
        """
        if len(self.running) >= self.max_batch or not self.slots.free:
            return False
        if self.pool.texts is not None:
            return self._admit_after_text(request, self.pool.texts)
        shared = self._cached_pages(request, computing)
        if shared is None:
            return False
        pages = [node.page for node in shared]
        missing = self.pool.pages_for(len(request.sequence.tokens)) - len(pages)
        idle = sum(not self.pool.held(page) for page in pages)
        if missing + idle + len(self.running) > self.pool.free:
            return False
        self.pool.share(pages)
        request.sequence.cached_page = shared[-1] if shared else None
        held = [] if self.drafts_have_states else shared
        stages = range(len(request.drafts.cached))
        drafted = [cached_positions(held, stage, self.pool.page_tokens) for stage in stages]
        self._start([*pages, *self.pool.take(missing)], len(pages) * self.pool.page_tokens, drafted)
        if self.snapshots and shared:
            self.snapshots.restore(shared[-1], request.sequence.slot)
        return True

    def _admit_after_text(self, request: Request, texts: Sequence[CachedText]) -> bool:
        """`_admit` with a hierarchical cache: the request continues the longest whole text that it begins with."""
        tokens = request.sequence.tokens
        own = (text for text in texts if text.sharing == request.spec.sharing)
        usable = (text for text in own if len(text.tokens) <= request.reusable)
        continued = (text for text in usable if text.is_prefix_of(tokens))
        nothing = CachedText([], [], [0] * len(request.drafts.cached))
        text = max(continued, key=lambda text: len(text.tokens), default=nothing)
        need = self.pool.pages_for(len(tokens))
        if need + len(self.running) > self.pool.free:
            return False
        if text.tokens:
            self.pool.reuse_text(text)
        missing = need - len(text.pages)
        self._start([*text.pages, *self.pool.take(missing)], len(text.tokens), text.drafted)
        return True

    def _start(self, pages: list[int], computed: int, drafted: Sequence[int]) -> None:
        """Let the first waiting request run with `pages`, in which `computed` positions are computed already.

        `drafted` are the positions that each draft stage's own cache holds.
        """
        request = self.waiting.popleft()
        sequence = request.sequence
        sequence.pages, sequence.computed, request.drafts.cached = pages, computed, list(drafted)
        sequence.slot = self.slots.take()
        if self.adapters:
            self.adapters.mark(pages[0], request.params.lora)
        if not request.metrics.first_scheduled_time:  # a preempted request may find pages that it has computed itself
            request.metrics.cached_tokens = computed
        self.running.append(request)

    def _cached_pages(self, request: Request, computing: Sequence[Request]) -> list[CachedPage] | None:
        """The request's pages that are in the cache. None if the request should wait, because a request of `computing`
        is about to compute the page after them, which both can share."""
        if self.pool.prefixes is None:
            return []
        tokens = request.sequence.tokens
        nodes = self.pool.prefixes.find(tokens, request.spec.sharing)[: request.reusable // self.pool.page_tokens]
        if self.snapshots:
            usable = self.snapshots.usable(nodes)
            request.sequence.state_ends = self._state_ends(request, nodes, len(usable), self.snapshots.apart)
            nodes = usable
        end = (len(nodes) + 1) * self.pool.page_tokens
        if (
            end < len(tokens)
            and end <= request.reusable
            and any(
                other.sequence.computed < end and other.sequence.tokens[:end] == tokens[:end]
                for other in computing
                if other.sequence.embeds is None and other.spec.sharing == request.spec.sharing
            )
        ):
            return None
        return nodes

    # ---- copies of states -----------------------------------------------------------------------

    def _state_ends(self, request: Request, known: Sequence[CachedPage], usable: int, apart: int) -> list[int]:
        """Positions before which a step of the request ends, so that its states can be kept there.

        Later requests may share its whole prompt, or only the `known` pages, where it parts from an earlier text that
        goes on. A text that ends there is what the request continues: nothing parts. The first `usable` of these pages
        have a copy. Another copy is at least `apart` positions behind, unless an earlier text has all its pages, too.
        """
        size, whole = self.pool.page_tokens, (len(request.sequence.tokens) - 1) // self.pool.page_tokens
        parts = bool(known and known[-1].children)
        ends = {len(known)} if parts else set[int]()
        if whole == len(known) or (whole - (len(known) if parts else usable)) * size >= apart:
            ends.add(whole)
        return [pages * size for pages in sorted(ends - {0})]

    def _keep_states(self) -> None:
        """Keep the states of requests that have reached a position of their `state_ends`, or do in a pending step: the
        copy runs after that step, and before the next one."""
        for request in self.running if self.snapshots else ():
            sequence = request.sequence
            if self.snapshots and sequence.scheduled in sequence.state_ends:
                self._note_full_pages(request)
                if sequence.cached_page and sequence.cached_page.attached:
                    self.snapshots.keep(sequence.cached_page, sequence.slot)

    # ---- end ------------------------------------------------------------------------------------

    def _note_full_pages(self, request: Request) -> None:
        """Let other requests find the pages that this one has filled, or fills in pending steps before theirs."""
        sequence = request.sequence
        if sequence.embeds is not None:  # tokens do not tell what the pages hold
            return
        # Positions past the last token, of drafts, do not count.
        full = min(sequence.scheduled, len(sequence.tokens)) // self.pool.page_tokens
        if self.pool.prefixes is not None and full > (sequence.cached_page.depth if sequence.cached_page else 0):
            filled = sequence.pages[:full]
            page = self.pool.prefixes.add(sequence.cached_page, sequence.tokens, filled, request.spec.sharing)
            sequence.cached_page = page

    def _give_back(self, request: Request) -> None:
        """Free the request's pages. Their text stays in the cache until they are taken for another text."""
        sequence = request.sequence
        self._note_full_pages(request)
        if self.pool.prefixes is not None and request.drafts.cached:
            self.pool.prefixes.note_drafts(sequence.pages, request.drafts.cached)
        if self.pool.texts is not None and sequence.pages and sequence.embeds is None:
            self._keep_text(request)
        self.pool.give_back(sequence.pages)
        self.slots.give_back(sequence.slot)
        sequence.cached_page, sequence.slot, sequence.room = None, NO_SLOT, 0

    def _keep_text(self, request: Request) -> None:
        """Keep the request's text and pages, over a hierarchical cache, for a request that continues the text.

        The text is not kept if positions of another group, past its end, have been computed (drafts). Their step may
        have rounded a group that the token after the end still reads from the ring.
        """
        sequence = request.sequence
        count = min(sequence.computed, len(sequence.tokens))
        if count and (sequence.computed - 1) // self.pool.group == (count - 1) // self.pool.group:
            drafted = [min(positions, count) for positions in request.drafts.cached]
            pages = self.pool.pages_for(count)
            kept = sequence.tokens[:count], sequence.pages[:pages]
            self.pool.keep_text(CachedText(*kept, drafted, request.spec.sharing))
            del sequence.pages[:pages]


def _ends_in_pending_step(request: Request) -> bool:
    """Whether the request reaches its limit in a pending step."""
    sequence = request.sequence
    return sequence.pending_tokens > 0 and sequence.length >= request.spec.max_length
