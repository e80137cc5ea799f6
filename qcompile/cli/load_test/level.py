"""Runs one level: a number of clients that wait for their answers, or requests at random times of a mean rate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp

from qcompile.cli.load_test.client import Endpoint, Recording, send
from qcompile.cli.load_test.workload import Query

TICK_SECONDS = 0.02
"""How often the client measures how late its own work is, and shows progress."""

_WARM_TOKENS = 16


@dataclass(frozen=True)
class Level:
    """A load: `concurrency` clients, or else `rate` requests per second, which arrive as a Poisson process.

    It sends no more requests after `seconds`, or when `requests` were sent; those that run are waited for.
    """

    seconds: float
    requests: int | None
    concurrency: int = 0
    rate: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """`concurrency 4` or `rate 2.5`."""
        return f"concurrency {self.concurrency}" if self.concurrency else f"rate {self.rate:g}"

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start at which requests are due, for a rate."""
        source, at = random.Random(self.seed), 0.0
        while (at := at + source.expovariate(self.rate)) < self.seconds:
            yield at


@dataclass
class Run:
    """A level that ran: its recordings, and what the client itself took.

    seconds: from the first request to the end of the last. cpu_seconds: CPU time of the client. lags: how late the
    client's event loop was, in seconds, at each tick.
    """

    level: Level
    recordings: list[Recording] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    lags: list[float] = field(default_factory=list)


async def warm_up(session: aiohttp.ClientSession, endpoint: Endpoint, queries: Iterator[Query], count: int) -> None:
    """Send `count` requests at once, with short answers, and wait for them."""
    short = [next(queries) for _ in range(count)]
    asked = [Query(query.prompt, min(query.output_tokens, _WARM_TOKENS), query.given) for query in short]
    await asyncio.gather(*(send(session, endpoint, query) for query in asked))


async def run(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    queries: Iterator[Query],
    level: Level,
    progress: Callable[[float], None],
) -> Run:
    """Run a level; `progress` is told its share done."""
    done = Run(level)
    start, cpu = time.perf_counter(), time.process_time()
    watch = asyncio.ensure_future(_watch(done, start, progress))
    try:
        drive = _closed if level.concurrency else _open
        await drive(session, endpoint, queries, done, start)
        done.seconds = max((each.ended for each in done.recordings), default=time.perf_counter()) - start
        done.cpu_seconds = time.process_time() - cpu
    finally:
        watch.cancel()
    return done


async def _closed(
    session: aiohttp.ClientSession, endpoint: Endpoint, queries: Iterator[Query], done: Run, start: float
) -> None:
    """Clients that each send a request when their last one was answered."""
    level, sent = done.level, 0

    async def client() -> None:
        nonlocal sent
        while time.perf_counter() - start < level.seconds and (level.requests is None or sent < level.requests):
            sent += 1
            recording = await send(session, endpoint, next(queries))
            done.recordings.append(recording)
            if recording.failure or recording.status != 200:
                await asyncio.sleep(TICK_SECONDS)  # a server that refuses is not asked without pause

    await asyncio.gather(*(client() for _ in range(level.concurrency)))


async def _open(
    session: aiohttp.ClientSession, endpoint: Endpoint, queries: Iterator[Query], done: Run, start: float
) -> None:
    """Requests that are sent when they are due, whether or not earlier ones were answered."""
    running = set[asyncio.Task[None]]()

    async def one(due: float) -> None:
        done.recordings.append(await send(session, endpoint, next(queries), due))

    for number, at in enumerate(done.level.arrivals()):
        if number == done.level.requests:
            break
        await asyncio.sleep(start + at - time.perf_counter())
        task = asyncio.ensure_future(one(start + at))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)


async def _watch(done: Run, start: float, progress: Callable[[float], None]) -> None:
    """Note how late the event loop is, and tell the progress."""
    level = done.level
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        now = time.perf_counter()
        done.lags.append(max(0.0, now - before - TICK_SECONDS))
        share = (now - start) / level.seconds
        progress(min(1.0, max(share, len(done.recordings) / level.requests if level.requests else 0.0)))
