"""The figures of a level: throughput, times by percentile, and how many requests kept given limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from qcompile.cli.load_test.answers import TimedAnswer, read
from qcompile.cli.load_test.level import Run
from qcompile.errors import UsageError

PERCENTILES = (50, 90, 99)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LIMITS = ("ttft", "itl", "e2e")
"""Times that may be limited: to the first token, between tokens (the mean of a request), to the end."""

Figures = dict[str, Any]


def limits(text: str) -> dict[str, float]:
    """`ttft=200ms,itl=50ms` as seconds by name. Raises UsageError."""
    seconds: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\w+)=(\d+(?:\.\d*)?)(us|ms|s)", part.strip())
        if match is None or match[1] not in LIMITS or float(match[2]) == 0:
            raise UsageError(f"--slo {part}: write limits of ttft, itl and e2e, as ttft=200ms,itl=50ms,e2e=10s")
        seconds[match[1]] = float(match[2]) * _UNITS[match[3]]
    return seconds


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` percent of the ordered values lie, interpolated between neighbours."""
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def times(values: Sequence[float]) -> Figures | None:
    """Mean and percentiles in seconds; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered)} | {f"p{share}": percentile(ordered, share) for share in PERCENTILES}


def kept(answer: TimedAnswer, limits: Mapping[str, float]) -> bool:
    """Whether a request was answered within all limits."""
    taken = {"ttft": answer.first, "itl": answer.between, "e2e": answer.whole}
    return answer.failure is None and all(taken[name] <= most for name, most in limits.items())


def figures(run: Run, limits: Mapping[str, float], drafts: Mapping[str, float] | None) -> Figures:
    """What is reported of a level. `drafts`: tokens drafted and accepted meanwhile; None if the server does not say."""
    answers = [read(recording) for recording in run.recordings]
    good = [answer for answer in answers if answer.failure is None]
    seconds = max(run.seconds, 1e-9)
    output, inputs = sum(answer.output_tokens for answer in good), sum(answer.input_tokens for answer in good)
    within = sum(kept(answer, limits) for answer in good)
    result: Figures = {
        "load": run.level.name,
        "concurrency": run.level.concurrency or None,
        "rate": run.level.rate or None,
        "seconds": seconds,
        "requests": len(good),
        "failed": len(answers) - len(good),
        "failures": dict(Counter(answer.failure for answer in answers if answer.failure)),
        "input_tokens": inputs,
        "output_tokens": output,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (inputs + output) / seconds,
        "ttft_seconds": times([answer.first for answer in good]),
        "itl_seconds": times([gap for answer in good for gap in answer.gaps]),
        "e2e_seconds": times([answer.whole for answer in good]),
        "client": _client(run, answers),
    }
    if limits:
        result["goodput"] = {
            "share": within / len(answers) if answers else 0.0,
            "requests_per_second": within / seconds,
        }
    if drafts is not None:
        drafted = drafts["drafted"]
        rate = drafts["accepted"] / drafted if drafted else None
        result["drafts"] = {"drafted_tokens": round(drafted), "acceptance_rate": rate}
    return result


def _client(run: Run, answers: Sequence[TimedAnswer]) -> Figures:
    """What the client took: its share of a core, and how late it was, in seconds."""
    lags, late = sorted(run.lags) or [0.0], sorted(answer.late for answer in answers) or [0.0]
    return {
        "core_share": run.cpu_seconds / max(run.seconds, 1e-9),
        "lag_p99_seconds": percentile(lags, 99),
        "late_p99_seconds": percentile(late, 99),
    }


BUSY_SHARE, LATE_SHARE = 0.7, 0.1


def client_limits(level: Figures) -> bool:
    """Whether the client may have been the limit of a level: its core was busy, or it was late by a tenth of the
    median time to the first token."""
    client, first = level["client"], level["ttft_seconds"]
    late = max(client["lag_p99_seconds"], client["late_p99_seconds"])
    return client["core_share"] > BUSY_SHARE or (first is not None and late > LATE_SHARE * first["p50"] and late > 5e-3)
