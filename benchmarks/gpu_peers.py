"""qcompile beside vLLM on one GPU in one run, through both programs' own Python APIs, random weights.

    python benchmarks/gpu_peers.py OUT.json [--models=llama-3-8b,...] [--ours=qserve,w4a16] [--vllm=fp8kv8,gptq4]
        [--workloads=decode,prompts,requests,trace] [--long] [--quick] [--sequences=512]
        [--kernels] [--vllm-path=FOLDER]

Models are those of gpu_peer_models.py. vLLM runs if Python finds it, or in --vllm-path (a folder for PYTHONPATH of its
process alone). Tokens per second:

- decode: of the whole batch, from 1,024 tokens of context on (with --long from 65,536, too).
- prompts: of one prompt, until its first token.
- requests: output tokens of requests that are sent at once, the time of prompts included.

trace: 256 requests of varied lengths (64 to 2,048 in, 64 to 512 out) arrive as a Poisson process, at LOADS times the
capacity of vLLM's first scheme, or of the engine itself without vLLM: milliseconds to the first and between tokens.

--quick: fewer cases. --sequences: most requests at once; recurrent states take many bytes. --kernels: microseconds of
each kernel of qcompile's decoding steps. Each engine has a process of its own, one after the other; vLLM is first. If
one fails, the others run, and the exit code is 1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import facts
from benchmarks.gpu_e2e import empty_checkpoint, write
from benchmarks.gpu_peer_models import MODELS, VLLM_OPTIONS

LOADS = (0.7, 1.0, 1.5)
BATCHES, LARGE_BATCHES = (1, 8, 16, 32, 64, 128, 256), (1, 8, 64)
CONTEXT, LONG_CONTEXT = 1024, 65_536
PROMPTS, LONG_PROMPTS = (1024, 4096, 32_768), (131_072,)
REQUESTS = ((256, 1024, 512), (512, 1024, 512), (128, 8192, 256), (256, 16, 512))
SEQUENCES = 512


def workloads_of(kinds: list[str], quick: bool, long: bool, capacity: float | None) -> dict[str, Any]:
    """The cases of each kind of workload, as arguments of the methods of Workloads."""
    decode = [(batch, CONTEXT) for batch in (LARGE_BATCHES if quick else BATCHES)]
    decode += [(1, LONG_CONTEXT)] if long else []
    cases: dict[str, Any] = {
        "decode": decode,
        "prompts": [(length,) for length in PROMPTS + (LONG_PROMPTS if long else ())],
        "requests": REQUESTS[1:2] if quick else REQUESTS,
        "trace": {"loads": LOADS, "capacity": capacity},
    }
    return {kind: cases[kind] for kind in kinds}


def run_engine(job: dict[str, Any], path: str | None) -> dict[str, Any]:
    """The results of one engine; with an `error` if its process failed."""
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    with tempfile.TemporaryDirectory() as temporary:
        given, out = Path(temporary) / "job.json", Path(temporary) / "out.json"
        given.write_text(json.dumps(job))
        script = Path(__file__).with_name("gpu_peer_engines.py")
        ended = subprocess.run([sys.executable, str(script), str(given), str(out)], env=environment, check=False)
        result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if ended.returncode:
        result["error"] = f"exit code {ended.returncode}"
        print(f"{job['engine']}:{job['scheme']} failed: {result['error']}", flush=True)
    return result


def ratios(ours: dict[str, Any], peers: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each case, the best scheme of qcompile beside the best of vLLM."""
    result: dict[str, dict[str, float]] = {}
    for kind in ("decode", "prompts", "requests"):
        best = [
            {case: max(s[kind][case] for s in side.values() if case in s.get(kind, {})) for case in _cases(side, kind)}
            for side in (ours, peers)
        ]
        result[kind] = {case: best[0][case] / best[1][case] for case in best[0] if case in best[1]}
    return result


def _cases(side: dict[str, Any], kind: str) -> list[str]:
    return list(dict.fromkeys(case for scheme in side.values() for case in scheme.get(kind, {})))


def measure(model: str, options: dict[str, str], vllm: str | None, paths: list[Path], results: dict[str, Any]) -> None:
    """All engines on one model."""
    kinds = options.get("workloads", "decode,prompts,requests,trace").split(",")
    long, quick = "long" in options, "quick" in options
    context = (LONG_PROMPTS[0] if long else PROMPTS[-1]) + 1024
    context = min(context, MODELS[model]["max_position_embeddings"])
    result = results["models"].setdefault(model, {"config": MODELS[model], "vllm": {}, "ours": {}})
    capacity = None
    for side, schemes in (("vllm", options.get("vllm", "fp8kv8")), ("ours", options.get("ours", "qserve"))):
        if side == "vllm" and vllm is None:
            continue
        for scheme in filter(None, schemes.split(",")):
            with tempfile.TemporaryDirectory() as temporary:
                folder = empty_checkpoint(Path(temporary), MODELS[model])
                job = {"engine": side, "scheme": scheme, "folder": str(folder), "context": context}
                job |= {"sequences": int(options.get("sequences", SEQUENCES)), "kernels": "kernels" in options}
                job["options"] = VLLM_OPTIONS.get(model, {})
                job["workloads"] = workloads_of(kinds, quick, long, capacity)
                result[side][scheme] = run_engine(job, vllm if side == "vllm" else None)
            capacity = capacity or result[side][scheme].get("trace", {}).get("own_capacity")
            result["ratios"] = ratios(result["ours"], result["vllm"])
            write(results, paths)
    for kind, cases in result.get("ratios", {}).items():
        print(model, kind, {case: round(ratio, 2) for case, ratio in cases.items()}, flush=True)


def main() -> None:
    given = [a.removeprefix("--").partition("=") for a in sys.argv[1:] if a.startswith("--")]
    options = {name: value for name, _, value in given}
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    models = options.get("models", "llama-3-8b").split(",")
    for model in models:
        if model not in MODELS:
            raise SystemExit(f"--models: {model} is unknown; there are {', '.join(MODELS)}")
    vllm = options.get("vllm-path") or ("" if importlib.util.find_spec("vllm") else None)
    results: dict[str, Any] = {**facts(), "models": {}}
    for model in models:
        measure(model, options, vllm, paths, results)
    engines = [
        side for result in results["models"].values() for name in ("vllm", "ours") for side in result[name].values()
    ]
    if any("error" in engine for engine in engines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
