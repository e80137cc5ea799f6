"""What calibration wins back of the loss that rounding makes, through generated kernels, and each technique's share.

    python benchmarks/cpu_calibrated.py heldout.jsonl --calib calib.jsonl [--rows "qserve,mixllm 10 %"] [--ablation]

The table (QServe, MixLLM, QSpec's W4A4, nested weights) has the loss each row must stay within; rows that are not run
keep what the result file says of them. `--ablation` adds techniques one by one, as QServe's Figure 12 and MixLLM's
Figure 6 do, on the first windows and a part of the calibration text. Output heads are in float32, as in cpu_quality.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result
from qcompile.calibration import SAMPLES, CalibrationSource

MODEL = Path(__file__).parents[1] / "samples" / "pycode-26m"
FLOAT = 5.2958
ABLATION_WINDOWS, ABLATION_SAMPLES = 16, 24


@dataclass(frozen=True)
class Row:
    """A scheme: a recipe with settings, calibrated or not, and the loss over float it must stay within."""

    name: str
    recipe: str
    options: dict[str, str] = field(default_factory=dict)
    most: float | None = None
    calibrated: bool = True


KV32, KV4 = {"cache.format": "kv32"}, {"cache.format": "kv4"}
ROTATED = {"fold_norms.enabled": "true", "rotate.enabled": "true"}
SMOOTHED = {"smooth_attention.enabled": "true", "smooth_attention.alpha": "0.5"}
PLAIN = {f"{name}.enabled": "false" for name in ("fold_norms", "rotate", "center_keys", "smooth_attention")}
CENTERED = {"center_keys.enabled": "true"}
ROTATED_KEYS = {"rotate_keys.enabled": "true", **CENTERED}
NESTED = {**KV32, "assign_precision.activation": "int8_g128"}

TABLE = [
    Row("W4 g128 A16", "w4a16", KV32, 0.056),
    Row("mixllm 10 %", "mixllm", KV32, 0.022),
    Row("mixllm 20 %", "mixllm", {**KV32, "salience.fraction": "0.2"}, 0.018),
    Row("KV4 alone", "f32", {**KV4, **ROTATED, **ROTATED_KEYS}, 0.055),
    Row("qserve", "qserve", {}, 0.135),
    Row("qserve-channel", "qserve-channel", {}, 0.180),
    Row("w4a4 g128", "w4a4-g128", KV32, 0.480),
    Row("w4a4 token", "w4a4", KV32, 0.700),
    Row("nested 8 bits", "nested", KV32, 0.005),
    Row("nested upper nibble", "w4a8", {**NESTED, "assign_precision.weight": "nested_4"}, 0.100),
]

APART = {"calibrate.restore": "false"}
QOQ = {"calibrate.clip": "false", "calibrate.gptq": "false"}
MIX = {**KV32, **APART, "salience.compensated": "false"}
ABLATION = [
    Row("float32", "f32", {}, calibrated=False),
    Row("QoQ: W8A8", "w8a8", {**KV32, "assign_precision.activation": "int8"}, calibrated=False),
    Row("QoQ: W4 per channel", "qserve-channel", {**PLAIN, **KV32}, calibrated=False),
    Row("QoQ: + groups of 128 in two levels", "qserve", {**PLAIN, **KV32}, calibrated=False),
    Row("QoQ: + rotation", "qserve", {**PLAIN, **KV32, **ROTATED}, calibrated=False),
    Row("QoQ: + KV4", "qserve", {**PLAIN, **ROTATED}, calibrated=False),
    Row("QoQ: + SmoothAttention", "qserve", QOQ),
    Row("QoQ: + clipping", "qserve", {**APART, "calibrate.gptq": "false"}),
    Row("QoQ: + GPTQ", "qserve", APART),
    Row("QoQ: + making up for layers ahead", "qserve", {}),
    Row("QoQ: + smoothing of output modules", "qserve", {"smooth.enabled": "true"}),
    Row("KV4: rounded", "f32", KV4, calibrated=False),
    Row("KV4: + rotation of values", "f32", {**KV4, **ROTATED}, calibrated=False),
    Row("KV4: + SmoothAttention", "f32", {**KV4, **ROTATED, **SMOOTHED}),
    Row("KV4: rotation of queries and keys in its place", "f32", {**KV4, **ROTATED, **ROTATED_KEYS}),
    Row("MixLLM: W4 g128 A8 g128", "mixllm", {**KV32, "salience.fraction": "0"}, calibrated=False),
    Row("MixLLM: + 10 % of each layer by rounding error", "mixllm", KV32, calibrated=False),
    Row("MixLLM: + 10 % of all by Fisher alone", "mixllm", {**MIX, **QOQ, "salience.first_order": "false"}),
    Row("MixLLM: + first-order term", "mixllm", {**MIX, **QOQ}),
    Row("MixLLM: + GPTQ", "mixllm", {**MIX, "calibrate.clip": "false"}),
    Row("MixLLM: + clipping", "mixllm", MIX),
    Row("MixLLM: + salience of what GPTQ leaves", "mixllm", {**KV32, **APART}),
    Row("MixLLM: + making up for layers ahead", "mixllm", KV32),
]


def measure(row: Row, data: Path, calib: Path, windows: int | None, samples: int) -> dict[str, Any]:
    """Build `row`'s artifact from `samples` of calibration text; evaluate the first `windows` windows (None: all)."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "artifact"
        text = CalibrationSource(calib, samples) if row.calibrated else None
        qcompile.build(MODEL, out, recipe=row.recipe, options=row.options, head_dtype="f32", calib=text)
        built = time.perf_counter() - started
        with qcompile.load(out) as llm:
            result = llm.perplexity(data, max_windows=windows)
    return {
        "row": row.name,
        "recipe": row.recipe,
        "options": row.options,
        "calibration_samples": samples if row.calibrated else 0,
        "perplexity": result.perplexity,
        "windows": result.windows,
        "build_seconds": built,
        "eval_seconds": time.perf_counter() - started - built,
        "commit": machine()["commit"],
        "cores": machine()["cores"],
    }


