"""Runs planned steps on the executor: one step, a multi-step decode, a step with drafts, or rounds of speculation."""

from __future__ import annotations

import time
from collections.abc import Sequence

from qcompile.runtime.engine.choose import ChosenTokens, TokenChooser
from qcompile.runtime.engine.pending import PendingStep
from qcompile.runtime.engine.plan import StepPlan
from qcompile.runtime.engine.postprocess import Postprocessor, Update
from qcompile.runtime.engine.scheduler import Scheduler
from qcompile.runtime.engine.speculative import Speculation
from qcompile.runtime.engine.timing import CallTimer
from qcompile.runtime.request import Request
from qcompile.runtime.sampling import accept
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.inputs import GREEDY, SamplingInputs
from qcompile.runtime.speculation.measurements import GammaChoice
from qcompile.runtime.step import Rows, StepExecutor


class StepRunner:
    """Runs the steps that the scheduler plans, and has the postprocessor append their tokens."""

    def __init__(
        self, executor: StepExecutor, scheduler: Scheduler, postprocessor: Postprocessor, speculation: Speculation
    ) -> None:
        self._executor, self._scheduler, self._postprocessor = executor, scheduler, postprocessor
        self._speculation = speculation
        self.timer = CallTimer()
        self._choice: GammaChoice | None = None  # made by `start`, which leaves the step to `run`

    @property
    def steps(self) -> int:
        """Steps that the next call should have: one if drafts are to be considered first."""
        running = len(self._scheduler.running)
        return 1 if self._speculation.may_draft(running) else self.timer.steps.count(running)

    # ---- asynchronous steps ---------------------------------------------------------------------

    def start(self, after: PendingStep | None) -> PendingStep | None:
        """Plan and start the next step, which runs after the pending step `after`, and do not wait for it.

        None if there is nothing to compute, if the step needs logits, drafts, or the tokens of `after`, or if drafts
        will need what `after` returns. Whether it has drafts follows from the calls before `after`.
        """
        if after and after.is_read:
            return None
        running = self._scheduler.running
        speculates = self._speculation.may_draft(len(running))
        if speculates and not self._speculation.chooser and any(r.sequence.decodes for r in running):
            return None  # it has drafts
        plan = self._scheduler.schedule(self.steps)
        if plan is None or any(request.params.needs_logits(self._executor.samples) for request in plan.requests):
            return None
        if after and not all(r.sampler.foresees and r.prompt_report.complete for r in running):
            return None
        if speculates and plan.outputs:
            plan = self._without_drafts(plan)
            if plan is None:
                return None
        rows = plan.rows()
        is_read = self._speculation.rest(plan)
        if is_read and plan.steps > 1:
            return None
        started = self.timer.begin(plan)
        wait = self._executor.start(rows, plan.steps, self._sampling_inputs(plan, rows))
        if not is_read:
            self._speculation.note_rows(plan.requests, rows, plan.steps)
        if after is None:
            self.timer.note_gap(plan, time.monotonic())  # the executor was idle until here
        return PendingStep.begin(plan, rows, wait, started, is_read)

    def _without_drafts(self, plan: StepPlan) -> StepPlan | None:
        """`plan` as a call of plain steps; None if it may have drafts, or if not all its requests decode."""
        if not (self._speculation.chooser and plan.decoding):
            self._choice = None
            return None
        choice = self._choice or self._speculation.choose(plan)
        self._choice = choice if choice.gamma else None
        return None if choice.gamma else self._extend(plan, choice)

    def _extend(self, plan: StepPlan, choice: GammaChoice) -> StepPlan:
        """`plan` with as many plain steps as a call should have, and at most as many as were chosen."""
        steps = self.timer.steps.count(len(self._scheduler.running))
        return self._scheduler.extend(plan, min(steps, choice.most or steps))

    def finish(self, step: PendingStep) -> list[Update]:
        """Wait for a pending step, and append its tokens."""
        waited_from, began = time.monotonic(), max(step.started, self.timer.ended)
        tokens = step.result()
        now = self.timer.end()
        spared = self._executor.preparations.within(began, step.queued)
        seconds = self.timer.note_pending(step.plan, step.decoding, waited_from, now - began - spared)
        step.end()
        if step.decoding and step.plan.decoding:  # else a request was cancelled meanwhile
            self._speculation.note_steps(step.plan, seconds)
        updates = self._postprocessor.append_all(step.plan, step.rows, tokens, now)
        if step.is_read:
            self._speculation.note_rows(step.plan.requests, step.rows)
        return updates

    # ---- steps that the host waits for ----------------------------------------------------------

    def run(self, plan: StepPlan) -> list[Update]:
        """Run a step and wait for it. With speculation, the step may become rounds or a multi-step decode."""
        started = self.timer.begin(plan)
        self.timer.note_gap(plan, started)
        if self._speculation.may_draft(len(plan.requests)):
            choice, self._choice = self._choice or self._speculation.choose(plan), None
            gammas = self._speculation.gammas(plan, choice.gamma)
            if any(gammas) and self._speculation.in_one_call(plan):
                return self._run_rounds(plan, gammas, started, choice.most)
            if any(gammas):
                return self._run_step(plan, started, self._speculation.drafts(plan, gammas), gammas)
            if plan.decoding:
                plan = self._extend(plan, choice)
        self._speculation.rest(plan)
        if plan.steps > 1:
            return self._run_multi_step(plan, started)
        return self._run_step(plan, started, (), ())

    def _run_multi_step(self, plan: StepPlan, started: float) -> list[Update]:
        """Run a multi-step decode."""
        rows = plan.rows()
        tokens = self._executor.decode(rows, plan.steps, self._sampling_inputs(plan, rows))
        now = self.timer.end()
        self._note_plain_steps(plan, self._seconds(started, now))
        updates = self._postprocessor.append_all(plan, rows, tokens, now)
        self._speculation.note_rows(plan.requests, rows, plan.steps)
        return updates

    def _run_rounds(self, plan: StepPlan, gammas: list[int], started: float, most: int | None) -> list[Update]:
        """Run rounds of speculation in one call: as many as a call should have, at most `most`."""
        batch, timer = len(plan.requests), self.timer
        rounds = timer.rounds.count(batch)
        if timer.ended:
            timer.rounds.note_gap(batch, started - timer.ended)
        result = self._speculation.run_rounds(plan, gammas, min(rounds, most or rounds))
        now = timer.end()
        seconds = self._seconds(started, now) - result.catch_up_seconds
        timer.rounds.note_step(batch, seconds / result.rounds)
        tokens = sum(map(len, result.tokens))
        self._speculation.note_catch_up(plan, gammas, result.catch_up_seconds)
        self._speculation.note_rounds(plan, True, gammas, result.rounds, seconds, tokens)
        pairs = zip(plan.requests, result.tokens, strict=True)
        return [self._postprocessor.append(request, new, now) for request, new in pairs]

    def _run_step(
        self, plan: StepPlan, started: float, drafts: Sequence[list[int]], gammas: Sequence[int]
    ) -> list[Update]:
        """Run one step, in which `drafts[i]`, at most `gammas[i]`, follow the last token of request i."""
        decoding, requests = plan.decoding, plan.requests
        rows = plan.rows(drafts)
        by_logits = [self._needs_logits(request, bool(drafts and drafts[i])) for i, request in enumerate(requests)]
        sampling = [
            _inputs_of(request, row, 0 if on_host else row.outputs - row.known)
            for request, row, on_host in zip(requests, rows, by_logits, strict=True)
        ]
        argmax, logits = self._executor.step(rows, any(by_logits), sampling)
        now = self.timer.end()
        seconds = self._seconds(started, now)
        if not drafts and decoding:
            self._note_plain_steps(plan, seconds)
        updates: list[Update] = []
        at = gained = 0
        for index, (request, row) in enumerate(zip(requests, rows, strict=True)):
            request.sequence.computed += plan.counts[index]
            start, first, at = at, at + row.known, at + row.outputs
            if end := self._postprocessor.note_prompt(request, argmax[start:first], now):
                updates.append(end)
                continue
            if request.sequence.uncomputed:
                continue
            draft, gamma = (drafts[index], gammas[index]) if drafts else ([], 0)
            if by_logits[index] and logits is not None:
                chosen = self._choose(request, draft, logits[first:at])
            else:
                chosen = ChosenTokens(accept.greedy(draft, argmax[first:at]), [])
                request.sampler.took(chosen.tokens)
            self._note_drafts(request, draft, gamma, len(chosen.tokens), seconds)
            updates.append(self._postprocessor.append(request, chosen.tokens, now, chosen.logprobs))
            gained += len(chosen.tokens)
        if gammas and decoding:
            self._speculation.note_rounds(plan, False, gammas, 1, seconds, gained)
        self._speculation.note_rows(requests, rows)
        return updates

    def _note_drafts(self, request: Request, draft: Sequence[int], gamma: int, tokens: int, seconds: float) -> None:
        """Note that a step of `seconds` has verified a draft of at most `gamma` tokens, and has given `tokens`."""
        if draft:
            request.sequence.computed += tokens - 1
            request.drafts.metrics.gamma = len(draft)
            request.drafts.metrics.count(len(draft), tokens - 1)
            request.drafts.metrics.verify_seconds += seconds
        if gamma:
            request.drafts.observe(tokens - 1, int(tokens <= gamma))
        self._speculation.settle(request)

    def _choose(self, request: Request, draft: list[int], logits: FloatArray) -> ChosenTokens:
        """Choose tokens from logits [drafts + 1, vocab]."""
        chooser = TokenChooser(request, self._postprocessor.spell)
        by_rejection = draft and self._speculation.rejects and request.params.temperature
        return chooser.choose_by_rejection(draft, logits) if by_rejection else chooser.choose(draft, logits)

    def _needs_logits(self, request: Request, drafted: bool) -> bool:
        """Whether the host chooses the request's tokens from logits, and not the executor."""
        rejects = drafted and self._speculation.rejects and request.params.temperature > 0
        return rejects or request.params.needs_logits(self._executor.samples)

    def _sampling_inputs(self, plan: StepPlan, rows: Sequence[Rows]) -> list[SamplingInputs]:
        """How the executor chooses the tokens of steps without drafts."""
        pairs = zip(plan.requests, rows, strict=True)
        return [
            GREEDY
            if request.sampler.argmax_only and not row.known
            else _inputs_of(request, row, (row.outputs - row.known) * plan.steps)
            for request, row in pairs
        ]

    def _seconds(self, started: float, ended: float) -> float:
        """What a call took, but for what later calls are spared."""
        return ended - started - self._executor.preparations.within(started, ended)

    def _note_plain_steps(self, plan: StepPlan, seconds: float) -> None:
        """Note the time of a call without drafts."""
        self.timer.steps.note_step(len(plan.requests), seconds / plan.steps)
        self._speculation.note_steps(plan, seconds)


def _inputs_of(request: Request, row: Rows, count: int) -> SamplingInputs:
    """How the executor chooses `count` tokens after a request's rows; it also reports the known tokens among them."""
    first, known = row.start + len(row.tokens) - row.outputs + row.known, request.prompt_report.scored + 1
    tokens = request.sequence.tokens[known : known + row.known]
    return request.sampler.inputs(first, count, known=tokens, skipped=request.sequence.pending_tokens)
