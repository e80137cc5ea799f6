"""Perplexity and bytes of weights of integers by the size of their groups, on CPUs.

    python benchmarks/group_quality.py heldout.jsonl [--windows 20] [--only '^w8a8$'] [--out FILE]

Weights are rounded to nearest, with a float32 output head and a float32 KV cache, so that only the linears differ. Bits
are those of the linears' weights with their scales and zero points. Rows without a weight format are recipes as they
are, with their own head and cache. Rows of FILE that are not measured now stay in it; each has its commit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result
from qcompile.formats.registry import weight_format
from qcompile.recipes import get_recipe

MODEL = Path(__file__).parents[1] / "samples" / "pycode-26m"
Names = tuple[str, str, str]
"""Recipe, weights and activations; without weights the recipe as it is, but for activations, the head's too."""
BYTES = ("w8_sym_channel", "w8_sym_g128", "w8_sym_g64", "w8_sym_g32")
ROWS: tuple[Names, ...] = (
    ("f32", "f32", "f32"),
    *(("w8a8", weight, "int8") for weight in BYTES),
    *(("w8a8", weight, "int8_g128") for weight in (BYTES[0], BYTES[-1])),
    *(("w4a16", f"w4_asym_g{group}", "bf16") for group in (128, 64, 32)),
    *((recipe, "", "") for recipe in ("bf16", "w8a8", "w8a8-g32")),
    ("w8a8", "", "int8"),
)
ROWS_COUNTED, WIDTH = 64, 512
"""Shape of the weight in which bytes are counted: multiples of all groups and blocks."""


def measure(recipe: str, weight: str, activation: str, data: Path, windows: int) -> dict[str, Any]:
    """Build an artifact with linears in the formats `weight` and `activation`, or the recipe's, and evaluate it."""
    other, format = ("weight", weight) if weight else ("head_activation", activation)
    formats = {"assign_precision.activation": activation, f"assign_precision.{other}": format}
    options = formats if activation else {}
    options |= {"cache.format": "kv32", "calibrate.descent": "0"} if weight else {}
    with tempfile.TemporaryDirectory() as folder:
        qcompile.build(
            MODEL, Path(folder) / "out", recipe=recipe, options=options, head_dtype="f32" if weight else None
        )
        with qcompile.load(Path(folder) / "out") as llm:
            result = llm.perplexity(data, max_windows=windows)
    stored = weight or str(get_recipe(recipe).weight)
    bits = 8 * sum(weight_format(stored).packed_bytes(ROWS_COUNTED, WIDTH).values()) / (ROWS_COUNTED * WIDTH)
    return {"recipe": recipe, "weight": weight, "activation": activation, "bits": bits, "perplexity": result.perplexity}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--only", default="", help="regular expression that `recipe weights activations` must match")
    parser.add_argument("--out", type=Path, default=RESULTS / "group_quality.json")
    arguments = parser.parse_args()
    rows = kept(arguments.out)
    for row in ROWS:
        if re.search(arguments.only, " ".join(row).strip()):
            rows[row] = measure(*row, arguments.data, arguments.windows) | {"on": machine()}
            print(json.dumps(rows[row]), flush=True)
    measured = [rows[row] for row in ROWS if row in rows]
    write_result(arguments.out, {"model": MODEL.name, "windows": arguments.windows, "rows": measured})


def kept(path: Path) -> dict[Names, dict[str, Any]]:
    """The rows of a result file by recipe, weights and activations."""
    measured = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return {(row["recipe"], row["weight"], row["activation"]): row for row in measured}


if __name__ == "__main__":
    main()
