"""A crowd of clients, each with prompts of its own: whether each gets its answer, once, and no other's."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.mixture import ask, completion

_SAMPLES = re.compile(r'^qcompile_samples_total\{finish_reason="(?:stop|length)".*\} ([0-9.e+]+)$', re.MULTILINE)


@dataclass
class Level:
    """A number of clients and what they saw. wrong: answers unlike those to their prompts alone. lost: why there is no
    answer. counted: answers by the server's own count, which is larger than that of the clients if it gave some twice.
    """

    clients: int
    seconds: float = 0.0
    tokens: int = 0
    wrong: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    counted: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def doubled(self) -> int:
        """Answers that the server made and no client asked for."""
        return max(0, self.counted - len(self.times) - self.lost.total())

    def told(self) -> dict[str, Any]:
        """Figures for a result file."""
        times = sorted(self.times) or [0.0]
        return {
            "clients": self.clients,
            "seconds": round(self.seconds, 1),
            "answered": len(self.times),
            "answered_per_second": round(len(self.times) / max(self.seconds, 1e-9), 2),
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
            **{f"p{share}": round(times[share * (len(times) - 1) // 100], 4) for share in (50, 99)},
            "wrong": self.wrong,
            "lost": dict(self.lost),
            "doubled": self.doubled,
        }


def prompts(count: int) -> list[str]:
    """Prompts that begin alike and differ at their ends."""
    words = ("read", "write", "count", "sort", "merge", "split", "open", "close")
    return [f"# {number}\ndef {words[number % len(words)]}_{number}(" for number in range(count)]


async def answers_counted(clients: aiohttp.ClientSession, root: str) -> int:
    """Answers that the server has completed, by its metrics."""
    async with clients.get(f"{root}/metrics") as response:
        return round(sum(float(value) for value in _SAMPLES.findall(await response.text())))


async def crowd(
    clients: aiohttp.ClientSession, root: str, wanted: Mapping[str, str], tokens: int, count: int, seconds: float
) -> Level:
    """Have `count` clients ask one request after the other. wanted: the answer to each prompt. Each client has its own
    prompts, if there are as many. Every second request is streamed."""
    level, asked, before = Level(count), list(wanted), await answers_counted(clients, root)
    start = time.monotonic()

    async def client(number: int) -> None:
        own: Sequence[str] = asked[number % len(asked) :: count]
        turn = number
        while time.monotonic() < start + seconds:
            prompt = own[turn % len(own)]
            outcome = await ask(clients, root, completion(prompt, tokens, stream=turn % 2 == 1))
            turn += 1
            if outcome.problem:
                level.lost[outcome.problem] += 1
                continue
            level.times.append(outcome.seconds)
            level.tokens += outcome.tokens
            level.wrong += outcome.text != wanted[prompt]

    await asyncio.gather(*(client(number) for number in range(count)))
    level.seconds = time.monotonic() - start
    level.counted = await answers_counted(clients, root) - before
    return level
