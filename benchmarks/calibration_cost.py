"""What calibrated builds cost: time for the sample model, peak memory for a large one, each in a process of its own.

    python benchmarks/calibration_cost.py --calib calib.jsonl --large CHECKPOINT [--rows "mixllm, sample model"]

Calibration streams blocks, so what a build needs is one block's weights, its Hessians, and the values of all samples at
one place. So the large model's first block is measured with all of the 128 samples of 1,024 tokens that a build takes.
Salience keeps values at more places the more blocks there are, up to a limit that the 32 samples it looks at reach in
three blocks: those are measured on a quarter of the text, which is as many. The large model's text is drawn at random:
the number of tokens alone matters. Peaks are Linux's VmHWM, file pages that are mapped included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result
from qcompile.calibration import SAMPLE_TOKENS, SAMPLES, CalibrationSource

MODEL = Path(__file__).parents[1] / "samples" / "pycode-26m"
MOST_GIB, MOST_SECONDS = 6.0, 240


@dataclass(frozen=True)
class Row:
    """A build: recipe, how many layers of the large model (0: all, None: of the sample model), and how much text."""

    name: str
    recipe: str
    layers: int | None = None
    samples: int = SAMPLES
    length: int = SAMPLE_TOKENS
    options: dict[str, str] = field(default_factory=dict)


ROWS = [
    Row("qserve, sample model", "qserve"),
    Row("mixllm, sample model", "mixllm"),
    Row("qserve, one layer, all text", "qserve", 1),
    Row("w4a16, one layer, all text", "w4a16", 1),
    Row("mixllm, one layer, all text", "mixllm", 1),
    Row("mixllm, three layers, a quarter of the text", "mixllm", 3, SAMPLES // 4),
    Row("mixllm, one layer, a quarter of the text", "mixllm", 1, SAMPLES // 4),
]


def shortened(model: Path, layers: int, folder: Path) -> Path:
    """`model` itself, or in `folder` its first layers: the same files, another config."""
    if not layers:
        return model
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in (*model.glob("*.safetensors"), *model.glob("*.safetensors.index.json")):
        (folder / file.name).symlink_to(file.resolve())
    return folder


def built(model: Path, row: Row, calib: Path, said: Any) -> None:
    """Build in this process; send its peak memory in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        text: Any = CalibrationSource(calib, row.samples, row.length)
        if row.layers is not None:
            source = Path(folder) / "model"
            source.mkdir()
            vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
            shape = (row.samples, row.length)
            text = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
            model = shortened(model, row.layers, source)
        qcompile.build(model, Path(folder) / "artifact", recipe=row.recipe, options=row.options, calib=text)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    said.put(int(status.split("VmHWM:")[1].split()[0]) * 1024)


def measure(row: Row, large: Path, calib: Path) -> dict[str, Any]:
    """The row's peak memory and seconds."""
    model = MODEL if row.layers is None else large
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    started = time.perf_counter()
    process = context.Process(target=built, args=(model, row, calib, said))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{row.name}: the build ended with {process.exitcode}")
    peak, seconds = said.get() / 2**30, time.perf_counter() - started
    limit = {"most_seconds": MOST_SECONDS} if row.layers is None else {"most_gib": MOST_GIB}
    met = seconds <= MOST_SECONDS if row.layers is None else peak <= MOST_GIB
    return {
        "row": row.name,
        "model": model.name,
        "recipe": row.recipe,
        "options": row.options,
        "layers": row.layers or "all",
        "tokens": row.samples * row.length,
        "peak_gib": round(peak, 3),
        "seconds": round(seconds),
        **limit,
        "met": met,
        "cores": machine()["cores"],
        "commit": machine()["commit"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calib", type=Path, required=True, help="text for the sample model")
    parser.add_argument("--large", type=Path, required=True, help="a checkpoint of a large model")
    parser.add_argument("--rows", default="", help="names of rows, separated by semicolons (all when empty)")
    parser.add_argument("--out", type=Path, default=RESULTS / "calibration_cost.json")
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.rows.split(";") if name.strip()] or [row.name for row in ROWS]
    known: dict[str, Any] = {}
    if arguments.out.is_file():
        known = {row["row"]: row for row in json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]}
    for row in ROWS:
        if row.name in wanted:
            known[row.name] = measure(row, arguments.large, arguments.calib)
            print(f"{row.name:48}{known[row.name]['peak_gib']:8.2f} GiB{known[row.name]['seconds']:7} s", flush=True)
            rows = [known[each.name] for each in ROWS if each.name in known]
            write_result(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
