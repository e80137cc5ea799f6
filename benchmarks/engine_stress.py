"""5,000 requests through a cache at a quarter of what they ask for, 30 % of them cancelled at random moments.

    python benchmarks/engine_stress.py [--requests 5000] [--recipe qspec] [--draft lookup] [--target cpu]

Every output that completes must be that of its request in an engine without cancellation or prefix caching, no page
may be lost, and no request may starve; how long they waited is stated. Half of all prompts begin with one of four.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile import SamplingParams
from qcompile.cli import console
from qcompile.runtime.llm import LLM
from qcompile.runtime.request import Request

ROOT = Path(__file__).parents[1]
BATCH = 16
DOOMED = 0.36
"""Share of requests that are to be cancelled; a sixth of them end before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "samples" / "pycode-1m")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--recipe", default="qspec")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "stress", help="where the artifact goes")
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_stress.json")
    arguments = parser.parse_args()
    artifact = arguments.work / arguments.recipe
    qcompile.build(
        str(arguments.model), artifact, target=arguments.target, recipe=arguments.recipe, drafts=arguments.draft
    )
    draw = random.Random(0)
    with qcompile.load(artifact, max_batch=BATCH, prefix_caching=False) as llm:
        work = [request(draw, llm.vocab_size) for _ in range(arguments.requests)]
        wanted, _ = run(llm, work, [])
        bytes_a_page = artifact_page_bytes(llm)
        # A hierarchical cache's ring takes pages, too.
        pages = [llm.executor.limits.pages_for(len(prompt) + (params.max_tokens or 0)) for prompt, params in work]
    demand = round(statistics.mean(pages) * BATCH)
    cancelled = sorted(draw.sample(range(len(work)), round(DOOMED * len(work))))
    small = max(max(pages) + 1, demand // 4)
    with qcompile.load(artifact, max_batch=BATCH, kv_cache_bytes=small * bytes_a_page) as llm:
        got, facts = run(llm, work, cancelled)
        facts |= {"preemptions": llm.engine.scheduler.preemptions, "pages": llm.engine.pool.total, "demand": demand}
    finished = [index for index, result in enumerate(got) if result[0] != "abort"]
    facts["completed"] = len(finished)
    facts["differing"] = sum(got[index] != wanted[index] for index in finished)
    console.log(str(facts))
    where = {"target": arguments.target} | ({} if arguments.target == "cpu" else gpu())
    write_result(arguments.out, {**where, "recipe": arguments.recipe, "drafts": arguments.draft, **facts})


def gpu() -> dict[str, Any]:
    """Device and versions; imported here, since a CPU needs no Triton."""
    from benchmarks.gpu_common import facts

    return facts()


def artifact_page_bytes(llm: LLM) -> int:
    """Bytes of a page over all paths' caches."""
    runtime = llm.manifest["runtime"]
    caches = [runtime["kv"], *(level["kv"] for level in runtime["levels"] if level.get("kv"))]
    return sum(cache["page_bytes"] for cache in caches)


def request(draw: random.Random, vocab: int) -> tuple[list[int], SamplingParams]:
    """A request of 1 to 350 tokens for 1 to 160 more, one in three drawn at a temperature."""
    prompt = [draw.randrange(vocab) for _ in range(draw.choice((1, 9, 40, 63, 65, 130, 200)))]
    if draw.random() < 1 / 2:
        start = random.Random(draw.randrange(4))
        prompt = [start.randrange(vocab) for _ in range(start.choice((70, 128, 150)))] + prompt
    options: dict[str, Any] = {"temperature": 0, "max_tokens": draw.randint(1, 160), "ignore_eos": True}
    if draw.random() < 1 / 3:
        options |= {"temperature": 0.7, "seed": draw.randrange(1 << 30)}
    return prompt, SamplingParams(**options)


def run(
    llm: LLM, work: list[tuple[list[int], SamplingParams]], cancelled: list[int]
) -> tuple[list[Any], dict[str, Any]]:
    """All requests, some cancelled on their way; (reason, tokens) of each, and figures."""
    draw = random.Random(1)
    engine = llm.engine
    started = time.monotonic()
    requests: list[Request] = [engine.add(prompt, params) for prompt, params in work]
    doomed = [requests[index] for index in cancelled]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        # Those that are running now as well as those that still wait.
        for victim in [r for r in engine.scheduler.running if r in doomed and draw.random() < 0.3]:
            engine.cancel(victim)
            doomed.remove(victim)
        if doomed and draw.random() < 0.1:
            engine.cancel(doomed.pop(draw.randrange(len(doomed))))
        if steps % 100 == 0:
            engine.check()
    engine.check()
    if engine.pool.used:
        raise SystemExit(f"{engine.pool.used} pages are lost")
    waits = [r.metrics.finished_time - r.metrics.arrival_time for r in requests]
    late = [i for i, r in enumerate(requests) if r.output.finish_reason != "abort"]
    # First come, first served: how far a request finished behind its place in the queue.
    order = sorted(late, key=lambda i: requests[i].metrics.finished_time)
    behind = max((sorted_place - place for sorted_place, place in enumerate(map(late.index, order))), default=0)
    facts = {
        "requests": len(work),
        "cancelled": sum(r.output.finish_reason == "abort" for r in requests),
        "seconds": round(time.monotonic() - started, 2),
        "steps": steps,
        "longest_wait_seconds": round(max(waits), 2),
        "finished_behind_its_place_at_most": behind,
        "cached_tokens_share": round(sum(r.metrics.cached_tokens for r in requests) / sum(len(p) for p, _ in work), 3),
    }
    return [(r.output.finish_reason, r.output.token_ids) for r in requests], facts


if __name__ == "__main__":
    main()
