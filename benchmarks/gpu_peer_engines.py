"""One engine of gpu_peers.py, in a process of its own: vLLM is not installed where qcompile is, and memory is freed.

    python benchmarks/gpu_peer_engines.py JOB.json OUT.json

A job names the engine, its scheme, the folder of a checkpoint without weights, and what to measure. Results are written
after each measurement.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_peer_loads import Request, Times, Workloads, replayed

STEP_ROWS = 8192
"""Rows of vLLM's largest step, which its prompts are fastest with."""
ROOM = 1600
"""Tokens of each sequence that qcompile's cache has room for; vLLM takes what the GPU has left."""
PROFILED = ((1, 1024), (64, 1024))
"""Batch and context of the steps in which each kernel is timed."""

VLLM_SCHEMES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "fp8kv8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "gptq4": {},
    "w8a8": {},
    "mxfp4": {},
}
"""Options of vLLM by scheme. fp8: weights and activations, made while loading; fp8kv8: with an fp8 cache, too. gptq4: 4
bits in groups of 128, bf16 activations. w8a8: int8 per channel and token. mxfp4: gpt-oss as published."""
CHECKPOINT_SCHEMES: dict[str, dict[str, Any]] = {
    "gptq4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False},
    "w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "channel",
                    "dynamic": False,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
"""`quantization_config` of a checkpoint by scheme."""


class VllmEngine:
    """vLLM with random weights."""

    def __init__(self, scheme: str, folder: Path, context: int, sequences: int, options: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
        if scheme in CHECKPOINT_SCHEMES:
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = CHECKPOINT_SCHEMES[scheme]
            (folder / "config.json").write_text(json.dumps(config))
        vllm: Any = import_module("vllm")
        self.version, self._params = vllm.__version__, vllm.SamplingParams
        self._llm = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=context,
            gpu_memory_utilization=0.9,
            max_num_seqs=sequences,
            enable_prefix_caching=False,
            async_scheduling=True,
            max_num_batched_tokens=STEP_ROWS,
            **VLLM_SCHEMES[scheme],
            **options,
        )
        self._submitted = 0

    def _sampling(self, request: Request, **more: Any) -> Any:
        return self._params(temperature=0, max_tokens=request.outputs, ignore_eos=True, detokenize=False, **more)

    def generate(self, requests: Sequence[Request]) -> float:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [self._sampling(request) for request in requests]
        began = time.perf_counter()
        result = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert [len(each.outputs[0].token_ids) for each in result] == [request.outputs for request in requests]
        return seconds

    def replay(self, requests: Sequence[Request]) -> list[Times]:
        return replayed(self, requests)

    def submit(self, request: Request) -> str:
        key = f"trace-{self._submitted}"
        self._submitted += 1
        kinds: Any = import_module("vllm.sampling_params")
        params = self._sampling(request, output_kind=kinds.RequestOutputKind.CUMULATIVE)
        self._llm.llm_engine.add_request(key, {"prompt_token_ids": request.prompt}, params)
        return key

    def step(self) -> list[tuple[str, int]]:
        return [(each.request_id, len(each.outputs[0].token_ids)) for each in self._llm.llm_engine.step()]


class OurEngine:
    """qcompile with random weights."""

    def __init__(self, scheme: str, folder: Path, context: int, sequences: int) -> None:
        from tokenizers import Tokenizer, models

        from benchmarks.gpu_e2e import open_random
        from qcompile import SamplingParams, __version__
        from qcompile.runtime.llm import LLM

        self.version, self._params = __version__, SamplingParams
        opened = open_random(scheme, folder, max(sequences * ROOM, context), context, slots=sequences)
        words = {f"word{index}": index for index in range(opened.target.limits.vocab)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
        manifest: dict[str, Any] = {"model": {"eos_token_ids": []}}
        self._executor = opened.target
        self._llm = LLM(opened.target, manifest, tokenizer, sequences, keep=opened, remember=0)

    def kernels(self, batch: int, context: int) -> dict[str, list[float]]:
        """Microseconds of each kernel of a decoding step, and how often it runs."""
        from benchmarks.gpu_e2e import kernel_times, sequences

        return kernel_times(self._executor, sequences(self._executor, batch, context, 1))

    def generate(self, requests: Sequence[Request]) -> float:
        params = [self._params(temperature=0, max_tokens=r.outputs, ignore_eos=True) for r in requests]
        began = time.perf_counter()
        result = self._llm.generate([request.prompt for request in requests], params)
        seconds = time.perf_counter() - began
        assert [len(each.outputs[0].token_ids) for each in result] == [request.outputs for request in requests]
        return seconds

    def replay(self, requests: Sequence[Request]) -> list[Times]:
        return replayed(self, requests)

    def submit(self, request: Request) -> Any:
        params = self._params(temperature=0, max_tokens=request.outputs, ignore_eos=True)
        return self._llm.engine.add(request.prompt, params)

    def step(self) -> list[tuple[Any, int]]:
        return [(request, len(request.output.token_ids)) for request in self._llm.engine.step()]


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    started = time.perf_counter()
    folder, context = Path(job["folder"]), job["context"]
    given = job["scheme"], folder, context, job["sequences"]
    engine = VllmEngine(*given, job["options"]) if job["engine"] == "vllm" else OurEngine(*given)
    result: dict[str, Any] = {"version": engine.version, "start_seconds": time.perf_counter() - started}
    workloads, job_loads = Workloads(engine), job["workloads"]
    label = f"{job['engine']}:{job['scheme']}"
    for kind, cases in job_loads.items():
        if kind == "trace":
            result[kind] = workloads.trace(cases["loads"], cases["capacity"])
            print(label, kind, result[kind], flush=True)
        else:
            result[kind] = {}
            for case in cases:
                key = " x ".join(map(str, case))
                result[kind][key] = getattr(workloads, kind)(*case)
                print(f"{label} {kind} {key}: {result[kind][key]:,.0f} tokens/s", flush=True)
                out.write_text(json.dumps(result))
        out.write_text(json.dumps(result))
    if job["kernels"] and isinstance(engine, OurEngine):
        result["kernels"] = {f"{batch} x {context}": engine.kernels(batch, context) for batch, context in PROFILED}
        for case, times in result["kernels"].items():
            print(f"{case}: {sum(us * count for us, count in times.values()):.0f} us", flush=True)
            for name, (us, count) in times.items():
                print(f"    {us:7.1f} x {count:3} {name}", flush=True)
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
