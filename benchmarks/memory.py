"""Resident memory of a CPU artifact of the 1.1 B Llama shape (random weights), beside the bytes that it must hold.

    python benchmarks/memory.py [--recipes w4a8,w4a16] [--prompts 128,600] [--tokens 64] [--work out/memory]

Each artifact is loaded in a process that has built nothing. Memory is measured after `import qcompile` with all modules
that loading needs, after the load, and after the generation for each prompt, the shortest first. The first of these is
the baseline. What a model takes is the memory after a generation less the baseline. What it must hold is the bytes of
its weights, and of the pages of the KV cache that all generations so far have used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from qcompile.runtime import devices  # noqa: F401 - what loading imports belongs to the baseline

ROOT = Path(__file__).parents[1]
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> None:
    """Make the checkpoint, build, measure, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="w4a8,w4a16")
    parser.add_argument("--prompts", default="128,600", help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are generated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "memory", help="where model and artifacts go")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory.json")
    parser.add_argument("--artifact", type=Path, help="print what was measured with this one, and write nothing")
    given = parser.parse_args()
    if given.artifact:
        prompts = sorted(int(length) for length in given.prompts.split(","))
        print(json.dumps(measured(given.artifact, prompts, given.tokens, given.threads)))
        return
    from benchmarks.common import write_result  # with torch, which takes memory

    rows = []
    for recipe in given.recipes.split(","):
        artifact = built(given.work, recipe)
        command = [sys.executable, __file__, "--artifact", str(artifact)]
        command += [f"--{name}={getattr(given, name)}" for name in ("prompts", "tokens", "threads")]
        said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        rows.append({"recipe": recipe} | said)
        print(json.dumps(rows[-1], indent=1))
    sizes = {name: getattr(given, name) for name in ("prompts", "tokens", "threads")}
    write_result(given.out, {"model": "llama-1.1b", "shape": SHAPE, **sizes, "results": rows})


def built(work: Path, recipe: str) -> Path:
    """The artifact in `work`, which is made if it is missing."""
    model, artifact = work / "llama-1.1b", work / f"llama-1.1b-{recipe}"
    if not (model / "model.safetensors").exists():
        write_checkpoint(model, SHAPE)
    if not (artifact / "qcompile.json").exists():
        qcompile.build(str(model), artifact, recipe=recipe, target="cpu")
    return artifact


def write_checkpoint(folder: Path, shape: dict[str, Any]) -> None:
    """A bfloat16 checkpoint of a Llama's `shape` with random weights, always the same, and no tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(LlamaConfig(**shape)).state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(like.shape, dtype=torch.bfloat16)
        if like.dim() == 1
        else (0.02 * torch.randn(like.shape, generator=generator)).bfloat16()
        for name, like in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def measured(artifact: Path, prompts: list[int], tokens: int, threads: int) -> dict[str, Any]:
    """Bytes that `artifact` must hold, and those that this process took."""
    baseline, runs, pages = memory(), [], 0
    with qcompile.load(artifact, threads=threads, prefix_caching=False) as llm:
        loaded, runtime = memory(), llm.manifest["runtime"]
        weights, kv = sum(entry["bytes"] for entry in runtime["weights"]), runtime["kv"]
        for length in prompts:
            prompt = [3 + number % 500 for number in range(length)]
            llm.generate([prompt], max_tokens=tokens, temperature=0, ignore_eos=True)
            pages = max(pages, -(-(length + tokens) // kv["page_tokens"]))
            runs.append(run(length, memory(), baseline["resident"], weights + pages * kv["page_bytes"]))
    facts = {"weights_bytes": weights, "baseline": baseline, "loaded": loaded, "runs": runs}
    return facts | {"imports_torch": "torch" in sys.modules}


def run(prompt: int, now: dict[str, int], baseline: int, held: int) -> dict[str, Any]:
    """What was measured after a generation; `held` are the bytes of weights and cache."""
    shares = {
        "taken_over_held": round((now["resident"] - baseline) / held, 4),
        "resident_over_held_and_baseline": round(now["resident"] / (held + baseline), 4),
    }
    return {"prompt": prompt, "weights_and_cache_bytes": held, "memory": now} | shares


def memory() -> dict[str, int]:
    """Bytes of this process: resident, its proportional share of them, private, shared, and the peak so far."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    kb = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return {
        "resident": kb["Rss"] * 1024,
        "proportional": kb["Pss"] * 1024,
        "private": (kb["Private_Clean"] + kb["Private_Dirty"]) * 1024,
        "shared": (kb["Shared_Clean"] + kb["Shared_Dirty"]) * 1024,
        "peak": int(status.split("VmHWM:")[1].split()[0]) * 1024,
    }


if __name__ == "__main__":
    main()
