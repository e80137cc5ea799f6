"""A server at its capacity, at a share of it, at twice of it, and after that: what requests get, and how soon."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from qcompile.cli.load_test.answers import events, read
from qcompile.cli.load_test.client import Endpoint, Recording, send, session
from qcompile.cli.load_test.figures import percentile, times
from qcompile.cli.load_test.level import Level, Run, run
from qcompile.cli.load_test.workload import Lengths, Query, Recorded

EXTRAS = ("counts", "ignore_eos")
"""Extra fields of requests, which this project's server knows."""
MODERATE, TOO_MUCH = 0.7, 2.0
"""Shares of the capacity."""
OVERLOADED = (429, 503)
TEXTS = [
    "def main(",
    "import os\n",
    "class Reader:\n    def ",
    "for i in range(10):\n    ",
    "x = [",
    "# ",
    "a = {",
    "try:",
]


@dataclass(frozen=True)
class Phase:
    """A load and what came of it. answered, refused: seconds from when each request was due to the end of its answer,
    or to its refusal, ordered. wrong: answers unlike those to their prompts alone. lost: why others have no answer."""

    load: str
    seconds: float
    answered: list[float]
    refused: list[float]
    wrong: int
    lost: dict[str, int]
    client: float

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.answered) / self.seconds

    @property
    def p99(self) -> float:
        """Seconds within which 99 of 100 answers came; infinite without answers."""
        return percentile(self.answered, 99) if self.answered else float("inf")

    def told(self) -> dict[str, Any]:
        """Figures for a result file."""
        return {
            "load": self.load,
            "seconds": self.seconds,
            "answered": len(self.answered),
            "answered_per_second": self.rate,
            "answer_seconds": times(self.answered),
            "refused": len(self.refused),
            "refusal_seconds": times(self.refused),
            "slowest_refusal_seconds": max(self.refused, default=None),
            "wrong": self.wrong,
            "lost": self.lost,
            "client_core_share": self.client,
        }


def _text(recording: Recording) -> str:
    return "".join(choice.get("text", "") for _, event in events(recording) for choice in event.get("choices") or [])


async def _known(clients: aiohttp.ClientSession, endpoint: Endpoint, asked: Sequence[Query]) -> dict[str, str]:
    """The answer to each prompt alone."""
    known = {}
    for query in asked:
        recording = await send(clients, endpoint, query)
        assert read(recording).failure is None, read(recording).failure
        known[str(query.prompt)] = _text(recording)
    return known


def _phase(done: Run, known: dict[str, str]) -> Phase:
    answered, refused, lost, wrong = list[float](), list[float](), Counter[str](), 0
    for recording in done.recordings:
        seconds = recording.ended - recording.due
        if recording.failure is None and recording.status in OVERLOADED:
            refused.append(seconds)
        elif (failure := read(recording).failure) is not None:
            lost[failure] += 1
        else:
            answered.append(seconds)
            wrong += _text(recording) != known[str(recording.query.prompt)]
    busy = done.cpu_seconds / max(done.seconds, 1e-9)
    return Phase(done.level.name, done.seconds, sorted(answered), sorted(refused), wrong, dict(lost), busy)


async def campaign(
    endpoint: Endpoint,
    tokens: int,
    clients: int,
    seconds: tuple[float, float],
    rest: float,
    too_much: float = TOO_MUCH,
) -> dict[str, Phase]:
    """All phases: `clients` that wait for their answers, for the first of `seconds`, give the capacity. Then requests
    arrive at random, at a share of it, and at `too_much` of it, for the second; after `rest` seconds, at the share."""
    asked = [Query(text, tokens) for text in TEXTS]
    phases: dict[str, Phase] = {}
    async with session(timeout=120) as connections:
        known = await _known(connections, endpoint, asked)

        async def measure(name: str, level: Level) -> Phase:
            queries = Recorded(tuple(asked), Lengths(tokens), seed=level.seed).queries()
            phases[name] = _phase(await run(connections, endpoint, queries, level, lambda share: None), known)
            return phases[name]

        capacity = (await measure("capacity", Level(seconds[0], None, concurrency=clients))).rate
        await measure("moderate", Level(seconds[1], None, rate=MODERATE * capacity, seed=1))
        await measure("overload", Level(seconds[1], None, rate=too_much * capacity, seed=2))
        await asyncio.sleep(rest)
        await measure("after", Level(seconds[1], None, rate=MODERATE * capacity, seed=1))
    return phases
