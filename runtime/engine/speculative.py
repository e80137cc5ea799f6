"""Speculative decoding in the engine: how many tokens to draft for which request, and the drafts.

runtime/speculation/ makes drafts and runs rounds. This module asks a drafter for drafts as far as a step, the pages and
the requests' limits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from qcompile.runtime.engine.plan import StepPlan
from qcompile.runtime.outputs import AUTO
from qcompile.runtime.request import Request
from qcompile.runtime.speculation.controller import DraftLag, GammaChoice, GammaController
from qcompile.runtime.speculation.stages import Drafter, Speculator
from qcompile.runtime.step import Rows, StepExecutor


class RoundsResult(NamedTuple):
    """Results of a call of rounds: new tokens of each request, most rounds of a request, seconds without catching up.

    Catching up is filling the drafts' own caches with the tokens of plain steps.
    """

    tokens: list[list[int]]
    rounds: int
    catch_up_seconds: float


@dataclass(eq=False)
class Speculation:
    """Speculative decoding of an engine's requests. All fields but the first two may change between steps.

    reserve: takes pages for tokens (`Scheduler.reserve`). drafter: None if the model has no drafts. gamma: tokens to
    draft per round; 0 for none, AUTO for what `controller` chooses. rejects: whether requests with a temperature accept
    drafts by rejection sampling, which accepts more drafts, but gives other tokens than decoding without drafts.
    """

    executor: StepExecutor
    reserve: Callable[[Sequence[Request], int], int]
    drafter: Drafter | None = None
    gamma: int = 0
    controller: GammaController | None = None
    rejects: bool = False

    @property
    def active(self) -> bool:
        """Whether steps may have drafts."""
        return self.drafter is not None and self.gamma != 0

    def may_draft(self, requests: int) -> bool:
        """Whether a step of `requests` requests may have drafts, and has room for them."""
        return self.drafter is not None and self.gamma != 0 and self.drafter.most(max(1, requests)) > 0

    @property
    def chooser(self) -> GammaController | None:
        """The controller, if it chooses gamma."""
        return self.controller if self.gamma == AUTO and self.drafter else None

    def start(self, request: Request) -> None:
        """Prepare a new request."""
        if self.drafter:
            self.drafter.start(request)

    def finish(self, request: Request) -> None:
        """Free what the drafts hold of a request that has ended, and learn from its acceptance."""
        if self.drafter:
            self.drafter.release(request)
        if self.controller:
            self.controller.note_finished(request.drafts.metrics)

    def settle(self, request: Request) -> None:
        """Note that a step has verified drafts of a request, or has appended a token without drafts."""
        if self.drafter:
            self.drafter.settle(request)

    def rest(self, plan: StepPlan) -> bool:
        """The executor's next call runs `plan` without drafts. Returns whether the drafter reads what it returns: see
        `Drafter.rest`."""
        return self.drafter is not None and self.drafter.rest(plan.steps if plan.decoding else 0)

    def note_rows(self, requests: Sequence[Request], rows: Sequence[Rows], steps: int = 1) -> None:
        """Note that the executor has computed rows, and that the tokens after them are appended."""
        if self.drafter:
            self.drafter.note(requests, rows, steps)

    # ---- what to draft --------------------------------------------------------------------------

    def choose(self, plan: StepPlan) -> GammaChoice:
        """How many tokens to draft in the step of `plan`. Only requests that are decoding count."""
        if self.gamma != AUTO or self.controller is None:
            return GammaChoice(self.gamma)
        decoding = [request for request in plan.requests if request.sequence.decodes]
        if not decoding:
            return GammaChoice(0)
        rows = self.drafter.behind(decoding) if self.drafter else 0
        left = sum(request.call_length - len(request.sequence.tokens) for request in decoding) / len(decoding)
        return self.controller.choose(decoding, self.in_one_call(plan), DraftLag(rows, left))

    def in_one_call(self, plan: StepPlan) -> bool:
        """Whether several steps or rounds of `plan` can be one call of the drafter."""
        if not (plan.decoding and isinstance(self.drafter, Speculator)):
            return False
        if all(request.params.argmax_only for request in plan.requests):
            return True
        if any(self._undrafted(request) for request in plan.requests):
            return False
        samples = self.executor.samples and not self.rejects and self.drafter.samples_in_rounds(plan.requests)
        return samples and not any(request.params.needs_logits(samples) for request in plan.requests)

    def _undrafted(self, request: Request) -> bool:
        """Whether a request has no drafts, as the executor cannot ask for the masks of its grammar in rounds."""
        return request.sampler.grammar is not None and not self.executor.asks_for_masks

    def gammas(self, plan: StepPlan, gamma: int) -> list[int]:
        """How many tokens to draft for each request of a step; 0 for requests that are not decoding."""
        if not (self.drafter and gamma):
            return [0] * len(plan.requests)
        limits = self.executor.limits
        room = min(limits.max_tokens - sum(plan.counts), limits.max_outputs - plan.outputs)
        most = min(self.drafter.most(len(plan.requests)), room // len(plan.requests))
        wanted = [gamma] * len(plan.requests)
        if self.gamma == AUTO and self.controller and plan.decoding:
            wanted = self.controller.each(plan.requests, gamma)
        gammas = []
        for request, each in zip(plan.requests, wanted, strict=True):
            left = min(request.call_length, self.drafter.max_position) - len(request.sequence.tokens) - 1
            drafted = request.sequence.decodes and not self._undrafted(request)
            gammas.append(max(0, min(each, most, left)) if drafted else 0)
        return gammas

    # ---- drafting -------------------------------------------------------------------------------

    def drafts(self, plan: StepPlan, gammas: Sequence[int]) -> list[list[int]]:
        """Drafts for each request of a step, as far as pages suffice: greedy, or sampled with its parameters."""
        assert self.drafter
        drafting = [index for index, gamma in enumerate(gammas) if gamma]
        room = self.reserve([plan.requests[index] for index in drafting], max(gammas) + 1) - 1
        drafts: list[list[int]] = [[] for _ in gammas]
        draw = partial(self.drafter.draw, distributions=self.rejects)
        for propose, greedy in ((self.drafter.propose, True), (draw, False)):
            chosen = [index for index in drafting if (plan.requests[index].params.temperature == 0) is greedy]
            if chosen and room:
                each = [min(gammas[index], room) for index in chosen]
                for index, draft in zip(chosen, propose([plan.requests[i] for i in chosen], each), strict=True):
                    drafts[index] = draft
        return drafts

    def run_rounds(self, plan: StepPlan, gammas: Sequence[int], most: int) -> RoundsResult:
        """Run up to `most` rounds in one call, as far as pages suffice. Advances the requests' computed positions."""
        assert isinstance(self.drafter, Speculator)
        wanted = max(gammas) + 1
        tokens = self.reserve(plan.requests, most * wanted)
        rounds = max(1, tokens // wanted)
        ends = []
        for request, gamma in zip(plan.requests, gammas, strict=True):
            limit = request.call_length
            ends.append(
                min(len(request.sequence.tokens) + tokens, limit, self.drafter.max_position if gamma else limit)
            )
        new, run = self.drafter.rounds(plan.requests, gammas, rounds, ends)
        return RoundsResult(new, run, self.drafter.catch_up_seconds)

    # ---- measurements ---------------------------------------------------------------------------

    def note_steps(self, plan: StepPlan, seconds: float) -> None:
        """Note a call of plain steps."""
        if self.chooser:
            whole = self.in_one_call(plan)
            self.chooser.measurements(plan.requests, whole).full = not self.may_draft(len(plan.requests))
            self.chooser.note_steps(plan.requests, whole, plan.steps, seconds)

    def note_catch_up(self, plan: StepPlan, gammas: Sequence[int], seconds: float) -> None:
        """Note the time that filling the drafts' own caches took before a call of rounds."""
        if self.chooser:
            self.chooser.note_catch_up(plan.requests, True, max(gammas), seconds)

    def note_rounds(
        self, plan: StepPlan, whole: bool, gammas: Sequence[int], rounds: int, seconds: float, tokens: int
    ) -> None:
        """Note a call of rounds, which gave `tokens` tokens in all. whole: as in `GammaController.choose`."""
        if self.chooser:
            each = tokens / len(plan.requests)
            self.chooser.note_rounds(plan.requests, whole, max(gammas), rounds, seconds, each)
