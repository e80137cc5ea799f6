"""The plots of the report, as SVG. Text in them is that of the page's font, of a size that is legible on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from qcompile.recipe_files.mixes import front
from qcompile.report.figures import OTHER_WEIGHTS, PARTS, bytes_by_part

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Json = dict[str, Any]
COLORS = dict(zip(PARTS, ("#0b6e99", "#d9822b", "#3d8b5f", "#a23b52", "#7a6fa8", "#4b5563"), strict=True))
COLORS[OTHER_WEIGHTS] = "#aeb5c0"
BEFORE, AFTER, GRID = "#c9ced6", "#0b6e99", "#e6e9ee"
_STYLE: Any = {"svg.hashsalt": "qcompile", "svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"}
_MOST_TICKS = 16
"""Up to this number of layers, each has its number at the axis."""


@dataclass(frozen=True)
class Plot:
    """A plot of the page: its title, a caption of one line, and the drawing as SVG text."""

    title: str
    caption: str
    svg: str


def plots(report: Json) -> Iterator[Plot]:
    """The plots for which there are figures."""
    rows = [row for row in report["linears"] if row["layer"] is not None]
    parts = [part for part in PARTS if any(row["part"] == part for row in rows)]
    if report["linears"]:
        yield _plot(
            "Where the weights are",
            "Size of all layers together, and bits per weight with scales and zero points.",
            lambda axes: _weights(axes, bytes_by_part(report)),
        )
    yield _plot(
        "Predicted time of one token by kernel",
        f"Microseconds at 1,024 tokens of context, by {report['predicted_by']}.",
        lambda axes: _times(axes, report["kernels"]),
    )

    if rows:
        yield _plot("Weight bytes by layer", "MiB of each layer's linears.", lambda axes: _bytes(axes, rows, parts))
    if len({row["bits"] for row in rows}) > 1:
        yield _plot(
            "Bits per weight by layer",
            "Scales and zero points included. The output head is no layer: see the first plot.",
            lambda axes: _bits(axes, rows, parts),
        )
    if any(row["error"] is not None for row in rows):
        yield _plot(
            "Error of each layer's output",
            "Relative to its size, on the calibration text. Hollow: rounded to nearest. Filled: codes chosen.",
            lambda axes: _errors(axes, rows, parts),
        )
    if any(0 < row["wide_share"] < 1 for row in rows):
        yield _plot(
            "Output features in 8 bits",
            "Share of each layer's output features (MixLLM, figure 2).",
            lambda axes: _shares(axes, rows, parts),
        )
    yield from _study_plots(report.get("study"), report["bits_per_weight"])
    yield from _outlier_plots(report.get("outliers", {}))


def _study_plots(study: Json | None, bits: float) -> Iterator[Plot]:
    """Perplexity of the mixes of formats that the recipe was chosen from, by bits and by predicted time."""
    if not study or not study["names"]:
        return
    text = f"in the study of sensitivity, on {study['tokens']:,} tokens, rounded to nearest"
    yield _plot(
        "Perplexity by bits per weight",
        f"Mixes of formats {text}. The line joins those that no smaller one beats; dashed: exact; dotted: this build.",
        lambda axes: _mixes(axes, study, "bits", "bits per weight", bits),
    )
    yield _plot(
        "Perplexity by predicted time",
        f"The same mixes {text}, by the microseconds of their linears for one token.",
        lambda axes: _mixes(axes, study, "predicted_us", "predicted microseconds", None),
    )


def _outlier_plots(outliers: dict[str, Json]) -> Iterator[Plot]:
    """A plot for each kind of values. If no pass has moved the channels, there is nothing to compare."""
    for name, figures in outliers.items():
        moved = figures["before"] != figures["after"]
        how = "before and after the passes that move it" if moved else "which no pass of this recipe moves"
        yield _plot(
            f"Outliers: {name}",
            f"Largest magnitude of a channel over the mean of all channels' largest, {how}. 1 is even.",
            lambda axes, figures=figures, moved=moved: _outliers(axes, figures, moved),  # type: ignore[misc]
        )


def _plot(title: str, caption: str, draw: Callable[[Axes], None]) -> Plot:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.7), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3)
        axes.grid(axis="y", color=GRID, lw=0.8)
        axes.set_axisbelow(True)
        draw(axes)
        _legend(figure, axes)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return Plot(title, caption, svg[svg.index("<svg") :])


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend above the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        tight = {"handlelength": 1.2, "columnspacing": 1.0, "handletextpad": 0.5, "borderaxespad": 0.2}
        columns = min(len(handles), 4)
        figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside upper left", ncols=columns, **tight)


# ---- kinds of plots ------------------------------------------------------------------------------------


def _weights(axes: Axes, parts: Sequence[tuple[str, int, float | None]]) -> None:
    """Bars of bytes by part, with their bits per weight."""
    shown = parts[::-1]
    sizes = [size / 2**20 for _, size, _ in shown]
    axes.barh([name for name, _, _ in shown], sizes, color=[COLORS[name] for name, _, _ in shown])
    for place, (size, (_, _, bits)) in enumerate(zip(sizes, shown, strict=True)):
        note = f" {size:,.2f}" if bits is None else f" {size:,.2f} · {bits:.2f} bits"
        axes.annotate(note, (size, place), va="center", fontsize=7)
    _horizontal(axes, "MiB", room=0.45)


def _horizontal(axes: Axes, unit: str, room: float) -> None:
    """Frame of a plot of horizontal bars, with `room` for notes at their ends."""
    axes.grid(visible=False)
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.set_xlabel(unit)
    axes.set_xlim(0, axes.get_xlim()[1] * (1 + room))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _series(rows: list[Json], part: str, key: str) -> tuple[list[int], list[float]]:
    """Layers, and the mean of `key` over each layer's linears of `part`."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if row["part"] == part and row[key] is not None:
            values.setdefault(row["layer"], []).append(row[key])
    return list(values), [sum(group) / len(group) for group in values.values()]


