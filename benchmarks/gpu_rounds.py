"""Graphs of rounds on this GPU beside rounds that the host asks for step by step, of the same artifact.

    python benchmarks/gpu_rounds.py ARTIFACT prompts.jsonl [out.json] [--seconds=SECONDS] [--drafts=own,other]

Each level of the artifact (qcompile build MODEL --target h200 --recipe qspec --draft OTHER, or --draft lookup) drafts
alone for the target: the recipe's own draft, another model with a cache of its own, a lookup. `differing` counts tokens
of the graphs that are not plain decoding's, `same` says whether tokens drafted and kept at each place are the host's.
Tokens per second are of whole calls of 96 tokens, prompts included, the best of some that take turns. What out.json
holds of other artifacts stays.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import facts
from qcompile import SamplingParams
from qcompile.runtime.cuda.speculate import CudaLookup, CudaSpeculator
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.speculation.stages import DraftStage

BATCHES = {1: 8, 4: 16, 16: 60}
"""Prompts by how many run at once."""
GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
TOKENS, TURNS, ALIKE = 96, 3, 8
"""Of a prompt; calls of each kind; rounds of a call where the two are compared, whatever they take."""


class Runs:
    """Calls of one loaded artifact, `some` prompts at a time."""

    def __init__(self, llm: qcompile.LLM) -> None:
        self.llm, self.params = llm, SamplingParams(temperature=0, max_tokens=TOKENS)

    def __call__(self, speculator: Any, gamma: int, some: list[Any]) -> tuple[list[list[int]], list[Any], float]:
        """Tokens, what was drafted and kept, and tokens per second."""
        engine = self.llm.engine
        engine.speculation.drafter, engine.speculation.gamma = speculator, gamma
        started = time.perf_counter()
        outputs = self.llm.generate(some, self.params)
        seconds = time.perf_counter() - started
        tokens = [output.outputs[0].token_ids for output in outputs]
        told = [output.speculation for output in outputs]
        kept = [(one.rounds, one.drafted, one.accepted) if one else (0, [], []) for one in told]
        return tokens, kept, sum(map(len, tokens)) / seconds

    def alike(self, speculator: Any, gamma: int, some: list[Any]) -> tuple[list[list[int]], list[Any]]:
        """Tokens and what was drafted and kept, where calls have as many rounds whatever these take."""
        engine: Any = self.llm.engine
        timer = engine.runner.timer
        timer.steps.count = timer.rounds.count = lambda batch: ALIKE
        try:
            return self(speculator, gamma, some)[:2]
        finally:
            del timer.steps.count, timer.rounds.count


def kinds(llm: qcompile.LLM) -> dict[str, tuple[Any, Any]]:
    """What makes rounds as graphs and what makes them step by step, for each level that can draft alone."""
    target: Any = llm.executor
    speculator: Any = llm.engine.speculation.drafter
    result: dict[str, tuple[Any, Any]] = {}
    for level in speculator.stages:
        name = "lookup" if level.executor is None else "own" if level.shares_cache else "other"
        make: Callable[[Any, DraftStage], Any] = CudaSpeculator if level.executor else CudaLookup
        if level.executor or target.plan["lookup"]:
            result[name] = make(target, level), HostSpeculator(target, [level])
    return result


def compare(runs: Runs, pair: tuple[Any, Any], gamma: int, some: list[Any], plain: list[list[int]]) -> dict[str, Any]:
    """One kind of rounds at one gamma."""
    tokens, kept = runs.alike(pair[0], gamma, some)
    differing = sum(
        sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
        for a, b in zip(plain, tokens, strict=True)
    )
    same = (tokens, kept) == runs.alike(pair[1], gamma, some)
    rates = [[runs(speculator, gamma, some)[2] for speculator in pair] for _ in range(TURNS)]
    graphs, host = (max(column) for column in zip(*rates, strict=True))
    rounds = sum(one[0] for one in kept)
    result: dict[str, Any] = {"gamma": gamma, "differing": differing, "same": same, "graphs": graphs, "host": host}
    return result | {"tokens_a_round": 1 + sum(sum(one[2]) for one in kept) / max(1, rounds)}


def main() -> None:
    artifact, prompts, *out = [a for a in sys.argv[1:] if not a.startswith("--")]
    budget = next((float(a.split("=")[1]) for a in sys.argv[1:] if a.startswith("--seconds=")), float("inf"))
    wanted = [name for a in sys.argv[1:] if a.startswith("--drafts=") for name in a.split("=")[1].split(",")]
    started = time.monotonic()
    every = [json.loads(line)["prompt"] for line in Path(prompts).read_text("utf-8").splitlines()]
    results: dict[str, Any] = {**facts(), "tokens": TOKENS, "rounds": []}
    before = {path: json.loads(path.read_text("utf-8")) if path.exists() else {} for path in map(Path, out)}
    with qcompile.load(artifact, max_batch=max(BATCHES), kv_cache_bytes=1 << 30, prefix_caching=False) as llm:
        runs, pairs = Runs(llm), kinds(llm)
        for batch, count in BATCHES.items():
            llm.engine.scheduler.max_batch = batch
            some = every[:count]
            plain = [runs(None, 0, some) for _ in range(TURNS)]
            common = {"batch": batch, "prompts": count, "plain": max(rate for *_, rate in plain)}
            for name, pair in pairs.items():
                if wanted and name not in wanted:
                    continue
                for gamma in GAMMAS if time.monotonic() - started < budget else ():
                    result = {"draft": name, **common, **compare(runs, pair, gamma, some, plain[0][0])}
                    results["rounds"].append(result)
                    print(result, f"{time.monotonic() - started:.0f} s", flush=True)
                    for path, others in before.items():  # after each, as machines are lent by the minute
                        kept = {**others, Path(artifact).name: results}
                        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
