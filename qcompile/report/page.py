"""report.html: a self-contained page for people. `python -m qcompile.report.page < report.json > report.html`.

It is rendered by a separate process during the build: importing and using matplotlib takes half a second, for which
a build with cached kernels should not wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.errors import QCompileError, escaped
from qcompile.report.figures import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json = dict[str, Any]
COLORS = dict(zip(PARTS, ("#0b6e99", "#d9822b", "#3d8b5f", "#a23b52", "#7a6fa8", "#6b7280"), strict=True))
BEFORE, AFTER = "#c9ced6", "#0b6e99"


class PageWriter:
    """The process that renders the page. It is started early, so that its imports are done when the report is ready."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path)), "MPLBACKEND": "svg"}
        environment["PYTHONIOENCODING"] = "utf-8"  # whatever this process was told to write
        self._process = subprocess.Popen(
            [sys.executable, "-m", "qcompile.report.page"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )

    def __enter__(self) -> PageWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, report: bytes) -> Callable[[], bytes]:
        """Send report.json; the returned function waits for the page. It raises QCompileError if rendering failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(report)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # reported by _read, with the reason
        self._process.stdin = None
        return self._read

    def _read(self) -> bytes:
        page, messages = self._process.communicate()
        if self._process.returncode:
            last = (messages.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise QCompileError(f"report.html could not be drawn: {last}")
        return page

    def close(self) -> None:
        """Stop the process if it is still running."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


# ---- plots -------------------------------------------------------------------------------------------


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
    if rows:
        yield _plot("Weight bytes by layer", "MiB of each layer's linears.", lambda axes: _bytes(axes, rows, parts))
        yield _plot(
            "Bits per weight by layer", "Scales and zero points included.", lambda axes: _bits(axes, rows, parts)
        )
    if any(row["error"] is not None for row in rows):
        yield _plot(
            "Error of each layer's output",
            "Relative to its size, on the calibration text. Grey: codes rounded to nearest. Colour: codes chosen.",
            lambda axes: _errors(axes, rows, parts),
        )
    if any(0 < row["wide_share"] < 1 for row in rows):
        yield _plot(
            "Output features in 8 bits",
            "Share of each layer's output features (MixLLM, figure 2).",
            lambda axes: _shares(axes, rows, parts),
        )
    for name, figures in report.get("outliers", {}).items():
        yield _plot(
            f"Outliers: {name}",
            "Largest magnitude of a channel over the mean of all channels' largest, by layer, before and after.",
            lambda axes, figures=figures: _outliers(axes, figures),  # type: ignore[misc]
        )
    yield _plot(
        "Predicted time of one token by kernel",
        f"Microseconds at 1,024 tokens of context, by {report['predicted_by']}.",
        lambda axes: _times(axes, report["kernels"]),
    )


def _plot(title: str, caption: str, draw: Callable[[Axes], None]) -> Plot:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.7), layout="constrained")  # text of this size is legible on a phone
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
    draw(axes)
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return Plot(title, caption, svg[svg.index("<svg") :])


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
    _layers(axes, rows)


def _bits(axes: Axes, rows: list[Json], parts: list[str]) -> None:
    for part in parts:
        axes.plot(*_series(rows, part, "bits"), "o-", ms=3, lw=1, color=COLORS[part], label=part)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("bits")
    _layers(axes, rows)


def _errors(axes: Axes, rows: list[Json], parts: list[str]) -> None:
    for part in parts:
        layers, nearest = _series(rows, part, "error_nearest")
        axes.plot(layers, nearest, "o", ms=4, color=BEFORE)
        axes.plot(*_series(rows, part, "error"), "o-", ms=3, lw=1, color=COLORS[part], label=part)
    axes.set_yscale("log")
    axes.set_ylabel("relative error")
    _layers(axes, rows)


def _shares(axes: Axes, rows: list[Json], parts: list[str]) -> None:
    for part in parts:
        layers, shares = _series(rows, part, "wide_share")
        axes.plot(layers, [100 * share for share in shares], "o-", ms=3, lw=1, color=COLORS[part], label=part)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("% in 8 bits")
    _layers(axes, rows)


def _layers(axes: Axes, rows: list[Json]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(row["part"] in COLORS for row in rows):
        axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=2)


def _outliers(axes: Axes, figures: Json) -> None:
    places = list(range(len(figures["before"])))
    axes.bar([i - 0.2 for i in places], figures["before"], 0.4, color=BEFORE, label="before")
    axes.bar([i + 0.2 for i in places], figures["after"], 0.4, color=AFTER, label="after")
    axes.set_xlabel("layer")
    axes.set_ylabel("largest / mean")
    axes.legend(fontsize=7, frameon=False)


def _times(axes: Axes, kernels: list[Json]) -> None:
    shown = kernels[::-1]
    axes.barh([row["kernel"] for row in shown], [row["predicted_us"] for row in shown], color=AFTER)
    for place, row in enumerate(shown):
        axes.annotate(f" {row['predicted_us']:.1f}", (row["predicted_us"], place), va="center", fontsize=7)
    axes.set_xlabel("microseconds")
    axes.margins(x=0.12)


# ---- the page ----------------------------------------------------------------------------------------


def page(report: Json) -> str:
    """The whole page as HTML text, without scripts or external links."""
    import matplotlib
    from jinja2 import Environment

    matplotlib.rcParams.update(
        {"svg.hashsalt": "qcompile", "svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"}
    )
    template = (Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8")
    report = _printable(report)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    total = sum(row["predicted_us"] for row in report["kernels"])
    passes = [("", entry) for entry in report["passes"]]
    passes += [(f"{draft['name']}: ", entry) for draft in report["drafts"] for entry in draft["passes"]]
    return environment.from_string(template).render(
        report=report, plots=list(plots(report)), token_us=total, passes=passes
    )


def _printable(value: Any) -> Any:
    """A part of a report with its texts `escaped`: no document may have control characters."""
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return escaped(value) if isinstance(value, str) else value


def main() -> None:
    """Read a report from standard input and write its page to standard output."""
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401 (import before the report arrives)

    sys.stdout.write(page(json.load(sys.stdin)))


if __name__ == "__main__":
    main()