def judged(row: Row, result: dict[str, Any]) -> dict[str, Any]:
    """`result` of the table with the loss over float, and whether it is small enough."""
    loss = result["perplexity"] - FLOAT
    return {**result, "over_float": loss, "must_reach": row.most, "met": row.most is None or loss <= row.most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--rows", default="", help="names of rows, separated by commas (all when empty)")
    parser.add_argument("--ablation", action="store_true", help="techniques one by one, instead of the table")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_calibrated.json")
    arguments = parser.parse_args()
    part = "ablation" if arguments.ablation else "table"
    rows = ABLATION if arguments.ablation else TABLE
    document: dict[str, Any] = {"table": [], "ablation": []}
    if arguments.out.is_file():
        document |= json.loads(arguments.out.read_text(encoding="utf-8"))
    known = {result["row"]: result for result in document[part]}
    wanted = [name.strip() for name in arguments.rows.split(",") if name.strip()] or [row.name for row in rows]
    unknown = set(wanted) - {row.name for row in rows}
    if unknown:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in rows)}")
    for row in rows:
        if row.name not in wanted:
            continue
        size = (ABLATION_WINDOWS, ABLATION_SAMPLES) if arguments.ablation else (None, SAMPLES)
        result = measure(row, arguments.data, arguments.calib, *size)
        known[row.name] = result if arguments.ablation else judged(row, result)
        print(f"{row.name:48}{result['perplexity']:9.4f}{result['build_seconds']:7.0f} s", flush=True)
        document[part] = [known[r.name] for r in rows if r.name in known]
        results = {"model": MODEL.name, "float": FLOAT, "table": document["table"], "ablation": document["ablation"]}
        write_result(arguments.out, results)


if __name__ == "__main__":
    main()
