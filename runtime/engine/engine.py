"""Continuous batching: each step schedules requests, runs the model, and handles the new tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from qcompile.errors import OverflowedError, ResourceError
from qcompile.runtime.detokenizer import Detokenizer, spelled
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.bursts import Bursts
from qcompile.runtime.engine.flight import Flight
from qcompile.runtime.engine.scheduler import Plan, Request, Scheduler
from qcompile.runtime.engine.stops import end_text, extend_text
from qcompile.runtime.options import AUTO
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics
from qcompile.runtime.sampling import accept
from qcompile.runtime.sampling.logprobs import logprobs_of, prompt_logprobs, reported_logprobs
from qcompile.runtime.sampling.sampling import Draws, FloatArray, Sampler, SamplingParams
from qcompile.runtime.speculation.gamma import Choice, Tempo, observe
from qcompile.runtime.speculation.levels import Drafter, Speculator
from qcompile.runtime.step import Rows, StepExecutor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NO_TOKEN = -1
"""Takes the place of a token whose logits are not finite, also in the library's results."""
_WAITED = 1e-4
"""Seconds of waiting for a step from which on its time is known."""


@dataclass(frozen=True, slots=True)
class _Gain:
    """New tokens of a request, and why it ends with them, if it does."""

    request: Request
    tokens: list[int]
    reason: str | None


