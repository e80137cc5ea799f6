"""What learned rounding wins back of the loss that 4-bit recipes have after calibration, and how long it takes.

    python benchmarks/learned_rounding.py MODEL --calib calib.jsonl --heldout heldout.jsonl [--recipe w4a16,w4a4]
        [--steps 0,128] [--samples 128] [--windows 20] [--set learn_rounding.rate=0.004] [--jobs N] [--out FILE]

Each recipe is built on the calibration text with every number of steps, 0 for calibration alone, and evaluated on the
first windows of the held-out text through its kernels, output head and cache. `above_bf16` is the perplexity less that
of the recipe `bf16`. With several jobs the cores are divided among them; a row has the number of cores it ran on. Rows
of FILE that are not measured now stay in it; each has its machine and commit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result
from qcompile.calibration import SAMPLES, CalibrationSource
from qcompile.recipes import parse_options

PLAIN = "bf16"
"""The recipe that losses are counted from."""


@dataclass(frozen=True)
class Row:
    """A recipe with options, calibrated on `samples` and learned in `steps` steps (0: calibrated alone)."""

    model: str
    recipe: str
    steps: int
    samples: int
    windows: int
    options: tuple[tuple[str, str], ...]

    @property
    def facts(self) -> dict[str, Any]:
        """What a result says of the row, and by what it is known again."""
        sizes = {"steps": self.steps, "samples": self.samples, "windows": self.windows}
        return {"model": self.model, "recipe": self.recipe, **sizes, "options": dict(self.options)}

    @property
    def settings(self) -> dict[str, str]:
        """The options of its build."""
        learning = {"learn_rounding.enabled": str(self.steps > 0).lower(), "learn_rounding.steps": str(self.steps or 1)}
        return {**learning, **dict(self.options)}


def measure(row: Row, model: Path, calib: Path, heldout: Path, cores: int) -> dict[str, Any]:
    """Build and evaluate one row on `cores` cores."""
    torch.set_num_threads(cores)
    with tempfile.TemporaryDirectory() as folder:
        text = CalibrationSource(calib, row.samples) if row.recipe != PLAIN else None
        settings = row.settings if text else {}
        report = qcompile.build(model, Path(folder) / "out", recipe=row.recipe, options=settings, calib=text)
        with qcompile.load(Path(folder) / "out", threads=cores) as llm:
            result = llm.perplexity(heldout, max_windows=row.windows)
    passes = {record.name: record for record in report.passes}
    seconds = {name: passes[name].seconds for name in ("calibrate", "learn_rounding") if name in passes}
    notes = passes["learn_rounding"].notes if row.steps else ()
    bits = {"bits": report.bits_per_weight, "perplexity": result.perplexity}
    return {**row.facts, **bits, "seconds": seconds, "notes": list(notes), "cores_used": cores, "on": machine()}


def merged(path: Path, measured: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`measured` and the rows of the file at `path` that they do not replace, each with its loss."""
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    rows = {json.dumps(known(row)): row for row in (*before, *measured)}
    plain = {(row["model"], row["windows"]): row["perplexity"] for row in rows.values() if row["recipe"] == PLAIN}
    for row in rows.values():
        base = plain.get((row["model"], row["windows"]))
        row["above_bf16"] = None if base is None else row["perplexity"] - base
    return list(rows.values())


def known(row: dict[str, Any]) -> list[Any]:
    """What tells a row of a result file from others."""
    return [row[name] for name in ("model", "recipe", "steps", "samples", "windows", "options")]


def rows_of(options: argparse.Namespace) -> list[Row]:
    """The rows to measure, the plain recipe first."""
    chosen = tuple(parse_options(options.set).items())
    sizes = options.samples, options.windows
    pairs = [(recipe, int(steps)) for recipe in options.recipe.split(",") for steps in options.steps.split(",")]
    rows = [Row(options.model.name, recipe, steps, *sizes, chosen) for recipe, steps in pairs if recipe != PLAIN]
    return [Row(options.model.name, PLAIN, 0, 0, options.windows, ()), *rows]


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    seconds = " ".join(f"{name} {spent:.0f} s" for name, spent in row["seconds"].items())
    loss = "" if row["above_bf16"] is None else f"{row['above_bf16']:+.4f}"
    return f"{row['recipe']:12}{row['steps']:6}{row['perplexity']:10.4f}{loss:>9}  {seconds} {' '.join(row['notes'])}"


def main() -> None:
    """Measure, print and write the rows; a row is written as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--recipe", default="w4a16,w4a4", help="recipes, separated by commas")
    parser.add_argument("--steps", default="0,128", help="numbers of steps, separated by commas")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration samples of 1,024 tokens")
    parser.add_argument("--windows", type=int, default=20, help="windows of held-out text, of 2,048 tokens")
    parser.add_argument("--set", action="append", default=[], help="an option of passes for all rows, pass.field=value")
    parser.add_argument("--jobs", type=int, default=1, help="rows that run at a time")
    parser.add_argument("--out", type=Path, default=RESULTS / "learned_rounding.json")
    options = parser.parse_args()
    rows = rows_of(options)
    inputs = options.model, options.calib, options.heldout, max(1, len(os.sched_getaffinity(0)) // options.jobs)
    begun = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(measure, row, *inputs) for row in rows]
        for number, done in enumerate(as_completed(waiting), 1):
            everything = merged(options.out, [done.result()])
            write_result(options.out, {"rows": everything})
            print(f"{number} of {len(rows)}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    wanted = [known(row.facts) for row in rows]
    print("\n".join(line(row) for row in everything if known(row) in wanted))


if __name__ == "__main__":
    main()
