"""Decode of a Llama-3-8B configuration with random weights made on this GPU, beside torch in bf16, in one run.

    python benchmarks/gpu_e2e.py [out.json] [--recipes=qserve,w4a16,...] [--no-torch] [--no-largest]
        [--model=qwen3-30b-a3b|gpt-oss-20b]

With --model a configuration of that name: of 128 experts, 8 of them for a token, or of 32, 4 of them, with windows of
128 tokens in every other layer and sinks.

Steps are greedy, fed back on the GPU, from 1,024 tokens of context; tokens per second of the whole batch. No weights
are read: the checkpoint is an empty file of the right size, and the kernels get random codes on the device. `kernels`
are the microseconds of each kernel of a step at batch 1 and how often it runs: a graph of all its launches in the step,
so that weights come from memory as they do there. `largest` is QServe's workload, 1,024 tokens in and 512 out, at
the most sequences that the memory holds or a step takes: its time is that of prompts in steps of 512 rows, and of
decoding at three contexts.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import facts, this_target
from qcompile import pipeline, targets
from qcompile.codegen.gpu.launches import MOST_OUTPUTS
from qcompile.pipeline import backend_of
from qcompile.runtime.cuda.driver import Driver, driver
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.heads import CudaHeadSpeculator
from qcompile.runtime.cuda.rounds import CudaRounds
from qcompile.runtime.cuda.speculate import CudaSpeculator
from qcompile.runtime.options import STEP_TOKENS
from qcompile.runtime.speculation.stages import DraftStage
from qcompile.runtime.step import Limits, Rows

CONFIG: dict[str, Any] = {
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
EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
}
SINKS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
HEAD_TOKENS = 32000
"""Tokens that a draft head proposes."""
MODELS = {"llama-3-8b": CONFIG, "qwen3-30b-a3b": EXPERTS, "gpt-oss-20b": SINKS}
CONTEXT, STEPS = 1024, 128
BATCHES = (1, 8, 16, 32, 64)


def empty_checkpoint(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """A checkpoint of the configuration, with zeros as weights in sparse files, which take no disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return _with_empty_weights(folder, model)


def empty_head(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """A draft head of EAGLE-3's size for the configuration, which proposes the first HEAD_TOKENS tokens."""
    from qcompile.heads.layout import HeadShape, default_layers
    from qcompile.heads.model import DraftHead

    layers = default_layers(config["num_hidden_layers"])
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    last = ("rms_norm_eps", "rope_theta", "max_position_embeddings")
    sizes = *(config[name] for name in names), HEAD_TOKENS, layers, *(config[name] for name in last)
    shape = HeadShape(*sizes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config()))
    with torch.device("meta"):
        head = DraftHead(shape)
    return _with_empty_weights(folder, head, {"d2t": torch.empty(HEAD_TOKENS, dtype=torch.int64, device="meta")})


def _with_empty_weights(folder: Path, model: torch.nn.Module, more: Mapping[str, torch.Tensor] = {}) -> Path:
    """Writes zeros as the weights of a model, in bfloat16, and as `more` tensors of whole numbers of 64 bits."""
    header, offset = {}, 0
    for name, value in [*model.state_dict().items(), *more.items()]:
        end = offset + (8 if name in more else 2) * value.numel()
        kind = "I64" if name in more else "BF16"
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder


