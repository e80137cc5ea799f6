"""The report of a load test as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qcompile.cli import console
from qcompile.cli.load_test.figures import PERCENTILES, Figures, client_limits

_SHOWN = ("mean", *(f"p{share}" for share in PERCENTILES))


def as_text(report: Mapping[str, Any]) -> str:
    """A table with one row per level, and what to know to read it."""
    server, workload, levels = report["server"], report["workload"], report["levels"]
    asked = workload.get("prompts") or f"{workload['input_tokens']} tokens"
    prefix = workload["shared_prefix_tokens"]
    shared = f" after {prefix} shared ones" if prefix else ""
    lines = [
        f"{server['model']} at {server['url']}, {workload['endpoint']}: "
        f"prompts of {asked}{shared}, {workload['output_tokens']} output tokens",
        "",
    ]
    drafted = any(level.get("drafts", {}).get("acceptance_rate") is not None for level in levels)
    limits = report["limits_seconds"]
    header = ["load", "requests", "tokens/s", "requests/s"]
    header += [f"{name} {'/'.join(_SHOWN)}" for name in ("ttft ms", "itl ms", "e2e s")]
    header += (["goodput"] if limits else []) + (["acceptance"] if drafted else [])
    lines.append(console.table(header, [_row(level, bool(limits), drafted) for level in levels]))
    lines += ["", "ttft: to the first token; itl: between tokens; e2e: to the end of an answer"]
    if limits:
        kept = ", ".join(f"{name} {1e3 * most:g} ms" for name, most in limits.items())
        lines.append(f"goodput: answers within {kept} (itl: the mean of an answer), and their number per second")
    return "\n".join(lines + _remarks(report))


def _row(level: Figures, limited: bool, drafted: bool) -> list[str]:
    failed = f" (+{level['failed']} failed)" if level["failed"] else ""
    speeds = [f"{level['output_tokens_per_second']:.1f}", f"{level['requests_per_second']:.2f}"]
    row = [level["load"], f"{level['requests']}{failed}", *speeds]
    row += [_times(level["ttft_seconds"], 1e3), _times(level["itl_seconds"], 1e3), _times(level["e2e_seconds"], 1.0)]
    if limited:
        good = level["goodput"]
        row.append(f"{100 * good['share']:.0f} %, {good['requests_per_second']:.2f}/s")
    if drafted:
        rate = level.get("drafts", {}).get("acceptance_rate")
        row.append("-" if rate is None else f"{rate:.3f}")
    return row


def _times(times: Mapping[str, float] | None, unit: float) -> str:
    return "/".join(f"{times[name] * unit:.3g}" for name in _SHOWN) if times else "-"


def _remarks(report: Mapping[str, Any]) -> list[str]:
    """What the client took, failures, and how tokens were counted if the server does not count them."""
    levels = report["levels"]
    busiest = max(level["client"]["core_share"] for level in levels)
    late = max(max(level["client"]["lag_p99_seconds"], level["client"]["late_p99_seconds"]) for level in levels)
    lines = [f"client: at most {100 * busiest:.0f} % of a core, {1e3 * late:.1f} ms late at p99"]
    for level in levels:
        if client_limits(level):
            lines.append(
                f"{level['load']}: the client was late: use a machine that is idle, or another one for the client"
            )
        for why, count in level["failures"].items():
            lines.append(f"{level['load']}: {console.counted(count, 'request')} failed: {why}")
    fields = report["client"]["request_fields"]
    if "counts" not in fields:
        how = "spread evenly over the pieces of an answer" if "usage" in fields else "one for each piece of an answer"
        lines.append(f"the server does not count the tokens of pieces: they are {how}")
    if "ignore_eos" not in fields:
        lines.append("the server does not take ignore_eos: answers may be shorter than asked")
    return lines
