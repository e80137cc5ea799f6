"""Perplexity of every recipe through generated kernels and the quantized cache, beside the expected values.

    python benchmarks/cpu_quality.py heldout.jsonl [--rows W8A8,KV4] [--head int8] [--out FILE]

Expected values come from an independent prototype of the same rounding (rounding to nearest, output head in
float); each row must be met within 0.01, those with 4-bit activations within 0.02. Rows of FILE that are not measured
now stay in it; each has its commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result

MODEL = Path(__file__).parents[1] / "samples" / "pycode-26m"
TOLERANCE = 0.01


@dataclass(frozen=True)
class Row:
    """One scheme: a recipe with settings, and the perplexity the prototype gave."""

    name: str
    recipe: str
    expected: float
    options: dict[str, str]
    head: str | None = "f32"
    tolerance: float = TOLERANCE


PLAIN = {"fold_norms.enabled": "false", "rotate.enabled": "false", "smooth_attention.enabled": "false"}
"""What QServe and QuaRot do ahead of rounding, switched off."""

NESTED = {"assign_precision.weight": "nested_8_4", "assign_precision.activation": "int8_g128"}
"""Expected without rounded activations, which the kernel of this format has not; theirs is the wider tolerance."""

UNCLIPPED = {"assign_precision.activation": "int4"}

ROWS = [
    Row("float32", "f32", 5.2958, {}, tolerance=0.0005),
    Row("W8A8", "w8a8", 5.3028, {"cache.format": "kv32", "assign_precision.activation": "int8"}),
    Row("W4 g128 A16", "w4a16", 5.5306, {"cache.format": "kv32"}),
    Row("W4 g128 A8", "w4a8", 5.5381, {"cache.format": "kv32"}),
    Row("W4 channel A8", "qserve-channel", 5.6708, {"cache.format": "kv32", **PLAIN}),
    Row("KV8", "f32", 5.2960, {"cache.format": "kv8"}),
    Row("KV4", "f32", 5.3834, {"cache.format": "kv4"}),
    Row("qoq_g128 A8 KV4", "qserve", 5.7027, PLAIN),
    Row("W4 channel A8 KV4", "qserve-channel", 5.7840, PLAIN),
    Row("MXFP4", "mxfp4", 5.5990, {"cache.format": "kv32"}),
    Row("nested 8 bits", "w4a8", 5.2951, {"cache.format": "kv32", **NESTED}, tolerance=0.02),
    Row("nested upper nibble A16", "w4a16", 5.5271, {"cache.format": "kv32", "assign_precision.weight": "nested_4"}),
    Row("W4A4 g128", "w4a4-g128", 6.3090, {"cache.format": "kv32", **PLAIN}, tolerance=0.02),
    Row("W4A4 token", "w4a4", 7.9236, {"cache.format": "kv32", **UNCLIPPED, **PLAIN}, tolerance=0.02),
]


def measure(row: Row, data: Path, folder: Path) -> dict[str, Any]:
    """Build `row`'s artifact, evaluate it on all windows, and with the recipe's own head state the head's cost."""
    started = time.perf_counter()
    qcompile.build(MODEL, folder / "artifact", recipe=row.recipe, options=row.options, head_dtype=row.head)
    with qcompile.load(folder / "artifact") as llm:
        result = llm.perplexity(data)
    return {
        "row": row.name,
        "recipe": row.recipe,
        "options": row.options,
        "head": row.head,
        "expected": row.expected,
        "perplexity": result.perplexity,
        "difference": result.perplexity - row.expected,
        "met": abs(result.perplexity - row.expected) <= row.tolerance,
        "windows": result.windows,
        "commit": machine()["commit"],
        "seconds": time.perf_counter() - started,
    }


def merged(path: Path, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`results` and the rows of the file at `path` that they do not replace, in the order of ROWS."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    rows = {row["row"]: {"commit": before["commit"], **row} for row in before["rows"]}
    rows |= {row["row"]: row for row in results}
    return [rows[row.name] for row in ROWS if row.name in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", default="", help="names of rows, separated by commas (all when empty)")
    parser.add_argument("--head", help="output head of every row: int8, bf16 or f32 (the table is with f32)")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_quality.json")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.rows.split(",") if name]
    results = []
    print(f"{'scheme':22}{'expected':>10}{'measured':>10}{'difference':>12}{'seconds':>9}")
    for row in ROWS:
        if wanted and row.name not in wanted:
            continue
        if arguments.head:
            row = Row(row.name, row.recipe, row.expected, row.options, arguments.head, row.tolerance)
        with tempfile.TemporaryDirectory() as folder:
            result = measure(row, arguments.data, Path(folder))
        results.append(result)
        print(
            f"{row.name:22}{row.expected:10.4f}{result['perplexity']:10.4f}{result['difference']:+12.4f}"
            f"{result['seconds']:9.0f}{'' if result['met'] else '  NOT MET'}",
            flush=True,
        )
    write_result(arguments.out, {"model": MODEL.name, "rows": merged(arguments.out, results)})


if __name__ == "__main__":
    main()
