"""Speed that `qcompile doctor` predicts, beside what other benchmarks measured on GPUs.

    python benchmarks/predictions.py [MODEL ...]

Reads the result files of gpu_e2e.py, gpu_peers.py and gpu_ranks.py; needs no GPU and takes about a minute a model. The
exit code is 4 if a prediction is off by more than 25 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, machine, write_result
from benchmarks.gpu_e2e import MODELS
from qcompile.cli.doctor import examine
from qcompile.cli.predicting import Scenario
from qcompile.report import speed
from qcompile.report.speed import Machines
from qcompile.targets import get_target

TOLERANCE = 0.25
"""Largest share by which a prediction may be off."""
DECODING = {"gpu_e2e_h100": "llama-3-8b", "gpu_e2e_h200": "llama-3-8b", "gpu_e2e_experts_h200": "qwen3-30b-a3b"}
DECODING |= {"gpu_e2e_gpt_oss_h200": "gpt-oss-20b"}
"""Models of the result files of gpu_e2e.py."""


@dataclass(frozen=True)
class Measured:
    """Tokens a second by number of sequences, or of prompts by length, as a result file has them."""

    file: str
    model: str
    recipe: str
    target: str
    ranks: int = 1
    layers: int = 0
    decode: tuple[tuple[int, float], ...] = ()
    prompts: tuple[tuple[int, float], ...] = ()


def measured() -> Iterator[Measured]:
    """All measurements of models that this repository can describe."""
    for file, model in DECODING.items():
        target = file.rpartition("_")[2]
        for recipe, row in _read(file)["ours"].items():
            rates = tuple((int(batch), rate) for batch, rate in row["tokens_per_second"].items())
            yield Measured(file, model, recipe, target, decode=rates)
    peers = _read("gpu_peers_h100")["models"]["llama-3-8b"]["ours"]
    for recipe, row in peers.items():
        prompts = tuple((int(tokens), rate) for tokens, rate in row["prompts"].items())
        yield Measured("gpu_peers_h100", "llama-3-8b", recipe, "h100", prompts=prompts)
    ranks = _read("gpu_ranks_h200")
    for layers, rows in ranks["layers"].items():
        for row in rows:
            rates = tuple((int(batch), 1e3 * int(batch) / each) for batch, each in row["decode_ms"].items())
            model, recipe = ranks["model"], ranks["recipe"]
            prompts = tuple((int(tokens), int(tokens) / each) for tokens, each in row["prompt_seconds"].items())
            yield Measured("gpu_ranks_h200", model, recipe, "h200", row["ranks"], int(layers), rates, prompts)


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(each: Measured, folder: Path) -> Iterator[dict[str, Any]]:
    """Each number of `each` beside its prediction."""
    config = dict(MODELS[each.model]) | {"max_position_embeddings": 1 << 17}
    if each.layers:
        config |= {"num_hidden_layers": each.layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    machines = Machines(get_target(each.target), each.ranks)
    options = {"shard.ranks": str(each.ranks)} if each.ranks > 1 else {}
    label = {"file": each.file, "model": each.model, "recipe": each.recipe, "target": each.target, "gpus": each.ranks}
    label |= {"layers": each.layers} if each.layers else {}
    if each.decode:
        scenario = Scenario(machines, 1024)
        result = examine(folder, each.target, each.recipe, options, scenario=scenario).prediction
        predicted = {entry["sequences"]: entry["tokens_per_second"] for entry in result["decode"]}
        for batch, rate in each.decode:
            yield label | _compared(f"decode, {batch} sequences", predicted[batch], rate)
    for tokens, rate in each.prompts:
        result = examine(folder, each.target, each.recipe, options, scenario=Scenario(machines, tokens)).prediction
        yield label | _compared(f"prompt of {tokens} tokens", result["prompt"]["tokens_per_second"], rate)


def _compared(what: str, predicted: float, rate: float) -> dict[str, Any]:
    return {"what": what, "predicted": round(predicted, 1), "measured": round(rate, 1), "ratio": predicted / rate}


def main() -> None:
    speed.BATCHES = (1, 8, 16, 32, 64)  # those that were measured
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for each in measured():
            if each.model in sys.argv[1:] or len(sys.argv) == 1:
                for row in rows_of(each, Path(folder)):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    off = [row for row in rows if abs(row["ratio"] - 1) > TOLERANCE]
    print(f"{len(off)} of {len(rows)} predictions are off by more than {TOLERANCE:.0%}", file=sys.stderr)
    if len(sys.argv) == 1:
        write_result(RESULTS / "predictions.json", machine() | {"tolerance": TOLERANCE, "off": len(off), "rows": rows})
    sys.exit(4 if off else 0)


if __name__ == "__main__":
    main()