class Engine:
    """Runs requests to completion, batched. Not safe for two threads."""

    def __init__(
        self,
        executor: StepExecutor,
        pool: BlockPool,
        tokenizer: Tokenizer | None,
        eos: Sequence[int],
        max_batch: int,
        speculator: Drafter | None = None,
        gamma: int = 0,
        tempo: Tempo | None = None,
    ) -> None:
        self.speculator, self.gamma, self.tempo = speculator, gamma, tempo
        self.rejects = False
        """Whether requests with a temperature accept drafts by rejection sampling: it accepts more of them, but gives
        other tokens than without drafts."""
        self.overlaps = executor.overlaps
        """Whether a step may run on the executor while the host handles the one before."""
        self.executor, self.pool, self.tokenizer = executor, pool, tokenizer
        self.scheduler = Scheduler(pool, executor.limits.max_tokens, max_batch, executor.draws)
        self.context = min(executor.limits.max_position, pool.most_tokens)
        self._eos = frozenset(eos)
        self._next_id = 0
        self._bursts = Bursts()
        self._flight: Flight | None = None
        self._gains: list[_Gain] = []  # of steps whose text was not handled yet
        self._ended = 0.0  # when the last call of the executor ended
        self._spell = cache(partial(spelled, tokenizer)) if tokenizer else None

    def add(self, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> Request:
        """Queue one sample of a checked prompt: at least one token, and room in the context for one more, if one may
        follow. The first sample alone reports the prompt."""
        reads = params.prompt_logprobs is not None and index == 0
        asked = self.context if params.max_tokens is None else len(prompt) + params.max_tokens
        request = Request(
            id=self._next_id,
            prompt_length=len(prompt),
            tokens=list(prompt),
            limit=min(asked, self.context),
            params=params,
            sampler=Sampler(params, index, prompt, self.executor.limits.vocab),
            detokenizer=Detokenizer(self.tokenizer, prompt) if self.tokenizer else None,
            output=CompletionOutput(index),
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            scored=0 if reads else len(prompt) - 1,
            prompt_logprobs=[None] if reads and len(prompt) == 1 else None,
        )
        if params.logprobs is not None:
            request.output.logprobs, request.output.cumulative_logprob = [], 0.0
        if self.speculator:
            self.speculator.start(request)
        self._next_id += 1
        if params.max_tokens == 0 and request.read:
            self._gains.append(_Gain(request, [], "length"))
        else:
            self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now and free its pages. Does nothing if it has ended."""
        if request.output.finish_reason is None:
            self._finish(request, "abort")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._gains)

    def check(self) -> None:
        """Raise RuntimeError if a page is lost or held twice."""
        self.pool.check(*(request.pages for request in self.scheduler.running))

    def step(self) -> list[Request]:
        """Run one step. Returns the requests that gained tokens; finished ones have their finish_reason set.

        An executor that can runs the next step meanwhile, and even the one after that is queued before the host waits
        for the first: it is planned without knowing the first one's tokens. Text, stop texts and outputs are handled
        while a step runs, and a request that its text ends has computed some tokens in vain.
        """
        behind = self._take_off() if self._flight else None
        self._land()
        self._flight = behind or (self._take_off() if self.overlaps else None)
        gains, self._gains = self._gains, []
        told = [gain.request for gain in gains if self._tell(gain)]
        return told if self._flight else told + self._run_now()

    def _take_off(self) -> Flight | None:
        """Start the next step, behind the one that runs, if one does, and do not wait for it.

        None if there is none, or if its tokens need logits, drafts, or those of the step that runs.
        """
        drafts, running = self.speculator and self.gamma, self.scheduler.running
        if drafts and any(request.pending == 1 for request in running):
            return None
        plan = self.scheduler.schedule(1 if drafts else self._bursts.steps(len(running)))
        if plan is None or any(self._needs_logits(request, False) for request in plan.requests):
            return None
        if self._flight and not all(request.read and request.sampler.foresees for request in running):
            return None
        rows = plan.rows()
        if drafts and any(row.outputs for row in rows):
            return None
        started = self._start_clock(plan)
        wait = self.executor.start(rows, plan.steps, self._draws(plan, rows))
        if not self._flight:
            self._note_gap(plan, time.monotonic())  # the executor waited until here
        flight = Flight(plan, rows, wait, started, plan.decoding)
        flight.begin()
        return flight

    def _land(self) -> None:
        """Wait for the step that runs, if any, and note its tokens in `_gains`."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        plan, waits, began = flight.plan, time.monotonic(), max(flight.started, self._ended)
        tokens = flight.wait()
        self._ended = now = time.monotonic()
        seconds, known = (now - began) / plan.steps, self._bursts.step_seconds.get(len(plan.requests))
        # Where the host comes too late, a step took less than that.
        if flight.decoding and (now - waits > _WAITED or known is None or seconds < known):
            self._bursts.note_step(len(plan.requests), seconds)
        flight.end()
        self._gains += self._advance(plan, flight.rows, tokens, now)

    def _draws(self, plan: Plan, rows: Sequence[Rows]) -> list[Draws]:
        """How the executor chooses the tokens of a step or burst without drafts."""
        pairs = zip(plan.requests, rows, strict=True)
        return [self._draws_of(request, row, (row.outputs - row.known) * plan.steps) for request, row in pairs]

    def _draws_of(self, request: Request, row: Rows, count: int) -> Draws:
        """How the executor chooses `count` tokens after a request's rows; it reports the known ones among these."""
        first, known = row.start + len(row.tokens) - row.outputs + row.known, request.scored + 1
        tokens = request.tokens[known : known + row.known]
        return request.sampler.draws(first, count, known=tokens, skipped=request.flying_tokens)

    def _advance(self, plan: Plan, rows: Sequence[Rows], tokens: Sequence[int], now: float) -> list[_Gain]:
        """Append the tokens of a step, one for each request that has its last token in it, or of a burst [steps,
        requests], flattened."""
        gains, batch, at = [], len(plan.requests), 0
        for index, (request, row) in enumerate(zip(plan.requests, rows, strict=True)):
            start, first, at = at, at + row.known, at + row.outputs
            new = list(tokens[index::batch] if plan.steps > 1 else tokens[first:at])
            if request.output.finish_reason is not None:  # cancelled, or ended by a stop text, while the step ran
                continue
            request.computed += len(row.tokens) * plan.steps
            if end := self._note_known(request, tokens[start:first], now):
                gains.append(end)
            elif new:
                request.sampler.took(new)
                gains.append(self._append_tokens(request, new, now))
        return gains

    def _note_known(self, request: Request, chosen: Sequence[int], now: float) -> _Gain | None:
        """Note that a step has reported tokens of the prompt; `chosen` are what it chose instead. Returns the end of
        the request, if it ends here."""
        request.note_known()
        if NO_TOKEN in chosen:
            return self._end(request, [], "error", now)
        only_read = request.limit == request.prompt_length and request.read
        return self._end(request, [], "length", now) if only_read else None

    def _end(self, request: Request, tokens: list[int], reason: str, now: float) -> _Gain:
        """Free the pages of a request that ends with these tokens."""
        request.metrics.finished_time = now
        self.scheduler.release(request)
        return _Gain(request, tokens, reason)

    def _start_clock(self, plan: Plan) -> float:
        """The time at which a step starts; notes it in requests that it is the first of."""
        started = time.monotonic()
        for request in plan.requests:
            if not request.metrics.first_scheduled_time:
                request.metrics.first_scheduled_time = started
        return started

    def _note_gap(self, plan: Plan, started: float) -> None:
        """Note how long the executor had nothing to do before a step that began at `started`."""
        if plan.decoding and self._ended:
            self._bursts.note_gap(len(plan.requests), started - self._ended)

    def _run_now(self) -> list[Request]:
        """Run one step, and wait for it."""
        burst = self._bursts.steps(len(self.scheduler.running))
        plan = self.scheduler.schedule(1 if self.speculator and self.gamma else burst)
        if plan is None:
            return []
        started = self._start_clock(plan)
        self._note_gap(plan, started)
        if self.speculator and self.gamma:
            choice = self._choose_gamma(plan)
            gammas = self._gammas(plan, self.speculator, choice.gamma) if choice.gamma else []
            if any(gammas):
                return self._speculate(plan, gammas, self.speculator, started, choice.most)
            if plan.decoding:
                plan = self.scheduler.burst(plan, min(burst, choice.most or burst))
        if plan.steps > 1:
            return self._run_burst(plan, started)
        return self._run_step(plan, started, ())

    def _choose_gamma(self, plan: Plan) -> Choice:
        """How many tokens to draft in the step of `plan`. Only requests that are decoding count."""
        if self.gamma != AUTO or self.tempo is None:
            return Choice(self.gamma)
        decoding = [request for request in plan.requests if request.pending == 1]
        return self.tempo.choose(decoding, self._in_one_call(plan)) if decoding else Choice(0)

    def _in_one_call(self, plan: Plan) -> bool:
        """Whether many steps or rounds of `plan` can be one call of the speculator."""
        if not (plan.decoding and isinstance(self.speculator, Speculator)):
            return False
        if all(request.params.argmax_only for request in plan.requests):
            return True
        draws = self.executor.draws and not self.rejects and self.speculator.draws_in_rounds(plan.requests)
        return draws and not any(request.params.needs_logits(draws) for request in plan.requests)

    def _gammas(self, plan: Plan, speculator: Drafter, gamma: int) -> list[int]:
        """How many tokens to draft for each request of a step; 0 for requests that are not decoding."""
        room = self.executor.limits.max_tokens - sum(plan.counts)
        most = min(speculator.most(len(plan.requests)), room // len(plan.requests))
        wanted = [gamma] * len(plan.requests)
        if self.gamma == AUTO and self.tempo and plan.decoding:
            wanted = self.tempo.each(plan.requests, gamma)
        gammas = []
        for request, each in zip(plan.requests, wanted, strict=True):
            left = min(request.limit, speculator.max_position) - len(request.tokens) - 1
            gammas.append(max(0, min(each, most, left)) if request.pending == 1 else 0)
        return gammas

    def _speculate(
        self, plan: Plan, gammas: list[int], speculator: Drafter, started: float, most: int | None
    ) -> list[Request]:
        """Draft and verify: several rounds in one call where possible, else one round."""
        if self._in_one_call(plan) and isinstance(speculator, Speculator):
            return self._run_rounds(plan, gammas, speculator, started, most)
        return self._run_step(plan, started, self._drafts(plan, gammas, speculator), gammas)

    def _run_rounds(
        self, plan: Plan, gammas: list[int], speculator: Speculator, started: float, most: int | None
    ) -> list[Request]:
        """Run as many rounds as a call should have (runtime/engine/bursts.py) and have pages, at most `most`."""
        wanted = max(gammas) + 1
        rounds = self._bursts.steps(-len(plan.requests))
        tokens = self.scheduler.reserve(plan.requests, min(rounds, most or rounds) * wanted)
        rounds = max(1, tokens // wanted)
        ends = [
            min(len(request.tokens) + tokens, request.limit, speculator.max_position if gamma else request.limit)
            for request, gamma in zip(plan.requests, gammas, strict=True)
        ]
        if self._ended:
            self._bursts.note_gap(-len(plan.requests), started - self._ended)
        gained, rounds_run = speculator.rounds(plan.requests, gammas, rounds, ends)
        self._ended = now = time.monotonic()
        self._bursts.note_step(-len(plan.requests), (now - started) / rounds_run)
        if self.tempo and self.gamma == AUTO:
            new = sum(map(len, gained)) / len(gained)
            seconds = now - started - speculator.catch_up_seconds
            self.tempo.drafted(plan.requests, True, max(gammas), rounds_run, seconds, new)
        for request, new_tokens in zip(plan.requests, gained, strict=True):
            self._tell(self._append_tokens(request, new_tokens, now))
        return plan.requests

    def _drafts(self, plan: Plan, gammas: list[int], speculator: Drafter) -> list[list[int]]:
        """Drafts for each request of a step, as far as pages suffice: greedy, or sampled with its parameters."""
        drafting = [index for index, gamma in enumerate(gammas) if gamma]
        room = self.scheduler.reserve([plan.requests[index] for index in drafting], max(gammas) + 1) - 1
        drafts: list[list[int]] = [[] for _ in gammas]
        draw = partial(speculator.draw, distributions=self.rejects)
        for propose, greedy in ((speculator.propose, True), (draw, False)):
            chosen = [index for index in drafting if (plan.requests[index].params.temperature == 0) is greedy]
            if chosen and room:
                each = [min(gammas[index], room) for index in chosen]
                for index, draft in zip(chosen, propose([plan.requests[i] for i in chosen], each), strict=True):
                    drafts[index] = draft
        return drafts

    def _note_plain_steps(self, plan: Plan, steps: int, seconds: float) -> None:
        self._bursts.note_step(len(plan.requests), seconds / steps)
        if self.speculator and self.tempo and self.gamma == AUTO:
            self.tempo.stepped(plan.requests, self._in_one_call(plan), steps, seconds)

    def _run_burst(self, plan: Plan, started: float) -> list[Request]:
        rows = plan.rows()
        tokens = self.executor.decode(rows, plan.steps, self._draws(plan, rows))
        self._ended = now = time.monotonic()
        self._note_plain_steps(plan, plan.steps, now - started)
        return [gain.request for gain in self._advance(plan, rows, tokens, now) if self._tell(gain)]

    def _run_step(
        self, plan: Plan, started: float, drafts: Sequence[list[int]], gammas: Sequence[int] = ()
    ) -> list[Request]:
        """Run one step, in which `drafts[i]` follow the last token of request i; `gammas[i]` were asked for."""
        decoding = plan.decoding
        rows = plan.rows(drafts)
        by_logits = [self._needs_logits(request, bool(drafts and drafts[i])) for i, request in enumerate(plan.requests)]
        draws = [
            self._draws_of(request, row, 0 if python else row.outputs - row.known)
            for request, row, python in zip(plan.requests, rows, by_logits, strict=True)
        ]
        argmax, logits = self.executor.step(rows, any(by_logits), draws)
        self._ended = now = time.monotonic()
        if not drafts and decoding:
            self._note_plain_steps(plan, 1, now - started)
        advanced: list[Request] = []
        at = gained = 0
        for index, (request, row) in enumerate(zip(plan.requests, rows, strict=True)):
            request.computed += plan.counts[index]
            start, first, at = at, at + row.known, at + row.outputs
            if end := self._note_known(request, argmax[start:first], now):
                advanced.append(request)
                self._tell(end)
                continue
            if request.pending:
                continue
            draft = drafts[index] if drafts else []
            if by_logits[index] and logits is not None:
                tokens = self._choose(request, draft, logits[first:at])
            else:
                tokens = accept.greedy(draft, argmax[first:at])
                request.sampler.took(tokens)
            if draft:
                request.computed += len(tokens) - 1
                request.drafts.metrics.gamma = len(draft)
                request.drafts.metrics.count(len(draft), len(tokens) - 1)
                request.drafts.metrics.verify_seconds += now - started
            if gammas and gammas[index]:
                observe(request, len(tokens) - 1, int(len(tokens) <= gammas[index]))
            if self.speculator:
                self.speculator.settle(request)
            advanced.append(request)
            self._tell(self._append_tokens(request, tokens, now))
            gained += len(tokens)
        if self.tempo and self.gamma == AUTO and gammas and decoding:
            self.tempo.drafted(plan.requests, False, max(gammas), 1, now - started, gained / len(plan.requests))
        return advanced

    def _needs_logits(self, request: Request, drafted: bool) -> bool:
        """Whether the request's tokens are chosen from logits, not by the executor."""
        rejects = drafted and self.rejects and request.params.temperature > 0
        return rejects or request.params.needs_logits(self.executor.draws)

    def _choose(self, request: Request, draft: list[int], logits: FloatArray) -> list[int]:
        """The accepted drafts, and one token more or NO_TOKEN. logits: [drafts + 1, vocab]."""
        if not (draft and self.rejects and request.params.temperature):
            return accept.drawn(draft, lambda place: self._draw(request, logits[place]))
        sampler, kept = request.sampler, 0

        def target(place: int) -> accept.Distribution:
            nonlocal kept
            if place:
                sampler.note(self._note_logprob(request, logits[place - 1], draft[place - 1]))
                kept = place
            return sampler.distribution(logits[place])

        try:
            tokens = accept.rejection(draft, request.drafts.proposed, target, sampler.fresh)
        except OverflowedError:
            return [*draft[:kept], NO_TOKEN]
        sampler.note(self._note_logprob(request, logits[len(tokens) - 1], tokens[-1]))
        return tokens

    def _draw(self, request: Request, logits: FloatArray) -> int:
        """Draw the request's next token from its logits [vocab]; NO_TOKEN where they are not finite."""
        try:
            return self._note_logprob(request, logits, request.sampler.draw(logits))
        except OverflowedError:
            return NO_TOKEN

    def _note_logprob(self, request: Request, logits: FloatArray, token: int) -> int:
        """Record the log probability of a token of the request, and return the token. logits: [vocab]."""
        output = request.output
        if output.logprobs is not None:
            output.add_logprobs([token], [logprobs_of(logits, token, request.params.logprobs or 0, self._spell)])
        return token

    def _append_tokens(self, request: Request, tokens: list[int], now: float) -> _Gain:
        """Append new tokens, without text. Frees the pages at an end of text, the request's limit, or NO_TOKEN."""
        reason: str | None = None
        if NO_TOKEN in tokens:
            tokens, reason = tokens[: tokens.index(NO_TOKEN)], "error"
        if not request.params.ignore_eos and not self._eos.isdisjoint(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in self._eos) + 1]
            reason = "stop"
        output, metrics = request.output, request.metrics
        if not output.token_ids:
            metrics.first_token_time = now
        request.tokens += tokens
        output.token_ids += tokens
        if reason in (None, "error") and len(request.tokens) >= request.limit:
            reason = "length"
        return self._end(request, tokens, reason, now) if reason else _Gain(request, tokens, None)

    def _tell(self, gain: _Gain) -> bool:
        """Add the text and the log probabilities of new tokens, which a stop text may end. False if the request was
        cancelled since."""
        request, output, tokens = gain.request, gain.request.output, gain.tokens
        if output.finish_reason is not None:
            return False
        if (surplus := len(tokens) - extend_text(request, tokens)) > 0:
            tokens = tokens[:-surplus]
            del request.tokens[-surplus:], output.token_ids[-surplus:]
        if request.prompt_reports and request.read and gain.reason != "error":
            pieces, request.prompt_reports = request.prompt_reports, []
            most = request.params.prompt_logprobs or 0
            request.prompt_logprobs = prompt_logprobs(request.tokens, pieces, self._spell, most)
        if (reports := request.sampler.take_reports()) is not None:
            output.add_logprobs(tokens, reported_logprobs(reports, tokens, self._spell, request.params.logprobs))
        output.drop_logprobs()
        if output.stop_reason is not None or gain.reason:
            self._finish(request, gain.reason or "stop")
        return True

    def _finish(self, request: Request, reason: str) -> None:
        output = request.output
        if not request.metrics.finished_time:
            request.metrics.finished_time = time.monotonic()
        end_text(request)
        output.finish_reason = "stop" if output.stop_reason is not None and reason != "abort" else reason
        self.scheduler.release(request)
        if self.speculator:
            self.speculator.release(request)
        if self.tempo:
            self.tempo.finished(request.drafts.metrics)

    def forward(self, sequences: Sequence[Sequence[int]], chunk: int) -> Iterator[tuple[int, int, FloatArray]]:
        """Logits of every position of sequences of equal length, `chunk` positions of each per step.

        Yields (sequence index, first position, logits [positions, vocab]); the logits are valid until the next item.
        Takes pages of its own. Running requests may be preempted for them and are recomputed later.
        """
        self._land()
        length, rows = len(sequences[0]), self.executor.limits.max_tokens
        chunk = min(chunk, length, rows)
        need = self.pool.pages_for(length)
        together = max(1, min(rows // chunk, self.pool.total // need, len(sequences)))
        for first in range(0, len(sequences), together):
            group = range(first, min(first + together, len(sequences)))
            while self.pool.free < need * len(group) and self.scheduler.running:
                self.scheduler.preempt()
            if self.pool.free < need * len(group):
                raise ResourceError(f"{length} tokens need {need} KV pages, {self.pool.free} are free")
            pages = {index: self.pool.take(need) for index in group}
            try:
                for start in range(0, length, chunk):
                    end = min(start + chunk, length)
                    batch = [Rows(sequences[i][start:end], start, pages[i], end - start) for i in group]
                    _, logits = self.executor.step(batch, logits=True)
                    assert logits is not None
                    for at, index in enumerate(group):
                        yield index, start, logits[at * (end - start) : (at + 1) * (end - start)]
            finally:
                for held in pages.values():
                    self.pool.give_back(held)
