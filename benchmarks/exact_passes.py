"""Every pass that keeps the function, on every family of `family_list.py`, in float64: how far the logits move.

    python benchmarks/exact_passes.py [--only TEXT ...]

A row has, for each pass alone and for all of them one after another, how often it fired, what it left alone, and the
largest change of a logit relative to the largest logit. Right is at most 1e-9: float64 rounding through weights that
are multiplied, rotated and centered in float64. Families that raising refuses are in families.md. Written to
results/exact_passes.json and exact_passes.md; the exit code is 4 if a row is wrong, or one of ROTATED does not turn
its whole residual stream.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, write_result
from benchmarks.families import quiet, save_random
from benchmarks.family_list import FAMILIES
from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph
from qcompile.passes import dataflow
from qcompile.passes.base import Pass, apply
from qcompile.passes.fold_norms import FoldNorms
from qcompile.passes.raising import Raise
from qcompile.passes.rotate import Rotate
from qcompile.passes.split import Split
from tests.passes.test_exact import ALONE, EXACT, TOGETHER, inputs

ROTATED = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "granite", "phi3"),
    *("smollm3", "starcoder2", "opt", "gpt_neox"),
)
"""Model types with a residual stream that must be rotated as a whole."""

NORMS_ON_THE_STREAM = ("opt, narrow embeddings",)
"""Of these types, but with norms behind the additions: no rotation passes them, and the notes say so."""

NOTHING_TO_DO = (("nanochat", "fold_norms"),)
"""Norms without parameters."""

COLUMNS: tuple[tuple[str, tuple[Pass, ...]], ...] = (
    *((rewrite.name, (rewrite,)) for rewrite in ALONE),
    ("together", TOGETHER[-1]),
)
Row = dict[str, Any]


def turned(graph: Graph) -> tuple[bool, str]:
    """Whether norms folded, every residual stream of `graph` is rotated as a whole; else why not."""
    folded = apply(FoldNorms(), graph).graph
    streams = dataflow.residual_streams(folded)
    result = apply(Rotate(heads=False), folded)
    least = sum(len(s.writers) + len({reader for reader, _ in dataflow.carried(s.reads)}) for s in streams)
    return not result.notes and result.fired >= least > 0, "; ".join(result.notes)


def examine(kind: str, settings: dict[str, Any]) -> Row:
    """One family: each column's count, notes and error."""
    start = time.perf_counter()
    row: Row = {"type": kind, "columns": {}}
    with tempfile.TemporaryDirectory() as folder:
        save_random(kind, settings, Path(folder))
        try:
            before = apply(Split(), apply(Raise(), frontend.load(folder)).graph).graph
        except UnsupportedError as error:
            return row | {"refused": str(error)}
        for name, passes in COLUMNS:
            after, fired = before, 0
            notes: list[str] = []
            for rewrite in passes:
                result = apply(rewrite, after)
                after, fired, notes = result.graph, fired + result.fired, [*notes, *result.notes]
            moved = check.equivalent(after, before, inputs())
            row["columns"][name] = {"fired": fired, "left_alone": len(notes), "error": moved, "notes": notes[:3]}
        row["whole_stream_turns"], row["why_not"] = turned(before)
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def faults(rows: dict[str, Row]) -> list[str]:
    """What is not as it must be, by row."""
    result = []
    for name, row in rows.items():
        for column, entry in row["columns"].items():
            if not entry["error"] <= EXACT:
                result.append(f"{name}: {column} moves logits by {entry['error']:.1e}")
            if not entry["fired"] and not entry["left_alone"] and (name, column) not in NOTHING_TO_DO:
                result.append(f"{name}: {column} did nothing and says nothing")
        must_turn = row["type"] in ROTATED and "refused" not in row and name not in NORMS_ON_THE_STREAM
        if must_turn and not row["whole_stream_turns"]:
            result.append(f"{name}: its residual stream does not turn: {row['why_not']}")
    turning = {row["type"] for row in rows.values() if row.get("whole_stream_turns")}
    return [*result, *(f"no row of {kind} turns" for kind in ROTATED if kind not in turning and len(rows) > 1)]


def page(rows: dict[str, Row]) -> str:
    """The table for people."""
    names = [name for name, _ in COLUMNS]
    lines = ["# Passes that keep the function, in float64", "", "Times fired, and the largest relative change.", ""]
    lines += [f"| family | {' | '.join(names)} | whole stream turns |", "|---" * (len(names) + 2) + "|"]
    for name, row in rows.items():
        if "refused" in row:
            lines.append(f"| {name} | refused: {row['refused'].replace('|', ' ')} |" + " |" * len(names))
            continue
        cells = [f"{row['columns'][n]['fired']}, {row['columns'][n]['error']:.0e}" for n in names]
        turns = "yes" if row["whole_stream_turns"] else f"no: {row['why_not']}"
        lines.append(f"| {name} | {' | '.join(cells)} | {turns.replace('|', ' ')} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="rows with TEXT in their name")
    given = parser.parse_args(arguments)
    chosen = [entry for entry in FAMILIES if any(text in entry[0] for text in given.only)]
    rows = {}
    for name, kind, settings in chosen:
        with quiet():
            rows[name] = examine(kind, settings)
        print(name, rows[name].get("refused", rows[name].get("seconds")), flush=True)
    wrong = faults(rows)
    print("\n".join(wrong) or "all as they must be")
    if given.only == [""]:
        write_result(RESULTS / "exact_passes.json", {"rows": rows, "faults": wrong, "met": not wrong})
        (RESULTS / "exact_passes.md").write_text(page(rows), encoding="utf-8")
    sys.stdout.flush()
    os._exit(4 if wrong else 0)  # transformers' modules would take a second to be taken apart


if __name__ == "__main__":
    main()
