"""Adapters of requests on a GPU: bits, distance from merged weights, and what they cost a step.

    python benchmarks/gpu_lora.py [--layers 4] [--recipe qserve] [--ranks 1] [--out FILE]

`exact` is about a sample model with 16 adapters. `differing`: requests with other log probabilities, in any bit, alone
than beside requests with other adapters and without. `from_merged`: the largest difference of a log probability from an
artifact of the weights that the first adapter is merged into, over the tokens of a prompt, and `of_adapter`: the
largest change by the adapter itself.

`decode_ms` is the time of a step of Llama-3-8B's shape, cut to `--layers` layers, with random weights, by its number of
sequences, after 1,024 tokens each: of an artifact without places for adapters (`no places`), and for each of SETS of
one with places while no request has an adapter, and while each request has the next of 16 adapters.

`floor` is what reading the factors of a step's adapters once adds at least: `adapter_mib` of one adapter, beside the
`base_mib` of weights that a step reads in any case, and `added_ms` by the number of sequences, at the memory's peak
rate. `added` has what the floor adds to the time of `no places`, and what was measured, in percent.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, streamed_bytes
from benchmarks.gpu_common import facts, this_target
from benchmarks.gpu_e2e import MODELS
from benchmarks.gpu_ranks import CONTEXT, SAMPLES, STEPS, prompt, random_checkpoint, seconds

BATCHES, RANK, ADAPTERS = (1, 16, 64), 16, 16
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETS = {"rank 16, all linears": (RANK, ALL), "rank 8, query and value": (8, ("q_proj", "v_proj"))}
"""Rank and linears of the adapters; the second is PEFT's default."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}


def save_adapter(
    checkpoint: Path, folder: Path, seed: int, size: float, rank: int = RANK, linears: Sequence[str] = ALL
) -> Path:
    """An adapter in PEFT's format for linears of a checkpoint by their names, with random numbers of `size`."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no mapping)
            shape = file.get_slice(name).get_shape()
            if name.endswith(tuple(f"{linear}.weight" for linear in linears)):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                for part, sides in (("lora_A", (rank, shape[1])), ("lora_B", (shape[0], rank))):
                    tensors[f"{module}.{part}.weight"] = size * torch.randn(*sides, generator=generator)
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapters_of(
    checkpoint: Path, place: Path, size: float, rank: int = RANK, linears: Sequence[str] = ALL
) -> dict[str, Path]:
    """ADAPTERS adapters by name."""
    return {f"a{n}": save_adapter(checkpoint, place / f"a{n}", n, size, rank, linears) for n in range(ADAPTERS)}


def log_probabilities(llm: Any, prompts: list[list[int]], names: list[str | None]) -> list[list[float]]:
    """Of the greedy tokens of each request, in one batch."""
    params = [qcompile.SamplingParams(**GREEDY, lora=name) for name in names]
    outputs = llm.generate(prompts, params)
    return [
        [step[token].logprob for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)]
        for one in outputs
    ]


def exactness(place: Path, ranks: int) -> dict[str, Any]:
    """See the module's text."""
    checkpoint = SAMPLES / "pycode-1m"
    adapters = adapters_of(checkpoint, place / "adapters", 0.05)
    how: dict[str, Any] = {"target": this_target(), "recipe": "bf16"}
    shared = {"shard.ranks": str(ranks)}
    qcompile.build(checkpoint, place / "served", **how, options={"lora.rank": str(RANK), **shared})
    qcompile.build(checkpoint, place / "merged", **how, options=shared, lora=(str(adapters["a0"]),))
    names = [None, *adapters] * 2
    prompts = [[1 + (7 * at + 13 * number) % 500 for at in range(5 + 9 * number)] for number in range(len(names))]
    text = prompts[9]
    of_prompt: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0}

    def given(llm: Any, **more: Any) -> list[float]:
        output = llm.generate([text], qcompile.SamplingParams(**of_prompt, **more))[0]
        return [step[token].logprob for token, step in zip(text[1:], output.prompt_logprobs[1:], strict=True)]

    with qcompile.load(place / "served", lora=adapters) as llm:
        together = log_probabilities(llm, prompts, names)
        alone = [log_probabilities(llm, [one], [name])[0] for one, name in zip(prompts, names, strict=True)]
        adapted, plain = given(llm, lora="a0"), given(llm)
    with qcompile.load(place / "merged") as llm:
        merged = given(llm)
    return {
        "requests": len(names),
        "differing": sum(a != b for a, b in zip(alone, together, strict=True)),
        "from_merged": max(abs(a - b) for a, b in zip(adapted, merged, strict=True)),
        "of_adapter": max(abs(a - b) for a, b in zip(adapted, plain, strict=True)),
    }


