"""Draws a study of sensitivity: the loss of each linear by layer, and mixes by their bits and predicted time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.cli import plot_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#0b6e99", "#d9822b", "#3d8b5f", "#a23b52", "#7a6fa8", "#4b5563")
_GRID = "#e3e6eb"
_LEAST = 1e-9
"""Divergences below this are drawn as this."""


def draw(facts: Mapping[str, Any], path: Path) -> None:
    """Write the plot. Raises ResourceError if it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(plot_files.STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        grid = figure.add_gridspec(2, 2)
        _losses(figure.add_subplot(grid[0, :]), facts["units"])
        _front(figure.add_subplot(grid[1, 0]), facts, "bits", "bits per weight")
        _front(figure.add_subplot(grid[1, 1]), facts, "predicted_us", "predicted µs per token, linears")
        title = (
            f"{facts['model']}: perplexity {facts['perplexity']:.4f} on {facts['samples']} x {facts['length']} tokens"
        )
        figure.suptitle(title, x=0.01, ha="left")
        plot_files.save(figure, path)


def _losses(axes: Axes, units: Sequence[Mapping[str, Any]]) -> None:
    """The divergence of each unit in each format, alone."""
    formats = list(dict.fromkeys(_pair(each) for unit in units for each in unit["formats"]))
    for at, name in enumerate(formats):
        points = [
            (place, max(each["kl"], _LEAST))
            for place, unit in enumerate(units)
            for each in unit["formats"]
            if _pair(each) == name
        ]
        axes.plot(*zip(*points, strict=True), "o", ms=4, color=_COLORS[at % len(_COLORS)], label=name)
    names = [f"{unit['layer']} {', '.join(unit['roles'])}" for unit in units]
    axes.set_xticks(range(len(units)), names, rotation=90, fontsize=max(3.0, min(8.0, 400 / len(units))))
    axes.set_yscale("log")
    axes.set_ylabel("divergence, nats per token")
    axes.legend(frameon=False, ncols=len(formats), loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    _frame(axes)


def _front(axes: Axes, facts: Mapping[str, Any], key: str, label: str) -> None:
    """Mixes by their perplexity and `key`; those that no other beats are joined by a line."""
    mixes = facts["mixes"]
    best = sorted((mix[key], mix["perplexity"]) for mix in mixes if mix["best"])
    axes.plot(*zip(*best, strict=True), "-", color=_COLORS[0], lw=1)
    for mix in mixes:
        uniform = len(set(mix["formats"].values())) == 1
        axes.plot(mix[key], mix["perplexity"], "s" if uniform else "o", ms=5, color=_COLORS[uniform])
        if uniform:
            note = next(iter(mix["formats"].values()))
            axes.annotate(note, (mix[key], mix["perplexity"]), (5, 3), textcoords="offset points", fontsize=7)
    if facts["chosen"]:
        axes.plot(facts["chosen"][key], facts["chosen"]["perplexity"], "*", ms=11, color=_COLORS[3], label="chosen")
        axes.legend(frameon=False, fontsize=8)
    axes.axhline(facts["perplexity"], color="#6b7280", ls="--", lw=1)
    axes.set_xlabel(label)
    axes.set_ylabel("perplexity")
    axes.margins(x=0.15)
    _frame(axes)


def _pair(formats: Mapping[str, Any]) -> str:
    return f"{formats['weight']}:{formats['activation']}"


def _frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
