"""`qcompile doctor` on a Llama of 70 billion parameters of which only the configuration is there.

    python benchmarks/doctor_70b.py [--layers 80] [--recipe qserve]

Seconds are of the whole process, from start to exit; memory is its largest resident set. The exit code is 4 if it takes
10 seconds or 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, write_result

SECONDS, BYTES = 10.0, 1 << 30

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}


def measure(layers: int, recipe: str) -> dict[str, Any]:
    """Seconds, largest resident bytes and the answer of one `qcompile doctor` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": layers}))
        command = [sys.executable, "-m", "qcompile", "doctor", folder, "--recipe", recipe, "--json"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        seconds = time.perf_counter() - start
    answer = json.loads(done.stdout)
    plan = answer["plan"]
    return {
        "layers": layers,
        "recipe": recipe,
        "seconds": round(seconds, 2),
        "resident_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "exportable": answer["exportable"],
        "parameters": plan["parameters"],
        "memory_bytes": answer["memory_bytes"],
        "passes": {entry["name"]: entry["fired"] for entry in plan["passes"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--recipe", default="qserve")
    arguments = parser.parse_args()
    result = measure(arguments.layers, arguments.recipe)
    print(json.dumps(result, indent=1))
    met = result["exportable"] and result["seconds"] < SECONDS and result["resident_bytes"] < BYTES
    write_result(RESULTS / "doctor_70b.json", {**result, "met": met})
    sys.exit(0 if met else 4)


if __name__ == "__main__":
    main()
