"""Measure plain steps and rounds of speculation by batch and context, and acceptance, for `--gamma auto`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import qcompile
from qcompile import artifact, console
from qcompile.errors import UsageError
from qcompile.runtime.gamma import AUTO, GAMMAS, GammaPolicy, best
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import SpeculationMetrics
from qcompile.runtime.sampling import SamplingParams

BATCHES = (1, 4, 16)
REPEATS = 3
_SHORT, _LONG = 32, 1024
_OWN_PROMPTS = 8
_HEAD_START = 64
"""Tokens that may come before the measurement: one call may take several rounds at once."""
Progress = Callable[[str, int, int], None]


def tune(
    path: Path,
    data: Path | None,
    tokens: int,
    threads: int | None,
    progress: Progress | None = None,
    batches: Sequence[int] = BATCHES,
) -> dict[str, Any]:
    """Measure the artifact at `path` on the prompts of `data` (its own text without), and note the result in it.

    Returns the table: {"threads", "acceptance", "table": [{"batch", "context", "plain", "rounds": {gamma: seconds}}]}.
    Raises UsageError for an artifact without drafts, or data that is not lines of JSON with a prompt or a text.
    """
    with qcompile.load(path, threads=threads, gamma=AUTO) as llm:
        if llm.engine.speculator is None:
            raise UsageError(f"{path} has no drafts to tune: build it with a recipe that drafts, or with --draft")
        prompts = _own_prompts(llm) if data is None else _prompts(llm, data)
        batches = [batch for batch in batches if batch <= llm.engine.scheduler.max_batch]
        most = min(llm.context, llm.engine.speculator.max_position)
        long = min(_LONG, max(1, (most - _HEAD_START - tokens) // 2))
        places = [(batch, context) for batch in batches for context in sorted({min(_SHORT, long), long})]
        total = SpeculationMetrics()
        table = []
        for done, (batch, context) in enumerate(places):
            if progress:
                progress("tuning", done, len(places))
            table.append(_measure(llm, prompts, batch, context, tokens, total))
        found = {"threads": llm.threads, "acceptance": _rate(total), "table": table}
    artifact.amend(path, tuned=found)
    return found


def _prompts(llm: LLM, data: Path) -> list[list[int]]:
    """The prompts of a JSONL file as tokens."""
    try:
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [llm.encode(row.get("prompt") or row["text"]) for row in rows]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f'{data}: needs lines of JSON with a "prompt" or a "text" each: {error}') from error


def _own_prompts(llm: LLM) -> list[list[int]]:
    """What the model writes by itself from the start of a text, drawn with seeds."""
    start = [llm.bos_token_id or 0]
    every = [SamplingParams(temperature=0.8, seed=seed, max_tokens=64) for seed in range(_OWN_PROMPTS)]
    outputs = llm.generate([start] * len(every), every)
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def _measure(
    llm: LLM, prompts: Sequence[list[int]], batch: int, context: int, tokens: int, total: SpeculationMetrics
) -> dict[str, Any]:
    """Median seconds of a plain step and of a round of each gamma; what was accepted is added to `total`."""
    seconds: dict[int, list[float]] = {}
    for _ in range(REPEATS):
        for gamma in (0, *GAMMAS):
            seconds.setdefault(gamma, []).append(_run(llm, prompts, batch, context, tokens, gamma, total))
    medians = {gamma: statistics.median(times) for gamma, times in seconds.items()}
    rounds = {str(gamma): medians[gamma] for gamma in GAMMAS}
    return {"batch": batch, "context": context, "plain": medians[0], "rounds": rounds}


def _run(
    llm: LLM, prompts: Sequence[list[int]], batch: int, context: int, tokens: int, gamma: int, total: SpeculationMetrics
) -> float:
    """Seconds of a step (gamma 0) or round, of `batch` requests that go on from about `context` tokens."""
    engine = llm.engine
    engine.gamma = gamma
    params = SamplingParams(temperature=0, max_tokens=_HEAD_START + tokens, ignore_eos=True)
    requests = []
    for index in range(batch):
        text: list[int] = []
        for offset in range(len(prompts)):
            text += prompts[(index + offset) % len(prompts)]
            if len(text) >= context:
                break
        requests.append(engine.add(text[-context:], params))
    while any(request.pending != 1 or not request.output.token_ids for request in requests):
        engine.step()
    first = requests[0]
    if gamma:
        engine.step()  # the drafts' caches catch up here

    def count() -> int:
        return first.drafts.metrics.rounds if gamma else len(first.tokens)

    goal = min(len(request.tokens) for request in requests) + tokens
    before, start = count(), time.perf_counter()
    while all(len(request.tokens) < goal and request.output.finish_reason is None for request in requests):
        engine.step()
    taken, steps = time.perf_counter() - start, count() - before
    if steps == 0:  # a fast model has made all its rounds in that one call: as the library timed them
        rounds = first.drafts.metrics
        taken, steps = rounds.draft_seconds + rounds.verify_seconds, max(1, rounds.rounds)
    for request in requests:
        engine.cancel(request)
        metrics = request.drafts.metrics
        total.drafted = [a + b for a, b in zip(total.drafted, metrics.drafted, strict=True)]
        total.accepted = [a + b for a, b in zip(total.accepted, metrics.accepted, strict=True)]
    return taken / steps


def _rate(total: SpeculationMetrics) -> float:
    """How likely a draft is accepted where those before it were."""
    pairs = zip([sum(total.drafted[:1]), *total.accepted], total.drafted, strict=False)
    reached = sum(min(before, drafted) for before, drafted in pairs)
    return min(1.0, sum(total.accepted) / reached) if reached else 0.0


def as_text(found: dict[str, Any]) -> str:
    """The table for people: gamma and what it brings, by batch and context."""
    policy = GammaPolicy.load(found)
    rows = []
    for entry in policy.table:
        gamma = best(entry, min(policy.acceptance, 0.995))
        rate, rounds = policy.acceptance, entry.rounds
        speed = (1 - rate ** (gamma + 1)) / max(1 - rate, 1e-9) / rounds[gamma] * entry.plain if gamma else 1.0
        rows.append([str(entry.batch), str(entry.context), f"{entry.plain * 1e3:.3f}", str(gamma), f"{speed:.2f}"])
    header = ["batch", "context", "plain ms", "gamma", "times plain"]
    return f"acceptance {policy.acceptance:.3f}, {found['threads']} threads\n" + console.table(header, rows)
