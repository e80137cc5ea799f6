"""Speed of a loaded model, and of its kernels against the machine's roofline.

tgN decodes N tokens one by one and ppN reads a prompt of N tokens, as in llama.cpp's benchmark; verifyN is a step of N
tokens with N logits. All start from an empty context. Tests are interleaved over several rounds and medians reported,
so that a slow moment of the machine falls on all of them.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qcompile.cli import console
from qcompile.errors import UsageError
from qcompile.roofline import Peaks, StepShape, call_cost, predicted_us
from qcompile.runtime.step import RATES

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM

Progress = Callable[[str, int, int], None]

SAMPLE_SECONDS = 0.05
"""A test is repeated within a round until it has taken this long."""

_PROFILED = 3
"""Repetitions of decoding for the times of the kernels."""


class Sizes(NamedTuple):
    """What to measure: tokens decoded, prompt lengths, lengths of verify steps, rounds, and the adapter of all."""

    tg: int
    pp: tuple[int, ...]
    verify: tuple[int, ...]
    repeats: int
    adapter: str | None = None


def measure(llm: LLM, sizes: Sizes, progress: Progress) -> dict[str, float]:
    """Tokens per second by test, medians over the rounds. Raises UsageError where a test exceeds the context."""
    longest = max((sizes.tg + 1, *sizes.pp, *sizes.verify))
    if longest > llm.context:
        smaller = "give smaller ones by --tg, --pp and --verify"
        raise UsageError(f"a test of {longest} tokens does not fit the context of {llm.context}: {smaller}")
    if any(rows > llm.executor.limits.max_outputs for rows in sizes.verify):
        raise UsageError(f"a step takes at most {llm.executor.limits.max_outputs} tokens: give fewer by --verify")
    tests = {f"tg{sizes.tg}": (sizes.tg, lambda: _decode(llm, sizes.tg, sizes.adapter))}
    for rows in sizes.pp:
        tests[f"pp{rows}"] = (rows, lambda rows=rows: _prefill(llm, rows, 1, sizes.adapter))  # type: ignore[misc]
    for rows in sizes.verify:
        tests[f"verify{rows}"] = (rows, lambda rows=rows: _prefill(llm, rows, rows, sizes.adapter))  # type: ignore[misc]
    seconds: dict[str, list[float]] = {test: [] for test in tests}
    for _, run in tests.values():
        run()  # touches the cache's pages and wakes the threads
    for done in range(sizes.repeats):
        for test, (_, run) in tests.items():
            seconds[test] += _sample(run)
        progress("measuring", done + 1, sizes.repeats)
    return {test: tokens / statistics.median(seconds[test]) for test, (tokens, _) in tests.items()}


def _sample(run: Callable[[], float]) -> list[float]:
    """Seconds of each repetition, of as many as SAMPLE_SECONDS allow."""
    taken = [run()]
    while sum(taken) < SAMPLE_SECONDS:
        taken.append(run())
    return taken


@contextmanager
def _pages(llm: LLM, tokens: int, adapter: str | None) -> Iterator[list[int]]:
    """Cache pages for a sequence of `tokens` with an adapter."""
    pool = llm.engine.pool
    pages = pool.take(pool.pages_for(tokens))
    if llm.engine.scheduler.adapters:
        llm.engine.scheduler.adapters.mark(pages[0], adapter)
    try:
        yield pages
    finally:
        pool.give_back(pages)


def _tokens(llm: LLM, count: int) -> list[int]:
    """`count` random tokens with a fixed seed: their values do not affect the speed."""
    draw = random.Random(0)
    return [draw.randrange(llm.vocab_size) for _ in range(count)]


def _decode(llm: LLM, steps: int, adapter: str | None) -> float:
    """Seconds to decode `steps` tokens greedily after a context of one."""
    from qcompile.runtime.step import Rows

    with _pages(llm, steps + 1, adapter) as pages:
        rows = [Rows(_tokens(llm, 1), 0, pages, 1)]
        start = time.perf_counter()
        llm.executor.decode(rows, steps)
        return time.perf_counter() - start


def _prefill(llm: LLM, count: int, outputs: int, adapter: str | None) -> float:
    """Seconds for `count` tokens at once, in steps of at most max_tokens; the last `outputs` tokens have logits."""
    from qcompile.runtime.step import Rows

    tokens, most = _tokens(llm, count), llm.executor.limits.max_tokens
    with _pages(llm, count, adapter) as pages:
        start = time.perf_counter()
        for first in range(0, count, most):
            part = tokens[first : first + most]
            wanted = outputs if first + most >= count else 0
            llm.executor.step([Rows(part, first, pages, wanted)], logits=False)
        return time.perf_counter() - start


def report(llm: LLM, path: Path, sizes: Sizes, speeds: dict[str, float], progress: Progress) -> dict[str, Any]:
    """What `bench --json` prints: speeds, ceilings probed now, and each kernel of a decoding step."""
    progress("probing the machine", 0, 1)
    probed = {rate: llm.executor.peak(rate) for rate in RATES}
    peaks = Peaks(probed["memory"] * 1e9, {name: probed[name] * 1e9 for name in ("int8", "f32", "bf16")})
    longest = max(sizes.pp, default=0)
    return {
        "decode_tokens_per_second": speeds[f"tg{sizes.tg}"],
        "prefill_tokens_per_second": speeds.get(f"pp{longest}"),
        "threads": llm.threads,
        "tests": speeds,
        "ceilings": {
            "read_gigabytes_per_second": probed["memory"],
            "int8_gigaops": probed["int8"],
            "bf16_gigaflops": probed["bf16"],
            "f32_gigaflops": probed["f32"],
        },
        "kernels": _kernels(llm, path, sizes, peaks),
    }


def _kernels(llm: LLM, path: Path, sizes: Sizes, peaks: Peaks) -> list[dict[str, Any]]:
    """Each call of the program: predicted and measured microseconds, bytes and operations of one decoding step."""
    program = json.loads((path / "graphs/program.json").read_text(encoding="utf-8"))
    weight_bytes = {entry["name"]: entry["bytes"] for entry in llm.manifest["runtime"]["weights"]}
    steps = sizes.tg
    llm.executor.profile(True)
    for _ in range(_PROFILED):
        _decode(llm, steps, sizes.adapter)
    timed = llm.executor.profile_read()
    llm.executor.profile(False)
    kernels = []
    for call in program["calls"]:
        cost = call_cost(call, program, weight_bytes, StepShape(context=(steps + 1) / 2))
        kernels.append(
            {
                "name": call["name"],
                "kernel": call["kernel"],
                "predicted_us": predicted_us(cost.bytes, cost.ops, peaks, cost.dtype),
                "measured_us": 1e6 * seconds_of(call["name"], timed) / (_PROFILED * steps),
                "bytes": round(cost.bytes),
                "ops": round(cost.ops),
                "shape": [call["n"], call["k"]] if call["kernel"] == "gemm" else None,
            }
        )
    return kernels


def seconds_of(call: str, timed: dict[str, tuple[float, int]]) -> float:
    """Total seconds of a call. On a GPU a call may have several launches, which are timed as `call.part`."""
    return sum(seconds for name, (seconds, _) in timed.items() if name == call or name.startswith(f"{call}."))


def as_text(result: dict[str, Any]) -> str:
    """`report` as text; calls of one kernel and shape share a row."""
    width = max((8, *map(len, result["tests"])))
    lines = [f"{test:>{width}}  {speed:10.1f} tokens/s" for test, speed in result["tests"].items()]
    ceilings = ", ".join(f"{value:.0f} {name.replace('_', ' ')}" for name, value in result["ceilings"].items())
    groups: dict[str, list[dict[str, Any]]] = {}
    for kernel in result["kernels"]:
        shape = f" {kernel['shape'][0]}x{kernel['shape'][1]}" if kernel["shape"] else ""
        groups.setdefault(kernel["kernel"] + shape, []).append(kernel)
    rows = []
    for name, members in groups.items():
        totals = [sum(kernel[key] for kernel in members) for key in ("predicted_us", "measured_us", "bytes", "ops")]
        times, counts = totals[:2], totals[2:]
        rows.append([name, str(len(members)), *(f"{us:.1f}" for us in times), *(f"{count:,}" for count in counts)])
    header = ["kernels of one decoded token", "calls", "predicted us", "measured us", "bytes", "ops"]
    alone = f" with {console.counted(result['threads'], 'thread')}" if result["threads"] else ""
    lines += [f"ceilings{alone}: {ceilings}", "", console.table(header, rows)]
    return "\n".join(lines)
