"""What to try after a build: commands, each with the reason that its report gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from qcompile.formats.kv import KV_FORMATS

Json = dict[str, Any]

_RISE = 0.03
"""Relative rise of perplexity above which other number formats are worth a try."""
_CACHE_SHARE = 0.25
"""Share of the weights' bytes above which the cache of one full context is worth less bits."""


class Advice(NamedTuple):
    """A command, or options of `qcompile build`, and why."""

    command: str
    reason: str


def advice(report: Json) -> list[Advice]:
    """What to try next, the most useful first."""
    lines = [*_quality(report), *_speed(report)]
    if not report["drafts"]:
        lines.append(
            Advice(
                "qcompile build … --draft lookup", "drafts tokens from earlier text: faster where a text repeats itself"
            )
        )
    else:
        lines.append(
            Advice("qcompile tune OUT", "measures the drafts on this machine, so that as many are made as pay")
        )
    lines.append(Advice("qcompile bench OUT", "measures what this page only predicts"))
    lines.append(
        Advice("qcompile eval OUT --data TEXT.jsonl", "measures perplexity with these kernels on a text of yours")
    )
    return lines


def _quality(report: Json) -> list[Advice]:
    """How to lose less."""
    if not report["calibrated"]:
        why = "chooses codes by a text instead of rounding to nearest, and shows errors, outliers and perplexity here"
        return [Advice("qcompile build … --calib FILE", why)]
    measured = report["perplexity"]
    if measured is None or measured["after"] < (1 + _RISE) * measured["before"]:
        return []
    rise = 100 * (measured["after"] / measured["before"] - 1)
    why = f"perplexity rises by {rise:.0f} % on the calibration text: 8 bits where they matter most cost little"
    return [Advice("qcompile build … --recipe auto --target-bits 5", why)]


def _speed(report: Json) -> list[Advice]:
    """How to need less memory."""
    cache = report["kv_bytes_per_token"] * report["context"]
    if KV_FORMATS[report["kv_format"]].bits < 16 or cache < _CACHE_SHARE * report["weight_bytes"]:
        return []
    why = f"halves the cache, which takes {cache / 2**20:,.0f} MiB for a full context of {report['context']:,} tokens"
    return [Advice("qcompile build … --set cache.format=kv8", why)]