def _bytes(axes: Axes, rows: list[Json], parts: list[str]) -> None:
    base: dict[int, float] = {}
    for part in parts:
        totals: dict[int, float] = {}
        for row in rows:
            if row["part"] == part:
                totals[row["layer"]] = totals.get(row["layer"], 0) + row["bytes"] / 2**20
        axes.bar(
            list(totals), list(totals.values()), bottom=[base.get(i, 0) for i in totals], color=COLORS[part], label=part
        )
        base = {i: base.get(i, 0) + totals.get(i, 0) for i in base | totals}
    axes.set_ylabel("MiB")
    _layers(axes, [row["layer"] for row in rows])


def _bits(axes: Axes, rows: list[Json], parts: list[str]) -> None:
    for part in parts:
        axes.plot(*_series(rows, part, "bits"), "o-", ms=3, lw=1, color=COLORS[part], label=part)
    axes.set_ylim(0, 1.1 * max(row["bits"] for row in rows))
    axes.set_ylabel("bits")
    _layers(axes, [row["layer"] for row in rows])


def _errors(axes: Axes, rows: list[Json], parts: list[str]) -> None:
    for part in parts:
        layers, nearest = _series(rows, part, "error_nearest")
        axes.plot(layers, nearest, "o", ms=4, mfc="none", color=COLORS[part])
        axes.plot(*_series(rows, part, "error"), "o-", ms=3, lw=1, color=COLORS[part], label=part)
    axes.set_yscale("log")
    axes.set_ylabel("relative error")
    _layers(axes, [row["layer"] for row in rows])


def _shares(axes: Axes, rows: list[Json], parts: list[str]) -> None:
    for part in parts:
        layers, shares = _series(rows, part, "wide_share")
        axes.plot(layers, [100 * share for share in shares], "o-", ms=3, lw=1, color=COLORS[part], label=part)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("% in 8 bits")
    _layers(axes, [row["layer"] for row in rows])


def _layers(axes: Axes, layers: Sequence[int]) -> None:
    """An axis of whole layers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer")
    known = sorted(set(layers))
    if len(known) <= _MOST_TICKS:
        axes.set_xticks(known)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(known[0] - 0.6, known[-1] + 0.6)


def _outliers(axes: Axes, figures: Json, moved: bool) -> None:
    places = list(range(len(figures["before"])))
    if moved:
        axes.bar([i - 0.2 for i in places], figures["before"], 0.4, color=BEFORE, label="before")
        axes.bar([i + 0.2 for i in places], figures["after"], 0.4, color=AFTER, label="after")
    else:
        axes.bar(places, figures["after"], 0.6, color=AFTER)
    axes.set_ylabel("largest / mean")
    _layers(axes, places)


def _mixes(axes: Axes, study: Json, key: str, label: str, built: float | None) -> None:
    """Mixes as points, those of one format with their names, and the front as a line. built: where this build is."""
    values, losses = study[key], study["perplexity"]
    best = front(values, losses)
    axes.plot([values[place] for place in best], [losses[place] for place in best], "-", lw=1, color=AFTER)
    axes.plot(values, losses, "o", ms=3, color=AFTER)
    for name, value, loss in zip(study["names"], values, losses, strict=True):
        if ":" in name:  # a uniform format; mixes have numbers
            axes.annotate(name.partition(":")[0], (value, loss), (4, 3), textcoords="offset points", fontsize=6)
    axes.axhline(study["exact"], ls="--", lw=0.8, color=BEFORE)
    if built is not None:
        axes.axvline(built, ls=":", lw=0.8, color=COLORS[PARTS[1]])
    axes.set_xlabel(label)
    axes.set_ylabel("perplexity")
    axes.margins(x=0.15)


def _times(axes: Axes, kernels: list[Json]) -> None:
    shown = kernels[::-1]
    axes.barh([row["kernel"] for row in shown], [row["predicted_us"] for row in shown], color=AFTER)
    for place, row in enumerate(shown):
        axes.annotate(f" {row['predicted_us']:,.1f}", (row["predicted_us"], place), va="center", fontsize=7)
    _horizontal(axes, "microseconds", room=0.12)
