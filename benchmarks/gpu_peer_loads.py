"""Workloads of gpu_peers.py, for any engine that runs requests of given lengths.

Prompts are random tokens, which share no prefix. Every request generates exactly as many tokens as it is asked for,
greedily.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

FIRST_TOKEN, LAST_TOKEN = 10, 30_000
"""Prompts are drawn from these tokens, which every vocabulary here has."""
DECODED = (33, 289)
"""Output tokens of two runs. The difference of their times is the time of decoding, without prompts and start."""
TRACE_REQUESTS = 256
TRACE_PROMPTS, TRACE_OUTPUTS = (64, 2048), (64, 512)
"""Ranges of lengths in a trace; logarithms of lengths are uniform."""


class Request(NamedTuple):
    """A prompt, and how many tokens follow it. `at`: seconds from the start of the trace at which it arrives."""

    prompt: list[int]
    outputs: int
    at: float = 0.0


@dataclass
class Times:
    """Seconds from a request's arrival to its first token, and between its tokens, as many as were seen apart."""

    first: float
    between: list[float]


class PeerEngine(Protocol):
    """What the workloads need of an engine."""

    def generate(self, requests: Sequence[Request]) -> float:
        """Seconds that all requests take, sent at once."""

    def replay(self, requests: Sequence[Request]) -> list[Times]:
        """The times of requests that arrive one after the other."""


class Workloads:
    """The measurements, with fresh prompts for each."""

    def __init__(self, engine: PeerEngine, seed: int = 0) -> None:
        self.engine, self.draw = engine, random.Random(seed)
        self.seconds(1, 64, 16)
        self.seconds(8, 512, 8)

    def prompt(self, length: int) -> list[int]:
        return [self.draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]

    def seconds(self, count: int, length: int, outputs: int, repeats: int = 1) -> float:
        """The least of some runs."""
        return min(
            self.engine.generate([Request(self.prompt(length), outputs) for _ in range(count)]) for _ in range(repeats)
        )

    def decode(self, batch: int, context: int) -> float:
        """Tokens per second of the whole batch, from `context` tokens on."""
        short, long = (self.seconds(batch, context, outputs, 2) for outputs in DECODED)
        return batch * (DECODED[1] - DECODED[0]) / (long - short)

    def prompts(self, length: int) -> float:
        """Tokens per second of one prompt, until its first token."""
        return length / self.seconds(1, length, 1, 3)

    def requests(self, count: int, length: int, outputs: int) -> float:
        """Output tokens per second of requests that are sent at once, their prompts included."""
        return count * outputs / self.seconds(count, length, outputs)

    def trace(self, loads: Sequence[float], capacity: float | None) -> dict[str, Any]:
        """Requests of varied lengths that arrive as a Poisson process.

        loads: arrivals as multiples of `capacity`, requests per second; None for the engine's own, which is that of the
        same requests when all are sent at once.
        """
        limits = (TRACE_PROMPTS, TRACE_OUTPUTS)
        lengths = [tuple(_log_uniform(self.draw, each) for each in limits) for _ in range(TRACE_REQUESTS)]
        at_once = self.engine.generate([Request(self.prompt(length), outputs) for length, outputs in lengths])
        own = len(lengths) / at_once
        outputs = sum(outputs for _, outputs in lengths)
        result: dict[str, Any] = {"own_capacity": own, "output_tokens_per_second": outputs / at_once, "loads": {}}
        for load in loads:
            now, arriving = 0.0, []
            for length, count in lengths:
                now += self.draw.expovariate(load * (capacity or own))
                arriving.append(Request(self.prompt(length), count, now))
            result["loads"][load] = summary(self.engine.replay(arriving))
        return result


def _log_uniform(draw: random.Random, limits: tuple[int, int]) -> int:
    low, high = limits
    return round(low * (high / low) ** draw.random())


def summary(times: Sequence[Times]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds, of times to first tokens and between tokens."""
    firsts, between = [each.first for each in times], [gap for each in times for gap in each.between]
    result = {}
    for name, values in (("first", firsts), ("between", between)):
        values = sorted(1e3 * value for value in values)
        result[f"{name}_p50_ms"] = statistics.median(values)
        result[f"{name}_p99_ms"] = values[min(len(values) - 1, int(0.99 * len(values)))]
    return result


def replayed(engine: Any, requests: Sequence[Request]) -> list[Times]:
    """Replay requests, in the order of their arrival, on an engine with two methods: `submit(request)` returns a key,
    and `step()` pairs of a key and its number of tokens so far."""
    began, waiting = time.perf_counter(), deque(requests)
    running: dict[Any, _Running] = {}
    times = []
    while waiting or running:
        now = time.perf_counter() - began
        while waiting and waiting[0].at <= now:
            request = waiting.popleft()
            running[engine.submit(request)] = _Running(request, request.at)
        if not running:
            time.sleep(waiting[0].at - now)
            continue
        for key, count in engine.step():
            if running[key].grow(count, time.perf_counter() - began):
                times.append(running.pop(key).times)
    return times


@dataclass
class _Running:
    """A request that runs: when it was last seen to grow, its tokens then, and its times."""

    request: Request
    last: float
    tokens: int = 0
    times: Times = field(default_factory=lambda: Times(0.0, []))

    def grow(self, count: int, now: float) -> bool:
        """Note its tokens. Returns whether it is finished."""
        gained = count - self.tokens
        if gained and not self.tokens:
            self.times.first = now - self.last
        elif gained:
            self.times.between += [(now - self.last) / gained] * gained
        if gained:
            self.last, self.tokens = now, count
        return count == self.request.outputs
