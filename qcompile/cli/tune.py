"""Measure plain steps and rounds of speculation by batch and context, and acceptance, for `--gamma auto`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import qcompile
from qcompile import texts
from qcompile.artifact.amend import amend
from qcompile.cli import console
from qcompile.errors import OverflowedError, ResourceError, UsageError
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import AUTO, SpeculationMetrics
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation.costs import GAMMAS, SpeculationPrior, best_gamma

BATCHES = (1, 4, 16)
REPEATS, MOST_REPEATS, ENOUGH_SECONDS = 3, 9, 1.0
"""Repetitions of each measurement: at least REPEATS, up to MOST_REPEATS within ENOUGH_SECONDS per batch and context."""
_SHORT, _LONG = 32, 1024
_OWN_PROMPTS = 8
_HEAD_START = 64
"""Tokens that may be generated before the measurement starts: one step may run several rounds."""
Progress = Callable[[str, int, int], None]


def tune(
    path: Path,
    data: Path | None,
    tokens: int,
    progress: Progress | None = None,
    batches: Sequence[int] = BATCHES,
    **loading: Any,
) -> dict[str, Any]:
    """Measure the artifact at `path` on the prompts of `data` (its own text without), and note the result in it.

    `loading` are further arguments of `qcompile.load`. Batches for which the KV cache is too small are left out.
    Returns the table: {"threads", "acceptance", "table": [{"batch", "context", "plain", "rounds": {gamma: seconds}}]}.
    Raises UsageError for an artifact without drafts, or data that is not lines of JSON with a prompt or a text, and
    ResourceError if the artifact cannot be written.
    """
    if path.is_dir() and not os.access(path, os.W_OK):
        raise ResourceError(f"{path} cannot be written, and measurements are kept there: tune a copy of it")
    with qcompile.load(path, gamma=AUTO, prefix_caching=False, **loading) as llm:
        drafter = llm.engine.speculation.drafter
        if drafter is None:
            raise UsageError(f"{path} has no drafts to tune: build it with a recipe that drafts, or with --draft")
        prompts = _own_prompts(llm) if data is None else _prompts(llm, data)
        batches = [batch for batch in batches if batch <= llm.engine.scheduler.max_batch]
        most = min(llm.context, drafter.max_position)
        if _HEAD_START + tokens >= most:
            room = most - _HEAD_START - 1
            raise UsageError(f"{tokens} tokens do not fit the context of {most}: measure {room} at most (--tokens)")
        long = min(_LONG, max(1, (most - _HEAD_START - tokens) // 2))
        contexts = sorted({min(_SHORT, long), long})
        places = [(batch, context) for batch in batches for context in contexts if _held(llm, batch, context, tokens)]
        total = SpeculationMetrics()
        table = []
        for done, (batch, context) in enumerate(places):
            if progress:
                progress("tuning", done, len(places))
            table.append(_measure(llm, prompts, batch, context, tokens, total))
        tuned = {"threads": llm.threads, "acceptance": _rate(total), "table": table}
    amend(path, tuned=tuned)
    return tuned


def _held(llm: LLM, batch: int, context: int, tokens: int) -> bool:
    """Whether the cache holds `batch` requests until they end. Otherwise some would wait for others, or be evicted."""
    pool = llm.engine.pool
    spare = batch - 1  # a page for each of those that run before the last is admitted
    return batch * pool.pages_for(context + _HEAD_START + tokens) + spare <= pool.total


def _prompts(llm: LLM, data: Path) -> list[list[int]]:
    """The prompts of a JSONL file as tokens; of a prompt longer than the context, the last tokens."""
    try:
        whole = texts.read(data)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {data}: {getattr(error, 'strerror', None) or error}") from error
    prompts = []
    for number, line in texts.lines(whole):
        text = texts.text_of(texts.parsed(line), "prompt", "text")
        if not text:
            raise UsageError(f'{data} line {number}: not a JSON object with a "prompt" or a "text" in Unicode')
        prompts.append(llm.encode(text, cut=True))
    if not prompts:
        raise UsageError(f'{data} is empty: give lines of JSON with a "prompt" or a "text" each')
    return prompts


def _own_prompts(llm: LLM) -> list[list[int]]:
    """Texts that the model generates from the start token, sampled with fixed seeds."""
    start = [llm.bos_token_id or 0]
    every = [SamplingParams(temperature=0.8, seed=seed, max_tokens=64) for seed in range(_OWN_PROMPTS)]
    outputs = llm.generate([start] * len(every), every)
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def _measure(
    llm: LLM, prompts: Sequence[list[int]], batch: int, context: int, tokens: int, total: SpeculationMetrics
) -> dict[str, Any]:
    """Median seconds of a plain step and of a round of each gamma; counts of accepted drafts are added to `total`."""
    group = _Group(llm, [_text(prompts, index, context) for index in range(batch)], tokens)
    seconds: dict[int, list[float]] = {}
    started = time.perf_counter()
    for turn in range(MOST_REPEATS):
        if turn >= REPEATS and time.perf_counter() - started > ENOUGH_SECONDS:
            break
        for gamma in (0, *GAMMAS):
            seconds.setdefault(gamma, []).append(group.run(gamma))
    group.end(total)
    medians = {gamma: statistics.median(times) for gamma, times in seconds.items()}
    rounds = {str(gamma): medians[gamma] for gamma in GAMMAS}
    return {"batch": batch, "context": context, "plain": medians[0], "rounds": rounds}


def _text(prompts: Sequence[list[int]], index: int, context: int) -> list[int]:
    """About `context` tokens of the prompts from the `index`-th on."""
    text: list[int] = []
    for offset in range(len(prompts)):
        text += prompts[(index + offset) % len(prompts)]
        if len(text) >= context:
            break
    return text[-context:]


class _Group:
    """Requests that are measured repeatedly from the ends of their prompts, which are computed once.

    Going back leaves keys and values in the cache that later steps overwrite. Only a hierarchical cache, which rounds
    older tokens, needs its prompts computed again.
    """

    def __init__(self, llm: LLM, texts: list[list[int]], tokens: int) -> None:
        self.engine, self.texts, self.tokens = llm.engine, texts, tokens
        self.engine.overlaps = False  # a step that runs cannot go back
        self.ring = llm.executor.limits.ring_tokens > 0
        self.ended: list[Request] = []
        self.requests: list[Request] = []
        self.begin()

    def begin(self) -> None:
        """Compute the prompts."""
        engine = self.engine
        engine.speculation.gamma = 0
        params = SamplingParams(temperature=0, max_tokens=_HEAD_START + self.tokens, ignore_eos=True)
        self.requests = [engine.add(text, params) for text in self.texts]
        while any(request.sequence.uncomputed != 1 or not request.output.token_ids for request in self.requests):
            engine.step()
            if any(request.output.finish_reason == "error" for request in self.requests):
                raise OverflowedError
        self.lengths = [len(request.sequence.tokens) for request in self.requests]

    def again(self) -> None:
        """Go back to the state after the prompts were computed."""
        if self.ring or any(request.output.finish_reason for request in self.requests):
            for request in self.requests:
                self.engine.cancel(request)
            self.ended += self.requests
            self.begin()
        for request, length in zip(self.requests, self.lengths, strict=True):
            self.engine.rewind(request, length)

    def run(self, gamma: int) -> float:
        """Seconds of a plain step (gamma 0) or of a round of `gamma` drafts."""
        self.again()
        engine, first = self.engine, self.requests[0]
        engine.speculation.gamma = gamma
        metrics = first.drafts.metrics
        seconds, rounds = metrics.draft_seconds + metrics.verify_seconds, metrics.rounds  # of other gammas
        if gamma:
            engine.step()  # the drafts' caches catch up here

        def count() -> int:
            return metrics.rounds if gamma else len(first.sequence.tokens)

        goals = [(request, len(request.sequence.tokens) + self.tokens) for request in self.requests]
        before, start = count(), time.perf_counter()
        while all(len(request.sequence.tokens) < goal and not request.output.finish_reason for request, goal in goals):
            engine.step()
        taken, steps = time.perf_counter() - start, count() - before
        if steps == 0:  # a fast model ran all rounds in one call: take the library's own times
            taken = metrics.draft_seconds + metrics.verify_seconds - seconds
            steps = max(1, metrics.rounds - rounds)
        return taken / steps

    def end(self, total: SpeculationMetrics) -> None:
        """Cancel the requests; the counts of accepted drafts are added to `total`."""
        for request in self.requests:
            self.engine.cancel(request)
        for request in self.ended + self.requests:
            metrics = request.drafts.metrics
            total.drafted = [a + b for a, b in zip(total.drafted, metrics.drafted, strict=True)]
            total.accepted = [a + b for a, b in zip(total.accepted, metrics.accepted, strict=True)]


def _rate(total: SpeculationMetrics) -> float:
    """The probability that a draft is accepted if the drafts before it were."""
    pairs = zip([sum(total.drafted[:1]), *total.accepted], total.drafted, strict=False)
    reached = sum(min(before, drafted) for before, drafted in pairs)
    return min(1.0, sum(total.accepted) / reached) if reached else 0.0


def as_text(tuned: dict[str, Any]) -> str:
    """The table as text: the best gamma and its speedup, by batch and context."""
    prior = SpeculationPrior.load(tuned)
    rows = []
    for entry in prior.table:
        gamma = best_gamma(entry, min(prior.acceptance, 0.995))
        rate, rounds = prior.acceptance, entry.rounds
        speed = (1 - rate ** (gamma + 1)) / max(1 - rate, 1e-9) / rounds[gamma] * entry.plain if gamma else 1.0
        rows.append([str(entry.batch), str(entry.context), f"{entry.plain * 1e3:.3f}", str(gamma), f"{speed:.2f}"])
    header = ["batch", "context", "plain ms", "gamma", "times plain"]
    threads = f", {console.counted(tuned['threads'], 'thread')}" if tuned["threads"] else ""
    return f"acceptance {prior.acceptance:.3f}{threads}\n" + console.table(header, rows)
