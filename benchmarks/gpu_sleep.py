"""Sleep of a model on a GPU: memory that is used while it runs, sleeps and has woken, seconds, and tokens that differ.

    python benchmarks/gpu_sleep.py [--model llama-3-8b] [--layers 8] [--recipe qserve] [--rounds 3] [--ranks 1]
        [--out FILE]

The model has random weights. `gpu_mib` is the memory that is in use on all GPUs, and `host_mib` the resident
memory of this process. It has made and compiled the model, too: `before_load_mib` has both from before loading.
`different_tokens` counts greedy tokens after waking that differ from those before, in steps that are graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS
from benchmarks.gpu_common import facts, this_target
from benchmarks.gpu_e2e import MODELS
from benchmarks.gpu_ranks import prompt, random_checkpoint, tokens_of
from benchmarks.sleep import resident, seconds

BATCH, PROMPT, TOKENS = 8, 200, 64


def used() -> dict[str, float]:
    """MiB in use on all GPUs together and in this process."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return {"gpu_mib": sum(map(float, told)), "host_mib": resident()}


def one_round(llm: Any, level: int, prompts: list[list[int]]) -> dict[str, Any]:
    """Let the model run, sleep, wake and run again."""
    before, running = tokens_of(llm, prompts, TOKENS), used()
    to_sleep = seconds(lambda: llm.sleep(level))
    asleep = used()
    to_wake = seconds(llm.wake_up)
    after = tokens_of(llm, prompts, TOKENS)
    states = {"running": running, "asleep": asleep, "woken": used()}
    pairs = [(a, b) for one, other in zip(before, after, strict=True) for a, b in zip(one, other, strict=True)]
    return {f"{state}_{name}": number for state, numbers in states.items() for name, number in numbers.items()} | {
        "sleep_seconds": to_sleep,
        "wake_seconds": to_wake,
        "tokens": len(pairs),
        "different_tokens": sum(a != b for a, b in pairs),
    }


def measure(artifact: Path, rounds: int) -> dict[str, Any]:
    """What loading took, and for each level the medians of rounds; of different tokens, the sum."""
    result: dict[str, Any] = {"before_load_mib": used()}
    started = time.perf_counter()
    with qcompile.load(artifact) as llm:
        result["load_seconds"] = time.perf_counter() - started
        result["weights_mib"] = sum(entry["bytes"] for entry in llm.manifest["runtime"]["weights"]) / 2**20
        prompts = [prompt(number, PROMPT) for number in range(BATCH)]
        tokens_of(llm, prompts, TOKENS)  # graphs are captured from here on
        for level in (1, 2):
            made = [one_round(llm, level, prompts) for _ in range(rounds)]
            result[f"level_{level}"] = {name: statistics.median(one[name] for one in made) for name in made[0]}
            result[f"level_{level}"]["different_tokens"] = sum(one["different_tokens"] for one in made)
            print(json.dumps(result), flush=True)
    result["closed_mib"] = used()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--recipe", default="qserve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_sleep.json")
    given = parser.parse_args()
    result = {**facts(), "model": given.model, "layers": given.layers, "recipe": given.recipe, "rounds": given.rounds}
    result["ranks"] = given.ranks
    with tempfile.TemporaryDirectory() as made:
        (checkpoint := Path(made) / "model").mkdir()
        config = MODELS[given.model] | {"num_hidden_layers": given.layers, "max_position_embeddings": 4096}
        random_checkpoint(checkpoint, config)
        artifact = Path(made) / "artifact"
        qcompile.build(
            checkpoint, artifact, recipe=given.recipe, target=this_target(), options={"shard.ranks": str(given.ranks)}
        )
        result |= measure(artifact, given.rounds)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