def random_weight(name: str, size: int) -> torch.Tensor:
    """`size` bytes on the GPU that make sense as the packed part `name` ends with.

    What layers add is small beside embeddings, so that tokens stay apart, and ask for experts of their own, in every
    recipe.
    """
    role = name.rsplit(".", 1)[-1]
    if ".f32." in name:
        return torch.randn(size // 4, device="cuda") * 0.02
    if role in ("w", "w_zero", "low") and ".bf16." not in name:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    if role == "w_scale":
        return torch.full((size // 4,), 1e-7, device="cuda")
    if role in ("groups", "ranges"):  # of every packing a scale near 8e-6, or a step of 8 and a zero point of 8
        word = 0x40084008 if ".qoq_g128." in name else 0x3700C308 if ".w4_asym_g128.g" in name else 0x37000008
        if ".mxfp4." in name:
            word = 0x6E6E6E6E if role == "groups" else 0x37001111
        return torch.full((size // 4,), word, dtype=torch.int32, device="cuda")
    if size > 1 << 20:
        return torch.randn(size // 2, dtype=torch.bfloat16, device="cuda") * (0.0005 if role == "w" else 0.02)
    return torch.ones(size // 4, device="cuda")


class View:
    """GPU memory that is not torch's, for torch.as_tensor."""

    def __init__(self, address: int, size: int) -> None:
        shape = {"shape": (size // 2,), "typestr": "<i2"}
        self.__cuda_array_interface__ = {**shape, "data": (address, False), "version": 2}


@dataclass
class Opened:
    """Executors over random weights and a random cache, the memory they read, and what building took."""

    target: CudaExecutor
    speculator: CudaRounds | CudaHeadSpeculator | None
    memory: list[torch.Tensor]
    notes: dict[str, Any]

    def close(self) -> None:
        if self.speculator:
            self.speculator.close()
        self.target.close()
        self.memory.clear()
        torch.cuda.empty_cache()


def open_random(
    recipe: str,
    folder: Path,
    tokens: int,
    context: int = 8192,
    rows: int = STEP_TOKENS["cuda"],
    slots: int = 0,
    drafts: Sequence[str] = (),
) -> Opened:
    """`recipe` for the checkpoint, with pages for `tokens` tokens in sequences of at most `context`, and `slots` slots
    of recurrent states if it has any. `drafts` may be a draft head."""
    machine = targets.get_target(this_target())
    started = time.perf_counter()
    result = pipeline.plan(folder, target=machine.name, recipe=recipe, drafts=drafts)
    files = backend_of(machine).prepare(result.programs, machine, result.lookup)(None)
    seconds = time.perf_counter() - started
    plans = [json.loads(files[f"{name}.plan.json"]) for name in result.programs]
    gpu = driver()
    functions = {}
    for label, kernel in {k: v for plan in plans for k, v in plan["kernels"].items()}.items():
        cubin = files[f"{label}.cubin"]
        assert isinstance(cubin, bytes)
        module = gpu.module(cubin, lambda: b"", print)
        functions[label] = gpu.function(module, kernel["function"], kernel["shared_bytes"])
    blobs = [(name, size) for weight in result.weights for name, size in weight.blobs]
    calls = [call for program in result.programs.values() for call in program.calls]
    constant = {getattr(call, "bias", None): 0.0 for call in calls}
    constant |= {getattr(call, "rates", None): -0.1 for call in calls}  # of decay: states would grow without bound
    memory = [
        torch.full((size // 4,), constant[name], device="cuda") if name in constant else random_weight(name, size)
        for name, size in blobs
    ]
    addresses = {name: tensor.data_ptr() for (name, _), tensor in zip(blobs, memory, strict=True)}
    torch.cuda.synchronize()
    kv = result.program.kv
    sizes = result.program.vocab_size, kv.page_tokens, context, kv.ring_tokens
    limits = Limits(rows, *sizes, slots=slots, most_outputs=MOST_OUTPUTS)
    pages = -(-tokens // context) * limits.pages_for(context)
    target = CudaExecutor(gpu, plans[0], functions, addresses, pages, limits)
    fill_cache(target)
    speculator: CudaRounds | CudaHeadSpeculator | None = None
    if len(plans) > 1:
        few = limits._replace(max_tokens=limits.max_outputs)
        if drafts:
            few = few._replace(vocab=HEAD_TOKENS)
        draft = CudaExecutor(gpu, plans[1], functions, addresses, pages, few, target, bool(drafts))
        speculator = with_head(target, draft) if drafts else CudaSpeculator(target, DraftStage(draft, 4, True))
    spilling = [r["kernel"] for r in json.loads(files["report.json"]) if r["spill_bytes"]]
    notes = {"build_seconds": seconds, "kernels": len(functions), "spilling": spilling}
    notes |= {"weight_bytes": sum(size for _, size in blobs), "cache_bytes_a_token": kv.page_bytes / kv.page_tokens}
    return Opened(target, speculator, memory, notes)


def fill_cache(executor: CudaExecutor) -> None:
    """Make the keys and values of an executor's own cache random."""
    cache = torch.as_tensor(View(executor.memory.cache, executor.memory.layer_places[-1]), device="cuda")
    for part in cache.view(torch.bfloat16).split(1 << 28):
        part.normal_()
    torch.cuda.synchronize()  # what is measured next goes through another stream


def with_head(target: CudaExecutor, head: CudaExecutor) -> CudaHeadSpeculator:
    """Rounds with a head that proposes the first HEAD_TOKENS tokens."""
    fill_cache(head)
    for executor in (target, head):
        executor.connect()
    return CudaHeadSpeculator(target, head, 4, np.arange(HEAD_TOKENS, dtype=np.int32))


def sequences(executor: CudaExecutor, batch: int, context: int, room: int) -> list[Rows]:
    """One row each of `batch` sequences, after `context` tokens, and pages for `room` more."""
    each = executor.limits.pages_for(context + room)
    return [Rows([100 + i], context, range(i * each, (i + 1) * each), 1, slot=i) for i in range(batch)]


def decode_rate(executor: CudaExecutor, batch: int, context: int = CONTEXT, steps: int = STEPS) -> float:
    """Tokens per second of greedy decoding."""
    rows = sequences(executor, batch, context, steps)
    executor.decode(rows, 8)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        executor.decode(rows, steps)
        best = max(best, batch * steps / (time.perf_counter() - started))
    return best


def replay_seconds(gpu: Driver, graph: ctypes.c_void_p, replays: int) -> float:
    """Seconds of the third fastest of some `replays` of a captured graph, which is freed then."""
    times = []
    for _ in range(replays):
        start, end = gpu.event(), gpu.event()
        gpu.record(start)
        gpu.replay(graph)
        gpu.record(end)
        gpu.synchronize()
        times.append(gpu.seconds_between(start, end))
    gpu.drop(graph)
    return sorted(times)[2]


def kernel_times(executor: CudaExecutor, rows: list[Rows]) -> dict[str, list[float]]:
    """Microseconds of each kernel of a step of these rows, and how often it runs; see the top."""
    gpu = executor.driver
    counts = executor.fill(rows)
    names = {address: label for label, address in executor.launcher.functions.items()}
    by_kernel: dict[str, list[Any]] = {}
    for _, call in executor.launcher.prepare(executor.plan["launches"], counts):
        by_kernel.setdefault(names[call.function], []).append(call)
    result = {}
    for label, calls in by_kernel.items():
        repeats = -(-64 // len(calls))
        with gpu.captured() as graph:
            for call in calls * repeats:
                call.run()
        result[label] = [1e6 * replay_seconds(gpu, graph[0], 6) / (len(calls) * repeats), len(calls)]
    return result


def largest(opened: Opened, tokens_in: int = 1024, tokens_out: int = 512) -> dict[str, Any]:
    """Throughput of the most sequences at once."""
    executor, each = opened.target, opened.target.limits.pages_for(tokens_in + tokens_out)
    fits = executor.kv_pages // each
    batch = min(fits, executor.limits.max_outputs)
    prompt = [Rows(list(range(100, 612)), 512, range(each), 1)]
    executor.step(prompt, False)
    started = time.perf_counter()
    for _ in range(4):
        executor.step(prompt, False)
    prefill = (time.perf_counter() - started) / 4 * 2 * batch
    steps = [batch / decode_rate(executor, batch, tokens_in + at, 16) for at in (0, tokens_out // 2, tokens_out - 16)]
    decode = (steps[0] + 4 * steps[1] + steps[2]) / 6 * tokens_out
    return {
        "sequences_that_fit": fits,
        "sequences": batch,
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "tokens_per_second_of_decoding": batch * tokens_out / decode,
        "tokens_per_second": batch * tokens_out / (prefill + decode),
    }


def torch_rates(batches: tuple[int, ...], settings: dict[str, Any] = CONFIG) -> dict[int, float]:
    """Tokens per second of transformers in bf16, static cache, torch.compile with CUDA graphs."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    config = AutoConfig.for_model(**{k: v for k, v in settings.items() if k != "architectures"})
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        attention = "eager" if settings is SINKS else "sdpa"  # torch's own takes no sinks
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        torch.set_default_dtype(torch.float32)
    result = {}
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
            result[batch] = batch * STEPS / (time.perf_counter() - started)
        print(f"torch bf16 batch {batch:3}: {result[batch]:8.0f} tokens/s", flush=True)
        torch._dynamo.reset()
    return result


def measure(recipe: str, folder: Path) -> dict[str, Any]:
    """What a recipe does, and its kernels."""
    opened = open_random(recipe, folder, max(BATCHES) * (CONTEXT + 4 * STEPS), CONTEXT + 4 * STEPS)
    rates = {batch: decode_rate(opened.target, batch) for batch in BATCHES}
    kernels = kernel_times(opened.target, sequences(opened.target, 1, CONTEXT, 1))
    print(f"{recipe:16}", {b: round(r) for b, r in rates.items()}, opened.notes, flush=True)
    total = sum(us * count for us, count in kernels.values())
    print(f"    a step at batch 1 takes {1e6 / rates[1]:.0f} us, its kernels {total:.0f}", flush=True)
    for label, (us, count) in kernels.items():
        print(f"    {us:7.1f} x {count:3} {label}", flush=True)
    opened.close()
    return {**opened.notes, "tokens_per_second": rates, "kernels": kernels, "kernels_us": total}


def measure_largest(recipe: str, folder: Path) -> dict[str, Any]:
    """The largest batch of a recipe."""
    with_cache = 1536 * 512
    if recipe == "bf16":
        free = torch.cuda.mem_get_info()[0]
        with_cache = int((free - (24 << 30)) // (1 << 17) // 1536 * 1536)
    opened = open_random(recipe, folder, with_cache, 1536)
    result = largest(opened)
    opened.close()
    print(f"{recipe:16} largest batch", result, flush=True)
    return result


def main() -> None:
    options = [a for a in sys.argv[1:] if a.startswith("--")]
    named = [a.split("=", 1)[1].split(",") for a in options if a.startswith("--recipes=")]
    model = next((a.split("=", 1)[1] for a in options if a.startswith("--model=")), "llama-3-8b")
    if model not in MODELS:
        raise SystemExit(f"--model={model} is unknown; there are {', '.join(MODELS)}")
    config = MODELS[model]
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    results: dict[str, Any] = {**facts(), "context": CONTEXT, "ours": {}, "largest": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = empty_checkpoint(Path(temporary), config)
        for recipe in named[0] if named else ("qserve", "qserve-channel", "w4a16", "bf16"):
            results["ours"][recipe] = measure(recipe, folder)
            write(results, paths)
        for recipe in () if "--no-largest" in options else ("qserve", "bf16"):
            results["largest"][recipe] = measure_largest(recipe, folder)
            write(results, paths)
    if "--no-torch" not in options:
        results["torch_bf16"] = torch_rates((1, 64), config)
        write(results, paths)


def write(results: dict[str, Any], paths: list[Path]) -> None:
    """Keep what there is so far: machines are lent by the minute."""
    for path in paths:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
