"""Many clients' requests through one engine, with marked prompts that begin alike: each must get its own answer.

The cache is small, so that pages are shared, forgotten and taken again all the time, and some requests are cancelled. A
page is poisoned whenever it is taken: what a request reads of it without having written it, or shared it, shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling.params import SamplingParams

BEGINNINGS, OWNERS = 6, ("", "ann", "bob", "cyd")
CANCELLED = 0.05
"""Share of requests that are cancelled, most of them while they run."""
ANSWER = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
_POISON = b"\xff"
"""Bytes that are NaN in every type of a cache's numbers."""


@dataclass
class Found:
    """Of requests: how many had an answer, were cancelled, answered wrongly, and reused tokens.

    foreign: those that reused a page which no request of their owner had computed.
    """

    answered: int = 0
    cancelled: int = 0
    wrong: int = 0
    reused: int = 0
    foreign: int = 0


def marked(draw: random.Random, vocabulary: int, page_tokens: int) -> tuple[int, list[int]]:
    """A beginning, which other prompts have, by its number, and the prompt with a mark of its own."""
    number = draw.randrange(BEGINNINGS)
    common = random.Random(number)
    beginning = [common.randrange(1, vocabulary) for _ in range(page_tokens + 9 * number)]
    return number, beginning + [draw.randrange(1, vocabulary) for _ in range(draw.randrange(3, 12))]


@contextmanager
def poisoned(llm: LLM, kv: dict[str, Any]) -> Iterator[None]:
    """Fill each page, which holds all layers, with poison when it is taken. `kv` is the manifest's."""
    pool, arena = llm.engine.pool, llm.executor._keep[1]  # type: ignore[attr-defined]
    size, take = kv["page_bytes"], pool.take

    def poisoning(count: int) -> list[int]:
        pages = take(count)
        for page in pages:
            arena.view[size * page : size * (page + 1)] = _POISON * size
        return pages

    pool.take = poisoning  # type: ignore[method-assign]
    try:
        yield
    finally:
        pool.take = take  # type: ignore[method-assign]


def references(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The answers to prompts, each alone; `llm` must not remember prompts."""
    return [list(llm.generate([prompt], ANSWER)[0].outputs[0].token_ids) for prompt in prompts]


def ask(llm: LLM, prompts: Sequence[tuple[int, list[int]]], wanted: Sequence[list[int]], count: int) -> Found:
    """Have `llm` answer `count` of the marked prompts, drawn at random, for clients of all OWNERS at once."""
    draw, engine, result = random.Random(0), llm.engine, Found()
    most = 4 * engine.scheduler.max_batch
    open_requests: dict[Any, tuple[int, int, str]] = {}
    computed: set[tuple[int, str]] = set()  # beginnings that a request of the owner may have left
    added = 0
    while added < count or open_requests:
        while added < count and len(open_requests) < most:
            which, owner = draw.randrange(len(prompts)), draw.choice(OWNERS)
            request = engine.add(prompts[which][1], ANSWER, owner=owner)
            open_requests[request] = which, prompts[which][0], owner
            added += 1
        if draw.random() < CANCELLED * engine.scheduler.max_batch / ANSWER.max_tokens:
            request = draw.choice(list(open_requests))
            engine.cancel(request)
            computed.add(open_requests.pop(request)[1:])
            result.cancelled += 1
        for request in engine.step():
            if request.output.finish_reason is None or request not in open_requests:
                continue
            which, *sharing = open_requests.pop(request)
            result.answered += 1
            result.wrong += list(request.output.token_ids) != wanted[which]
            result.reused += request.metrics.cached_tokens > 0
            result.foreign += request.metrics.cached_tokens > 0 and tuple(sharing) not in computed
            computed.add((sharing[0], sharing[1]))
    engine.check()
    return result