@dataclass(frozen=True)
class Adapted:
    """A loaded model. Request i has the adapter `names[i]`; None: no adapter."""

    llm: Any
    names: tuple[str | None, ...]

    def generate(self, prompts: list[list[int]], **params: Any) -> Any:
        return self.llm.generate(prompts, [qcompile.SamplingParams(**params, lora=name) for name in self.names])


def decode_ms(llm: Any, names: list[str]) -> dict[int, float]:
    """Times of a step by the number of sequences; `names`: adapters that requests take in turn."""
    result = {}
    for batch in BATCHES:
        prompts = [prompt(number, CONTEXT) for number in range(batch)]
        adapted = Adapted(llm, tuple(islice(cycle(names), batch)) if names else (None,) * batch)
        seconds(adapted, prompts, 2)  # prompts are in the cache from here on
        both = seconds(adapted, prompts, 2), seconds(adapted, prompts, STEPS + 2)
        result[batch] = 1000 * (both[1] - both[0]) / STEPS
    return result


def speed(layers: int, recipe: str, place: Path) -> dict[str, Any]:
    """See the module's text."""
    (checkpoint := place / "model").mkdir()
    config = MODELS["llama-3-8b"] | {"num_hidden_layers": layers, "max_position_embeddings": 4096}
    random_checkpoint(checkpoint, config)
    how: dict[str, Any] = {"target": this_target(), "recipe": recipe}
    qcompile.build(checkpoint, place / "without", **how)
    with qcompile.load(place / "without", max_batch=max(BATCHES)) as llm:
        times: dict[str, Any] = {"no places": decode_ms(llm, [])}
        base, rate = streamed_bytes(place / "without"), 1e9 * llm.executor.peak("memory")
    result: dict[str, Any] = {"decode_ms": times, "floor": {"base_mib": base / 2**20}, "added": {}}
    for number, (name, (rank, linears)) in enumerate(SETS.items()):
        adapters = adapters_of(checkpoint, place / f"adapters{number}", 0.01, rank, linears)
        qcompile.build(checkpoint, place / f"with{number}", **how, options={"lora.rank": str(rank)})
        with qcompile.load(place / f"with{number}", lora=adapters, max_batch=max(BATCHES)) as llm:
            times[name] = {"adapters": decode_ms(llm, list(adapters)), "no adapter": decode_ms(llm, [])}
        size = adapter_bytes(adapters["a0"])
        floor = {batch: 1000 * min(batch, ADAPTERS) * size / rate for batch in BATCHES}
        result["floor"][name] = {"adapter_mib": size / 2**20, "added_ms": floor}
        plain, adapted = times["no places"], times[name]["adapters"]
        result["added"][name] = {
            "floor_percent": {batch: 100 * floor[batch] / plain[batch] for batch in BATCHES},
            "measured_percent": {batch: 100 * (adapted[batch] / plain[batch] - 1) for batch in BATCHES},
        }
        print(json.dumps(result), flush=True)
    return result


def adapter_bytes(folder: Path) -> int:
    """Bytes of an adapter's factors, which kernels read in bf16."""
    from safetensors.torch import load_file

    return 2 * sum(each.numel() for each in load_file(folder / "adapter_model.safetensors").values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="qserve")
    parser.add_argument("--layers", type=int, default=4, help="of the model that is timed; 0: none is")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the model of `exact`")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_lora.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {**facts(), "recipe": arguments.recipe, "layers": arguments.layers}
    result["ranks"] = arguments.ranks
    with tempfile.TemporaryDirectory() as made:
        result["exact"] = exactness(Path(made), arguments.ranks)
        print(json.dumps(result["exact"]), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")  # also if a later run fails
        if arguments.layers:
            result |= speed(arguments.layers, arguments.recipe, Path(made))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
