"""Measures a server at all levels, one after another, and collects the report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from qcompile import __version__
from qcompile.cli.load_test import server
from qcompile.cli.load_test.client import session
from qcompile.cli.load_test.figures import Figures, figures
from qcompile.cli.load_test.level import Level, run, warm_up
from qcompile.cli.load_test.workload import Lengths, Query, Recorded, Synthetic, read_prompts
from qcompile.errors import ResourceError, UsageError

Progress = Callable[[str, int, int], None]
_PARTS = 1000
"""Parts of a level, for progress."""
_WARM_RATE = 2
"""Requests before a level of a rate."""


@dataclass(frozen=True)
class Plan:
    """What to measure. prompts: a file of prompts, instead of prompts of `inputs` tokens. prefix: tokens at the start
    of all of them. warmup: requests before each level; None for as many as run at once. limits: seconds by name (see
    figures.py). timeout: seconds for a whole answer."""

    levels: tuple[Level, ...]
    inputs: Lengths
    outputs: Lengths
    prefix: int = 0
    prompts: Path | None = None
    chat: bool = False
    warmup: int | None = None
    limits: Mapping[str, float] | None = None
    timeout: float = 600.0
    seed: int = 0

    def facts(self) -> dict[str, Any]:
        """The workload, for the report."""
        asked = {"prompts": self.prompts.name} if self.prompts else {"input_tokens": str(self.inputs)}
        return asked | {
            "shared_prefix_tokens": self.prefix,
            "output_tokens": str(self.outputs),
            "endpoint": "chat/completions" if self.chat else "completions",
            "seed": self.seed,
        }


def measure(
    plan: Plan, root: str, model: str | None, key: str | None, progress: Progress, each: Callable[[Figures], None]
) -> dict[str, Any]:
    """The report on the server at `root`. `each` gets the figures of a level as soon as it is done.

    Raises ResourceError if the server cannot be reached, or answered no request of a level; UsageError for a plan that
    does not fit it.
    """
    recorded = None if plan.prompts is None else Recorded(read_prompts(plan.prompts), plan.outputs, plan.seed)
    return asyncio.run(_measure(plan, recorded, (root, model, key), progress, each))


async def _measure(
    plan: Plan,
    recorded: Recorded | None,
    place: tuple[str, str | None, str | None],
    progress: Progress,
    each: Callable[[Figures], None],
) -> dict[str, Any]:
    async with session(plan.timeout) as clients:
        progress("asking the server", 0, 1)
        chat = plan.chat or bool(recorded and any(query.given for query in recorded.asked))
        offer = await server.probe(clients, *place, chat)
        plan = replace(plan, chat=chat)
        _check_context(plan, offer.context)
        workload = recorded or await _synthetic(clients, plan, offer)
        queries = workload.queries()
        measured = []
        for number, level in enumerate(plan.levels):

            def tell(share: float, name: str = level.name, before: int = number) -> None:
                progress(f"measuring, {name}", before * _PARTS + round(share * _PARTS), len(plan.levels) * _PARTS)

            measured.append(await _level(clients, plan, offer, level, queries, tell))
            each(measured[-1])
    return {
        "server": {"url": offer.endpoint.root, "model": offer.endpoint.model, "context": offer.context},
        "client": {"qcompile": __version__, "request_fields": list(offer.endpoint.extras)},
        "workload": plan.facts(),
        "limits_seconds": dict(plan.limits or {}),
        "levels": measured,
    }


async def _synthetic(clients: aiohttp.ClientSession, plan: Plan, offer: server.Offer) -> Synthetic:
    """Prompts of the plan's lengths, cut from the package's text."""
    material = await server.material(clients, offer.endpoint)
    return Synthetic(material, plan.inputs, plan.outputs, plan.prefix, plan.seed)


def _check_context(plan: Plan, context: int | None) -> None:
    """Raise UsageError if the mean request does not fit the context."""
    tokens = (0 if plan.prompts else plan.inputs.mean + plan.prefix) + plan.outputs.mean
    if context is not None and tokens > context:
        raise UsageError(f"requests of {tokens} tokens do not fit the context of {context}: ask for fewer tokens")


async def _level(
    clients: aiohttp.ClientSession,
    plan: Plan,
    offer: server.Offer,
    level: Level,
    queries: Iterator[Query],
    tell: Callable[[float], None],
) -> Figures:
    """Warm up, and measure one level. Raises ResourceError if no request was answered."""
    tell(0.0)
    count = (level.concurrency or _WARM_RATE) if plan.warmup is None else plan.warmup
    await warm_up(clients, offer.endpoint, queries, count)
    before = await server.drafts(clients, offer.endpoint) if offer.counts_drafts else {}
    done = await run(clients, offer.endpoint, queries, level, tell)
    after = await server.drafts(clients, offer.endpoint) if offer.counts_drafts else {}
    counted = {name: after[name] - before[name] for name in before} if before and after else None
    measured = figures(done, plan.limits or {}, counted)
    if not measured["requests"] and measured["failed"]:
        why, count = max(measured["failures"].items(), key=lambda item: item[1])
        raise ResourceError(
            f"{offer.endpoint.url} answered none of {measured['failed']} requests at {level.name}: {why}"
        )
    return measured
