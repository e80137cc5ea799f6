"""Decode of a Llama-3-8B configuration with random weights made on this GPU, beside torch in bf16, in one run.

    python benchmarks/gpu_e2e.py [out.json] [--recipes qserve,w4a16,...] [--no-torch]

Steps are greedy, fed back on the GPU, from 1,024 tokens of context; tokens per second of the whole batch. No weights
are read: the checkpoint is an empty file of the right size, and the kernels get random codes on the device.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import facts
from qcompile import pipeline, targets
from qcompile.codegen.backend import backend_of
from qcompile.runtime.cuda import CudaExecutor
from qcompile.runtime.cuda_driver import driver
from qcompile.runtime.executor import Limits, Rows

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
CONTEXT, STEPS = 1024, 128
BATCHES = (1, 8, 16, 32, 64)


def empty_checkpoint(folder: Path) -> Path:
    """A checkpoint of the configuration whose weights are a hole in the disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(CONFIG))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    header, offset = {}, 0
    for name, value in model.state_dict().items():
        end = offset + 2 * value.numel()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder


def random_weight(name: str, size: int) -> torch.Tensor:
    """`size` bytes on the GPU that make sense as the packed part `name` ends with."""
    role = name.rsplit(".", 1)[-1]
    if role in ("w", "w_zero"):
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    if role == "w_scale":
        return torch.full((size // 4,), 1e-4, device="cuda")
    if role == "groups":  # of every packing a scale near 0.002, or a step of 8 and a zero point of 8
        word = 0x40084008 if ".qoq_g128." in name else 0x3B004308 if ".w4_asym_g128.g" in name else 0x3B000008
        return torch.full((size // 4,), word, dtype=torch.int32, device="cuda")
    if size > 1 << 20:
        return torch.randn(size // 2, dtype=torch.bfloat16, device="cuda") * 0.02
    return torch.ones(size // 4, device="cuda")


def open_random(recipe: str, folder: Path, max_batch: int) -> tuple[CudaExecutor, list[torch.Tensor], dict[str, Any]]:
    """An executor over random weights, the memory it reads, and what building took."""
    machine = targets.get_target("h200")
    started = time.perf_counter()
    found = pipeline.plan(folder, target="h200", recipe=recipe)
    files = backend_of(machine).prepare(found.programs, machine)()
    seconds = time.perf_counter() - started
    plan = json.loads(files["model.plan.json"])
    gpu = driver()
    functions = {}
    for label, kernel in plan["kernels"].items():
        cubin = files[f"{label}.cubin"]
        assert isinstance(cubin, bytes)
        module = gpu.module(cubin, lambda: b"", print)
        functions[label] = gpu.function(module, kernel["function"], kernel["shared_bytes"])
    blobs = [(name, size) for weight in found.weights for name, size in weight.blobs]
    memory = [random_weight(name, size) for name, size in blobs]
    addresses = {name: tensor.data_ptr() for (name, _), tensor in zip(blobs, memory, strict=True)}
    torch.cuda.synchronize()
    limits = Limits(512, CONFIG["vocab_size"], 64, CONFIG["max_position_embeddings"])
    pages = max_batch * -(-(CONTEXT + 3 * STEPS) // 64)
    spilling = [r["kernel"] for r in json.loads(files["report.json"]) if r["spill_bytes"]]
    notes = {"build_seconds": seconds, "kernels": len(plan["kernels"]), "spilling": spilling}
    notes["weight_bytes"] = sum(size for _, size in blobs)
    return CudaExecutor(gpu, plan, functions, addresses, pages, limits), memory, notes


def decode_rate(executor: CudaExecutor, batch: int) -> float:
    """Tokens per second of greedy decoding."""
    each = -(-(CONTEXT + 3 * STEPS) // 64)
    rows = [Rows([100 + i], CONTEXT, range(i * each, (i + 1) * each), 1) for i in range(batch)]
    executor.decode(rows, 8)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        executor.decode(rows, STEPS)
        best = max(best, batch * STEPS / (time.perf_counter() - started))
    return best


def torch_rates(batches: tuple[int, ...]) -> dict[int, float]:
    """Tokens per second of transformers in bf16, static cache, torch.compile with CUDA graphs."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    config = AutoConfig.for_model(**{k: v for k, v in CONFIG.items() if k != "architectures"})
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        torch.set_default_dtype(torch.float32)
    found = {}
    for batch in batches:
        cache = StaticCache(config=config, max_cache_len=CONTEXT + 2 * STEPS)

        def step(token: torch.Tensor, place: torch.Tensor, cache: Any = cache) -> torch.Tensor:
            logits = model(token, past_key_values=cache, cache_position=place, position_ids=place[None]).logits
            return logits[:, -1:].argmax(-1)

        with torch.inference_mode():
            ids = torch.randint(100, 1000, (batch, CONTEXT), device="cuda")
            token = step(ids, torch.arange(CONTEXT, device="cuda"))
            fast = torch.compile(step, mode="max-autotune-no-cudagraphs" if batch > 64 else "reduce-overhead")
            place = torch.tensor([CONTEXT], device="cuda")
            for _ in range(4):
                token = fast(token, place).clone()
                place += 1
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(STEPS):
                token = fast(token, place).clone()
                place += 1
            torch.cuda.synchronize()
            found[batch] = batch * STEPS / (time.perf_counter() - started)
        print(f"torch bf16 batch {batch:3}: {found[batch]:8.0f} tokens/s", flush=True)
        torch._dynamo.reset()
    return found


def main() -> None:
    options = [a for a in sys.argv[1:] if a.startswith("--")]
    named = [a.split("=", 1)[1].split(",") for a in options if a.startswith("--recipes=")]
    results: dict[str, Any] = {**facts(), "context": CONTEXT, "ours": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = empty_checkpoint(Path(temporary))
        for recipe in named[0] if named else ("qserve", "qserve-channel", "w4a16", "bf16"):
            executor, memory, notes = open_random(recipe, folder, max(BATCHES))
            rates = {batch: decode_rate(executor, batch) for batch in BATCHES}
            rows = [Rows([1], CONTEXT, range(32), 1)]
            executor.profile(True)
            for _ in range(3):
                executor.step(rows, False)
            times = {name: 1e6 * seconds / runs for name, (seconds, runs) in executor.profile_read().items()}
            results["ours"][recipe] = {**notes, "tokens_per_second": rates, "profile_us": times}
            print(f"{recipe:16}", {b: round(r) for b, r in rates.items()}, notes, flush=True)
            some = [*list(times.items())[10:21], *list(times.items())[-5:]]  # a layer, and what follows the last
            print("   ", {name: round(us, 1) for name, us in some}, flush=True)
            executor.close()
            del memory
            torch.cuda.empty_cache()
    if "--no-torch" not in options:
        results["torch_bf16"] = torch_rates((1, 64))
    paths = [a for a in sys.argv[1:] if not a.startswith("--")]
    if paths:
        Path(paths[0]).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
