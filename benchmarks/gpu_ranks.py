"""A model divided over GPUs (tensor parallelism) beside the same model on one GPU: decoding, prompts, and bits.

    python benchmarks/gpu_ranks.py [--model llama-3-8b] [--recipe qserve] [--ranks 1 2] [--layers 2 8] [--out FILE]

Weights are random, and of the same numbers for all counts of GPUs. All runs are in one process, one after another.
`decode_ms` is the time of a step by its number of sequences, after 1,024 tokens each. `prompt_seconds` is the time to
the first token of a prompt. With several numbers of layers, `of_all_layers` has the times of the whole model on the
line through those of the fewest and the most layers. `alone`: whether the tokens of each sequence are the same without
its neighbours; `agree`: the share of tokens, up to the first that differs, on which the divided model agrees with the
first count of GPUs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS
from benchmarks.gpu_common import facts, this_target
from benchmarks.gpu_e2e import MODELS

BATCHES, CONTEXT, STEPS = (1, 16, 64), 1024, 128
PROMPTS = (1024, 4096)
REPEATS = 3
SAMPLES = Path(__file__).parents[1] / "samples"


def random_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of the configuration with random weights, made on the first GPU."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(value.shape, dtype=torch.bfloat16)
        if value.dim() < 2
        else (torch.randn(value.shape, device="cuda") * 0.02).bfloat16().cpu()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")
    torch.cuda.empty_cache()
    return folder


def tokens_of(llm: Any, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens."""
    result = llm.generate(list(prompts), max_tokens=count, temperature=0, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in result]


def prompt(number: int, length: int) -> list[int]:
    """Random tokens, others for each number and length, so that no prompt begins as another one does."""
    return random.Random(f"{number} {length}").choices(range(100, 1100), k=length)


def seconds(llm: Any, prompts: list[list[int]], count: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        tokens_of(llm, prompts, count)
        times.append(time.perf_counter() - started)
    return sorted(times)[REPEATS // 2]


def measure(llm: Any) -> dict[str, Any]:
    """The numbers of a loaded model."""
    row: dict[str, Any] = {"decode_ms": {}, "prompt_seconds": {}}
    for batch in BATCHES:
        prompts = [prompt(number, CONTEXT) for number in range(batch)]
        seconds(llm, prompts, 2)  # prompts are in the cache from here on
        both = seconds(llm, prompts, 2), seconds(llm, prompts, STEPS + 2)
        row["decode_ms"][batch] = 1000 * (both[1] - both[0]) / STEPS
    for length in PROMPTS:
        times = []
        for number in range(REPEATS + 1):
            fresh = [prompt(1000 + number, length)]
            started = time.perf_counter()
            tokens_of(llm, fresh, 1)
            times.append(time.perf_counter() - started)
        row["prompt_seconds"][length] = sorted(times[1:])[REPEATS // 2]
    prompts = [prompt(2000 + number, 20 + 37 * number) for number in range(9)]
    together = tokens_of(llm, prompts, 64)
    row["alone"] = all(tokens_of(llm, [one], 64) == [result] for one, result in zip(prompts, together, strict=True))
    row["tokens"] = together
    return row


def agreement(rows: list[list[int]], others: list[list[int]]) -> float:
    """The share of tokens before the first that differs."""
    same = 0
    for row, other in zip(rows, others, strict=True):
        same += next((at for at, pair in enumerate(zip(row, other, strict=True)) if pair[0] != pair[1]), len(row))
    return same / sum(map(len, rows))


def rows_of(folder: Path, recipe: str, counts: Sequence[int], place: Path) -> list[dict[str, Any]]:
    """A row for each of these counts of GPUs."""
    rows: list[dict[str, Any]] = []
    for ranks in counts:
        started = time.perf_counter()
        with opened(folder, recipe, ranks, place / f"out{ranks}") as (llm, built):
            loaded = time.perf_counter() - started - built
            row = {"ranks": ranks, "build_seconds": built, "load_seconds": loaded, **measure(llm)}
        rows.append(row)
        row["agree"] = agreement(row["tokens"], rows[0]["tokens"])
        print(json.dumps({k: v for k, v in row.items() if k != "tokens"}), flush=True)
    for row in rows:
        del row["tokens"]
    return rows


@contextmanager
def opened(model: Path, recipe: str, ranks: int, out: Path) -> Iterator[tuple[Any, float]]:
    """The model on `ranks` GPUs, and the seconds that its build took."""
    started = time.perf_counter()
    qcompile.build(model, out, target=this_target(), recipe=recipe, options={"shard.ranks": str(ranks)})
    built = time.perf_counter() - started
    with qcompile.load(out, max_batch=max(BATCHES)) as llm:
        yield llm, built


def of_all_layers(rows: dict[int, list[dict[str, Any]]], layers: Sequence[int]) -> list[dict[str, Any]]:
    """Times of `layers[2]` layers, on the line through the `rows` of `layers[0]` and `layers[1]`."""
    result = []
    for one, other in zip(rows[layers[0]], rows[layers[1]], strict=True):
        row: dict[str, Any] = {"ranks": one["ranks"]}
        for kind in ("decode_ms", "prompt_seconds"):
            row[kind] = {}
            for size, least in one[kind].items():
                each = (other[kind][size] - least) / (layers[1] - layers[0])
                row[kind][size] = least + each * (layers[2] - layers[0])
        result.append(row)
    return result


def perplexities(recipe: str, counts: Sequence[int], place: Path) -> list[dict[str, Any]]:
    """Those of the sample model on its evaluation text."""
    rows = []
    for ranks in counts:
        with opened(SAMPLES / "pycode-26m", recipe, ranks, place / f"sample{ranks}") as (llm, _):
            result = llm.perplexity(SAMPLES / "heldout.jsonl")
            rows.append({"ranks": ranks, "windows": result.windows, "perplexity": result.perplexity})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3-8b")
    parser.add_argument("--recipe", default="qserve")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="numbers of layers, fewer than the model has")
    parser.add_argument("--perplexity", action="store_true", help="of a sample model, instead of times")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_ranks.json")
    arguments = parser.parse_args()
    config = MODELS[arguments.model] | {"max_position_embeddings": 16384}
    result: dict[str, Any] = {**facts(), "recipe": arguments.recipe}
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        if arguments.perplexity:
            result["perplexity"] = perplexities(arguments.recipe, arguments.ranks, place)
        else:
            result |= {"model": arguments.model, "context": CONTEXT, "layers": {}}
            for layers in arguments.layers or [config["num_hidden_layers"]]:
                (folder := place / f"model{layers}").mkdir()
                random_checkpoint(folder, config | {"num_hidden_layers": layers})
                result["layers"][layers] = rows_of(folder, arguments.recipe, arguments.ranks, place / str(layers))
                shutil.rmtree(place / str(layers))
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")  # also if a later run fails
            if len(arguments.layers) > 1:
                counts = min(arguments.layers), max(arguments.layers), config["num_hidden_layers"]
                result["of_all_layers"] = of_all_layers(result["layers"], counts)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
