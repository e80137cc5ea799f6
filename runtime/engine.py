"""Continuous batching: each step schedules requests, runs the model, and handles the new tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from qcompile.errors import OverflowedError, ResourceError
from qcompile.runtime import accept
from qcompile.runtime.blocks import BlockPool
from qcompile.runtime.executor import FloatArray, Rows, StepExecutor
from qcompile.runtime.gamma import AUTO, Choice, Tempo, observe
from qcompile.runtime.logprobs import logprobs_of, reported_logprobs
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics
from qcompile.runtime.sampling import GREEDY, Sampler, SamplingParams
from qcompile.runtime.scheduler import Plan, Request, Scheduler
from qcompile.runtime.speculate import Drafter, Speculator
from qcompile.runtime.tokenizer import Detokenizer, spelled

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BURST_SECONDS = 16e-3
"""Target time of one call of greedy decoding: long enough to hide Python's overhead, short enough to stream."""
_MAX_BURST = 128
NO_TOKEN = -1
"""Takes the place of a token whose logits are not finite, also in the library's results."""
_FIRST_GUESS = 4e-3
"""Assumed seconds of a step before any was timed; makes the first call short in case the model is slow."""


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
        self.executor, self.pool, self.tokenizer = executor, pool, tokenizer
        self.scheduler = Scheduler(pool, executor.limits.max_tokens, max_batch, executor.draws)
        self.context = min(executor.limits.max_position, pool.most_tokens)
        self._eos = frozenset(eos)
        self._next_id = 0
        self._step_seconds: dict[int, float] = {}  # by number of decoding requests; of rounds: negative
        self._spell = cache(partial(spelled, tokenizer)) if tokenizer else None

    def add(self, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> Request:
        """Queue one sample of a checked prompt (at least one token, and room in the context for one more)."""
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
        )
        if params.logprobs is not None:
            request.output.logprobs, request.output.cumulative_logprob = [], 0.0
        if self.speculator:
            self.speculator.start(request)
        self._next_id += 1
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now and free its pages. Does nothing if it has ended."""
        if request.output.finish_reason is None:
            self._finish(request, "abort")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check(self) -> None:
        """Raise RuntimeError if a page is lost or held twice."""
        self.pool.check(*(request.pages for request in self.scheduler.running))

    def step(self) -> list[Request]:
        """Run one step. Returns the requests that gained tokens; finished ones have their finish_reason set."""
        burst = self._burst(len(self.scheduler.running))
        plan = self.scheduler.schedule(1 if self.speculator and self.gamma else burst)
        if plan is None:
            return []
        started = time.monotonic()
        for request in plan.requests:
            if not request.metrics.first_scheduled_time:
                request.metrics.first_scheduled_time = started
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
        """Run as many rounds as take about BURST_SECONDS and have pages, at most `most`."""
        wanted = max(gammas) + 1
        rounds = self._burst(-len(plan.requests))
        tokens = self.scheduler.reserve(plan.requests, min(rounds, most or rounds) * wanted)
        rounds = max(1, tokens // wanted)
        ends = [
            min(len(request.tokens) + tokens, request.limit, speculator.max_position if gamma else request.limit)
            for request, gamma in zip(plan.requests, gammas, strict=True)
        ]
        gained, rounds_run = speculator.rounds(plan.requests, gammas, rounds, ends)
        now = time.monotonic()
        self._note_seconds(-len(plan.requests), (now - started) / rounds_run)
        if self.tempo and self.gamma == AUTO:
            new = sum(map(len, gained)) / len(gained)
            seconds = now - started - speculator.catch_up_seconds
            self.tempo.drafted(plan.requests, True, max(gammas), rounds_run, seconds, new)
        for request, new_tokens in zip(plan.requests, gained, strict=True):
            self._append_tokens(request, new_tokens, now)
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

    def _burst(self, batch: int) -> int:
        """Greedy steps that take about BURST_SECONDS with this many requests; for a negative number, rounds."""
        seconds = self._step_seconds.get(batch, _FIRST_GUESS)
        return max(1, min(_MAX_BURST, round(BURST_SECONDS / seconds)))

    def _note_seconds(self, batch: int, seconds: float) -> None:
        """Update the moving average of a step's time. Limited, as a single slow call may be due to other programs."""
        known = self._step_seconds.setdefault(batch, seconds)
        self._step_seconds[batch] = known + 0.25 * (min(seconds, 2 * known) - known)

    def _note_plain_steps(self, plan: Plan, steps: int, seconds: float) -> None:
        self._note_seconds(len(plan.requests), seconds / steps)
        if self.speculator and self.tempo and self.gamma == AUTO:
            self.tempo.stepped(plan.requests, self._in_one_call(plan), steps, seconds)

    def _run_burst(self, plan: Plan, started: float) -> list[Request]:
        batch, steps = len(plan.requests), plan.steps
        draws = [request.sampler.draws(request.computed, steps) for request in plan.requests]
        tokens = self.executor.decode(plan.rows(), steps, draws)
        now = time.monotonic()
        self._note_plain_steps(plan, steps, now - started)
        for index, request in enumerate(plan.requests):
            request.computed += steps
            request.sampler.took(tokens[index::batch])
            self._append_tokens(request, tokens[index::batch], now)
        return plan.requests

    def _run_step(
        self, plan: Plan, started: float, drafts: Sequence[list[int]], gammas: Sequence[int] = ()
    ) -> list[Request]:
        """Run one step, in which `drafts[i]` follow the last token of request i; `gammas[i]` were asked for."""
        decoding = plan.decoding
        rows = plan.rows(drafts)
        by_logits = [self._needs_logits(request, bool(drafts and drafts[i])) for i, request in enumerate(plan.requests)]
        draws = [
            GREEDY if python else request.sampler.draws(row.start + len(row.tokens) - row.outputs, row.outputs)
            for request, row, python in zip(plan.requests, rows, by_logits, strict=True)
        ]
        argmax, logits = self.executor.step(rows, any(by_logits), draws)
        now = time.monotonic()
        if not drafts and decoding:
            self._note_plain_steps(plan, 1, now - started)
        advanced: list[Request] = []
        at = gained = 0
        for index, (request, count) in enumerate(zip(plan.requests, plan.counts, strict=True)):
            request.computed += count
            if request.pending:
                continue
            draft = drafts[index] if drafts else []
            end = at + len(draft) + 1
            first, at = at, end
            if by_logits[index] and logits is not None:
                tokens = self._choose(request, draft, logits[first:end])
            else:
                tokens = accept.greedy(draft, argmax[first:end])
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
            self._append_tokens(request, tokens, now)
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
            found = logprobs_of(logits, token, request.params.logprobs or 0, self._spell)
            output.add_logprobs([token], [found])
        return token

    def _append_tokens(self, request: Request, tokens: list[int], now: float) -> None:
        """Append new tokens. Finishes the request at an end of text, a stop text, its limit, or NO_TOKEN."""
        reason: str | None = None
        if NO_TOKEN in tokens:
            tokens, reason = tokens[: tokens.index(NO_TOKEN)], "error"
        if not request.params.ignore_eos and not self._eos.isdisjoint(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in self._eos) + 1]
            reason = "stop"
        output, metrics = request.output, request.metrics
        if not output.token_ids:
            metrics.first_token_time = now
        if request.detokenizer:
            if request.params.stops:
                tokens = self._push_until_stop(request, tokens)
            else:
                output.text += request.detokenizer.push(tokens)
        request.tokens += tokens
        output.token_ids += tokens
        if (reports := request.sampler.take_reports()) is not None:
            output.add_logprobs(tokens, reported_logprobs(reports, tokens, self._spell))
        output.drop_logprobs()
        if output.stop_reason is not None:
            reason = "stop"
        elif reason in (None, "error") and len(request.tokens) >= request.limit:
            reason = "length"
        if reason:
            metrics.finished_time = now
            self._finish(request, reason)

    def _push_until_stop(self, request: Request, tokens: list[int]) -> list[int]:
        """Decode tokens into text up to the first stop text. Returns the tokens used."""
        assert request.detokenizer is not None
        output, stops = request.output, request.params.stops
        before, held = request.detokenizer.clone(), request.held_text
        text = held + request.detokenizer.push(tokens)
        if _first_stop(text, stops):
            # Decode again token by token: the request ends with the token that completes the stop text.
            request.detokenizer, text = before, held
            for count, token in enumerate(tokens, start=1):
                text += request.detokenizer.push([token])
                if found := _first_stop(text, stops):
                    at, output.stop_reason = found
                    output.text += text[:at]
                    request.held_text = ""
                    return tokens[:count]
        keep = _possible_start(text, stops)
        output.text += text[: len(text) - keep]
        request.held_text = text[len(text) - keep :]
        return tokens

    def _finish(self, request: Request, reason: str) -> None:
        output = request.output
        if not request.metrics.finished_time:
            request.metrics.finished_time = time.monotonic()
        if request.detokenizer and output.stop_reason is None:
            text = request.held_text + request.detokenizer.push([], last=True)
            if found := _first_stop(text, request.params.stops):  # in text that was held back
                at, output.stop_reason = found
                text, reason = text[:at], reason if reason == "abort" else "stop"
            output.text += text
        output.finish_reason = reason
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


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Index and text of the earliest stop text; None without one."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a prefix of a stop text."""
    for size in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
