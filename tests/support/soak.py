"""A server under an even load of all kinds of requests for a long time: what changes while it runs."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

import aiohttp

from tests.support.mixture import Case, Outcome, ask, fits
from tests.support.processes import Usage, usage

MOST_GROWTH, MOST_CHANGE = 0.02, 0.05
"""Bars of issue 46: growth of memory after the warm-up, and by how much a window's throughput may leave the mean."""
MORE_HANDLES = 2
"""Descriptors and threads that the last window may have over the first one: the thread pool and the client's kept
connections follow chance by one or two, a leak follows the number of requests."""


@dataclass(frozen=True)
class Plan:
    """How long a soak takes, in seconds. windows: of which throughput is compared. samples: between two looks at the
    processes. warm: after which memory and handles must be flat; a multiple of `windows`."""

    seconds: float
    window: float
    sample: float
    warm: float


@dataclass
class Window:
    """What happened in a part of the time. late: seconds by which a request was sent after it was due, at most."""

    answered: int = 0
    cut: int = 0
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    samples: list[Usage] = field(default_factory=list)
    late: float = 0.0

    def told(self, seconds: float) -> dict[str, Any]:
        """Figures for a result file."""
        times = sorted(self.times) or [0.0]
        result: dict[str, Any] = {"answered": self.answered, "cut": self.cut, "tokens": self.tokens}
        result["requests_per_second"] = round((self.answered + self.cut) / seconds, 4)
        result |= {f"p{share}": round(times[share * (len(times) - 1) // 100], 4) for share in (50, 99)}
        result["client_late_seconds"] = round(self.late, 3)
        if self.samples:
            result["memory_bytes"] = round(mean(each.memory for each in self.samples))
            for name in ("files", "threads", "processes"):
                values = [getattr(each, name) for each in self.samples]
                result[name] = {"median": median(values), "most": max(values)}
            spent = self.samples[-1].seconds - self.samples[0].seconds
            result["server_cpu_seconds_between_samples"] = round(spent, 2)
        return result


@dataclass
class Soak:
    """A soak that runs, or has run. wrong: answers unlike their references, by kind. lost: why others have none."""

    plan: Plan
    windows: list[Window]
    wrong: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def told(self) -> dict[str, Any]:
        """Figures for a result file."""
        return {
            "plan": asdict(self.plan),
            "sent": self.sent,
            "wrong": dict(self.wrong),
            "lost": dict(self.lost),
            "windows": [window.told(self.plan.window) for window in self.windows],
        }

    def note(self, case: Case, outcome: Outcome, reference: str, at: float) -> None:
        """Take the outcome of a request that ended `at` seconds after the start."""
        if outcome.problem:
            self.lost[f"{case.kind}: {outcome.problem}"] += 1
            return
        if not fits(case, outcome, reference):
            self.wrong[case.kind] += 1
        number = int(at / self.plan.window)
        if number < len(self.windows):
            window = self.windows[number]
            window.answered += not case.cut
            window.cut += case.cut
            window.tokens += outcome.tokens
            window.times += [] if case.cut else [outcome.seconds]


def misses(soak: Soak) -> list[str]:
    """The bars that were missed."""
    plan = soak.plan
    told = [window.told(plan.window) for window in soak.windows]
    result = [f"wrong: {dict(soak.wrong)}"] if soak.wrong else []
    result += [f"lost: {dict(soak.lost)}"] if soak.lost else []
    before, last = told[round(plan.warm / plan.window) - 1], told[-1]
    growth = last["memory_bytes"] / before["memory_bytes"] - 1
    if growth > MOST_GROWTH:
        result.append(f"memory grew by {growth:.1%} after the warm-up")
    for name in ("files", "threads", "processes"):
        if last[name]["median"] > before[name]["median"] + MORE_HANDLES:
            result.append(f"{name}: {before[name]['median']} after the warm-up, {last[name]['median']} at the end")
    usual = mean(window["requests_per_second"] for window in told)
    for number, window in enumerate(told):
        change = window["requests_per_second"] / usual - 1
        if abs(change) > MOST_CHANGE:
            result.append(f"window {number}: throughput {change:+.1%}")
    return result


def in_turn(count: int, seed: int) -> Iterator[int]:
    """Numbers below `count`, all of them again and again, each time in another order."""
    source = random.Random(seed)
    while True:
        yield from source.sample(range(count), count)


async def capacity(
    clients: aiohttp.ClientSession, root: str, asked: Sequence[Case], seconds: float, at_once: int
) -> float:
    """Requests of the mixture that the server answers per second, for clients that wait for their answers."""
    order, start, ended = in_turn(len(asked), 1), time.monotonic(), 0

    async def client() -> None:
        nonlocal ended
        while time.monotonic() < start + seconds:
            outcome = await ask(clients, root, asked[next(order)])
            ended += not outcome.problem and time.monotonic() < start + seconds

    await asyncio.gather(*(client() for _ in range(at_once)))
    return ended / seconds


async def soak(
    clients: aiohttp.ClientSession,
    root: str,
    process: int,
    known: tuple[Sequence[Case], Sequence[str]],
    rate: float,
    plan: Plan,
    noted: Callable[[Soak, float], None] = lambda soak, at: None,
) -> Soak:
    """Send `rate` requests per second, evenly. known: requests and their answers. process: the server's. noted: is
    told the seconds since the start after each look at the processes."""
    asked, wanted = known
    result = Soak(plan, [Window() for _ in range(round(plan.seconds / plan.window))])
    start, running, order = time.monotonic(), set[asyncio.Task[None]](), in_turn(len(asked), 2)

    async def one(number: int, due: float) -> None:
        window = result.windows[min(int(due / plan.window), len(result.windows) - 1)]
        window.late = max(window.late, time.monotonic() - start - due)
        outcome = await ask(clients, root, asked[number])
        result.note(asked[number], outcome, wanted[number], time.monotonic() - start)

    async def look() -> None:
        while True:
            at = time.monotonic() - start
            result.windows[min(int(at / plan.window), len(result.windows) - 1)].samples.append(usage(process))
            noted(result, at)
            await asyncio.sleep(plan.sample)

    looking = asyncio.ensure_future(look())
    while (due := result.sent / rate) < plan.seconds:
        await asyncio.sleep(start + due - time.monotonic())
        task = asyncio.ensure_future(one(next(order), due))
        running.add(task)
        task.add_done_callback(running.discard)
        result.sent += 1
    await asyncio.gather(*running)
    looking.cancel()
    return result
