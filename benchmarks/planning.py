"""What `qcompile doctor` predicts for models that need several machines: tables for docs/planning.md.

    python benchmarks/planning.py

Needs no GPU; takes some minutes. Nothing of it is measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, machine, write_result
from benchmarks.doctor_70b import LLAMA_70B
from benchmarks.gpu_peer_models import DEEPSEEK_V3
from qcompile.cli.doctor import examine
from qcompile.cli.predicting import Scenario
from qcompile.report.speed import Machines
from qcompile.targets import get_target

LLAMA_405B: dict[str, Any] = LLAMA_70B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
DEEPSEEK_671B = DEEPSEEK_V3 | {"num_hidden_layers": 61, "first_k_dense_replace": 3}
MODELS = {"llama-3.1-405b": LLAMA_405B, "deepseek-v3-671b": DEEPSEEK_671B}
TARGET, RECIPE, CONTEXT = "h100", "qserve", 4096
MACHINES = ((8, 1), (16, 2), (32, 4))
"""Numbers of GPUs and of machines."""


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            for gpus, nodes in MACHINES:
                scenario = Scenario(Machines(get_target(TARGET), gpus, nodes), CONTEXT)
                options = {"shard.ranks": str(gpus)}
                result = examine(Path(folder), TARGET, RECIPE, options, scenario=scenario)
                told = result.prediction or {"gpus": gpus, "nodes": nodes, "refused": result.unsupported}
                rows.append({"model": name, "recipe": RECIPE} | told)
                print(json.dumps(rows[-1]), flush=True)
    write_result(RESULTS / "planning.json", machine() | {"what": "predicted, not measured", "rows": rows})


if __name__ == "__main__":
    main()
