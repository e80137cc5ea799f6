"""Peak memory of calibrated builds of a large model, each in a process of its own.

    python benchmarks/calibration_memory.py CHECKPOINT [--rows "qserve, whole model"]

Calibration streams blocks, so what a build needs is one block's weights, its Hessians, and the values of all samples at
one place: depth adds what the page cache shows of the file, tokens what they are worth in one block. So the whole model
is measured on little text, and one block of it on all the text a build takes (128 samples of 1,024 tokens). Tokens are
drawn at random: their number alone matters. Peaks are Linux's VmHWM, file pages that are mapped included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, write_result

import qcompile
from qcompile.calibration import SAMPLE_TOKENS, SAMPLES

LIMIT_GIB = 6.0


@dataclass(frozen=True)
class Row:
    """A build: recipe, how many layers of the model (0: all), and how much text."""

    name: str
    recipe: str
    layers: int
    samples: int
    length: int
    options: dict[str, str] = field(default_factory=dict)


ROWS = [
    Row("qserve, whole model", "qserve", 0, 2, 128, {"calibrate.gptq": "false"}),
    Row("qserve, one layer, a sixteenth of the text", "qserve", 1, SAMPLES // 16, SAMPLE_TOKENS),
    Row("qserve, one layer, all text", "qserve", 1, SAMPLES, SAMPLE_TOKENS),
    Row("mixllm, one layer, a sixteenth of the text", "mixllm", 1, SAMPLES // 16, SAMPLE_TOKENS),
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


def built(model: Path, row: Row, said: Any) -> None:
    """Build in this process; send its peak memory in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        source.mkdir()
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, config["vocab_size"], (row.samples, row.length), generator=generator)
        out = Path(folder) / "artifact"
        qcompile.build(shortened(model, row.layers, source), out, recipe=row.recipe, options=row.options, calib=text)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    said.put(int(status.split("VmHWM:")[1].split()[0]) * 1024)


def measure(model: Path, row: Row) -> dict[str, Any]:
    """The row's peak memory and seconds."""
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    started = time.perf_counter()
    process = context.Process(target=built, args=(model, row, said))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{row.name}: the build ended with {process.exitcode}")
    peak = said.get() / 2**30
    return {
        "row": row.name,
        "recipe": row.recipe,
        "options": row.options,
        "layers": row.layers or "all",
        "tokens": row.samples * row.length,
        "peak_gib": round(peak, 3),
        "most_gib": LIMIT_GIB,
        "met": peak <= LIMIT_GIB,
        "seconds": round(time.perf_counter() - started),
        "commit": machine()["commit"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="", help="names of rows, separated by semicolons (all when empty)")
    parser.add_argument("--out", type=Path, default=RESULTS / "calibration_memory.json")
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.rows.split(";") if name.strip()] or [row.name for row in ROWS]
    known: dict[str, Any] = {}
    if arguments.out.is_file():
        known = {row["row"]: row for row in json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]}
    for row in ROWS:
        if row.name in wanted:
            known[row.name] = measure(arguments.model, row)
            print(f"{row.name:48}{known[row.name]['peak_gib']:8.2f} GiB{known[row.name]['seconds']:7} s", flush=True)
            rows = [known[each.name] for each in ROWS if each.name in known]
            write_result(arguments.out, {"model": arguments.model.name, "rows": rows})


if __name__ == "__main__":
    main()
