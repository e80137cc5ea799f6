"""Draws a load test: throughput, times, goodput and acceptance by load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.cli import plot_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"p50": "#0b6e99", "p90": "#d9822b", "p99": "#a23b52"}
_MAIN, _SECOND = "#0b6e99", "#3d8b5f"


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot. Raises ResourceError if it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    levels, limits = report["levels"], report["limits_seconds"]
    with matplotlib.rc_context(plot_files.STYLE):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        throughput, first, between, shares = figure.subplots(2, 2).flat
        _throughput(throughput, levels)
        _times(first, levels, "ttft_seconds", "Time to first token", limits.get("ttft"))
        _times(between, levels, "itl_seconds", "Time between tokens", limits.get("itl"))
        _shares(shares, levels, limits.get("e2e"))
        for axes in (throughput, first, between, shares):
            _frame(axes, [level["load"] for level in levels])
        figure.suptitle(f"{_title(report)}\n", x=0.01, ha="left")
        figure.legend(*first.get_legend_handles_labels(), frameon=False, ncols=3, loc="upper right")
        plot_files.save(figure, path)


def _title(report: Mapping[str, Any]) -> str:
    workload = report["workload"]
    asked = workload.get("prompts") or f"{workload['input_tokens']} input tokens"
    return f"{report['server']['model']}: {asked}, {workload['output_tokens']} output tokens"


def _frame(axes: Axes, names: list[str]) -> None:
    """What all plots have in common: an axis of loads, and a grid behind the lines."""
    axes.set_xticks(range(len(names)), names, rotation=0 if len(names) <= 4 else 25)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e3e6eb", lw=0.8)
    axes.set_axisbelow(True)


def _line(
    axes: Axes, levels: list[dict[str, Any]], values: list[float | None], color: str, label: str | None = None
) -> None:
    """A line over the levels of each kind: numbers of clients and rates are no common scale."""
    for kind in ("concurrency", "rate"):
        points = [(at, value) for at, value in enumerate(values) if value is not None and levels[at][kind]]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", ms=4, color=color, label=label)
            label = None


def _throughput(axes: Axes, levels: list[dict[str, Any]]) -> None:
    speeds = [level["output_tokens_per_second"] for level in levels]
    _line(axes, levels, speeds, _MAIN)
    for place, speed in enumerate(speeds):
        axes.annotate(f"{speed:,.0f}", (place, speed), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(y=0.15)
    axes.set_ylabel("output tokens per second")
    axes.set_title("Throughput", loc="left", weight="bold")


def _times(axes: Axes, levels: list[dict[str, Any]], key: str, title: str, limit: float | None) -> None:
    """Percentiles by load. A limit far above all of them is only named."""
    for name, color in _COLORS.items():
        _line(axes, levels, [1e3 * level[key][name] if level[key] else None for level in levels], color, name)
    if limit is not None:
        title += f" (limit {1e3 * limit:g} ms)"
        if limit < 2 * max((level[key]["p99"] for level in levels if level[key]), default=0.0):
            axes.axhline(1e3 * limit, color="#6b7280", ls="--", lw=1)
    axes.set_ylabel("milliseconds")
    axes.set_title(title, loc="left", weight="bold")


def _shares(axes: Axes, levels: list[dict[str, Any]], limit: float | None) -> None:
    """Goodput and acceptance, in percent; the whole answer's time if there is neither."""
    shares = {
        "answers within the limits": ([_percent(level.get("goodput", {}).get("share")) for level in levels], _SECOND),
        "accepted drafts": ([_percent(level.get("drafts", {}).get("acceptance_rate")) for level in levels], _MAIN),
    }
    drawn = {label: (values, color) for label, (values, color) in shares.items() if any(v is not None for v in values)}
    if not drawn:
        _times(axes, levels, "e2e_seconds", "Whole answers", limit)
        return
    for label, (values, color) in drawn.items():
        _line(axes, levels, values, color, label)
    axes.set_ylim(0, 105)
    axes.set_ylabel("%")
    axes.set_title(" and ".join(drawn).capitalize(), loc="left", weight="bold")
    if len(drawn) > 1:
        axes.legend(frameon=False, loc="best", fontsize=8)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
