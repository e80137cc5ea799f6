"""Perplexity and bytes of weights of integers by the size of their groups, on CPUs.

    python benchmarks/group_quality.py heldout.jsonl [--windows 20] [--out FILE]

All are rounded to nearest, with a float32 output head and a float32 KV cache, so that only the weights of the linears
differ. Bits are those of the linears' weights with their scales and zero points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile.formats.registry import weight_format

MODEL = Path(__file__).parents[1] / "samples" / "pycode-26m"
ROWS = {
    "f32": ("f32",),
    "w8a8": ("w8_sym_channel", "w8_sym_g128", "w8_sym_g64", "w8_sym_g32"),
    "w4a16": ("w4_asym_g128", "w4_asym_g64", "w4_asym_g32"),
}
"""Formats of weights by recipe. Only the first recipe's activations are float32."""
ROWS_COUNTED, WIDTH = 64, 512
"""Shape of the weight in which bytes are counted: multiples of all groups and blocks."""


def measure(recipe: str, weight: str, data: Path, windows: int) -> dict[str, Any]:
    """Build an artifact with linears in the format `weight`, and evaluate it."""
    options = {"assign_precision.weight": weight, "cache.format": "kv32", "calibrate.descent": "0"}
    with tempfile.TemporaryDirectory() as folder:
        qcompile.build(MODEL, Path(folder) / "out", recipe=recipe, options=options, head_dtype="f32")
        with qcompile.load(Path(folder) / "out") as llm:
            result = llm.perplexity(data, max_windows=windows)
    bits = 8 * sum(weight_format(weight).packed_bytes(ROWS_COUNTED, WIDTH).values()) / (ROWS_COUNTED * WIDTH)
    return {"recipe": recipe, "weight": weight, "bits": bits, "perplexity": result.perplexity}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "group_quality.json")
    arguments = parser.parse_args()
    rows = []
    for recipe, weights in ROWS.items():
        for weight in weights:
            rows.append(measure(recipe, weight, arguments.data, arguments.windows))
            print(json.dumps(rows[-1]), flush=True)
    write_result(arguments.out, {"model": MODEL.name, "windows": arguments.windows, "rows": rows})


if __name__ == "__main__":
    main()
