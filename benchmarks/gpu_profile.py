"""Kernels of prompts' steps on this GPU, for a published shape with few layers and random weights.

    python benchmarks/gpu_profile.py [out.json] [--model=qwen3-next-24-layers] [--layers=4] [--recipes=qserve]
        [--steps=2048@0,8192@24576]

For each step, rows at the tokens behind them: the milliseconds of the step, and the microseconds of each kernel, how
often it runs, and for GEMMs of dense layers and attention the TFLOP/s. Kernels are named by one of their launches. A
graph holds all launches of a kernel, so their sum is what they take without what lies between them. `in_step_us` is
the time of a launch among the others, each of which waits for the one before; `queued_ms` what the host takes to queue
them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import facts
from benchmarks.gpu_e2e import empty_checkpoint, kernel_times, open_random, write
from benchmarks.gpu_peer_models import MODELS
from benchmarks.gpu_prefill import rows_seconds, step_rows
from qcompile import pipeline, targets
from qcompile.codegen.calls import Attention, Gemm
from qcompile.codegen.program import Program
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.step import Rows

STEPS = "2048@0,2048@8192,2048@24576,8192@0,8192@24576"
SHOWN = 0.01
"""Smallest share of a step that is printed."""


def shape(model: str, layers: int) -> dict[str, Any]:
    """The configuration of a model, with `layers` layers."""
    config = MODELS[model] | {"num_hidden_layers": layers, "max_position_embeddings": 1 << 15}
    return config | ({"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {})


def operations(program: Program, rows: int, context: int) -> dict[str, float]:
    """Multiplications and additions of GEMMs and attention, by the name of the call."""
    pairs = rows * context + rows * (rows + 1) // 2
    result = {c.name: 2.0 * c.n * c.k * rows for c in program.calls if isinstance(c, Gemm) and c.epilogue != "logits"}
    return result | {c.name: 4.0 * c.heads * c.head_dim * pairs for c in program.calls if isinstance(c, Attention)}


def times_in_step(executor: CudaExecutor, rows: list[Rows]) -> tuple[dict[str, float], float]:
    """Microseconds of a launch of each kernel among those of the step, and milliseconds until all are queued."""
    gpu, labels = executor.driver, {address: label for label, address in executor.launcher.functions.items()}
    calls = list(executor.launcher.prepare(executor.plan["launches"], executor.fill(rows)))
    events = [gpu.event() for _ in range(len(calls) + 1)]
    gpu.synchronize()
    started = time.perf_counter()
    gpu.record(events[0])
    for (_, call), event in zip(calls, events[1:], strict=True):
        call.run()
        gpu.record(event)
    queued = 1e3 * (time.perf_counter() - started)
    gpu.synchronize()
    every: dict[str, list[float]] = {}
    for (_, call), start, end in zip(calls, events, events[1:], strict=False):
        every.setdefault(labels[call.function], []).append(1e6 * gpu.seconds_between(start, end))
    for event in events:
        gpu.drop_event(event)
    return {label: statistics.fmean(times) for label, times in every.items()}, queued


def profile(executor: CudaExecutor, program: Program, rows: int, context: int) -> dict[str, Any]:
    """One step."""
    step, made = step_rows(executor, context, rows), operations(program, rows, context)
    milliseconds = 1e3 * rows_seconds(executor, step)
    names: dict[str, str] = {}
    labels = {address: label for label, address in executor.launcher.functions.items()}
    for name, call in executor.launcher.prepare(executor.plan["launches"], executor.fill(step)):
        names.setdefault(labels[call.function], name)
    kernels: list[dict[str, Any]] = []
    times_in_step(executor, step)
    in_step, queued = times_in_step(executor, step)
    for label, (us, count) in kernel_times(executor, step).items():
        work = made.get(names[label].split(".")[0], 0.0)
        kernels.append({"kernel": label, "launch": names[label], "us": us, "in_step_us": in_step[label]})
        kernels[-1] |= {"launches": count}
        kernels[-1] |= {"tflops": 1e-6 * work / us} if work and "merge" not in names[label] else {}
    kernels.sort(key=lambda row: -row["us"] * row["launches"])
    total = 1e-3 * sum(row["us"] * row["launches"] for row in kernels)
    among = 1e-3 * sum(row["in_step_us"] * row["launches"] for row in kernels)
    print(
        f"{rows} rows at {context}: {milliseconds:.2f} ms, kernels {total:.2f}, in the step {among:.2f}, "
        f"queued in {queued:.2f}",
        flush=True,
    )
    for row in kernels:
        share = 1e-3 * row["us"] * row["launches"] / total
        if share >= SHOWN:
            rate = f"{row['tflops']:7.0f} TFLOP/s" if "tflops" in row else ""
            times = f"{row['us']:9.1f} ({row['in_step_us']:9.1f}) x {row['launches']:3}"
            print(f"  {share:5.1%} {times} {row['launch']:28} {row['kernel']} {rate}")
    sums = {"ms": milliseconds, "kernels_ms": total, "in_step_ms": among, "queued_ms": queued}
    return {"rows": rows, "context": context, **sums, "kernels": kernels}


def main() -> None:
    given = {a.partition("=")[0]: a.partition("=")[2] for a in sys.argv[1:] if a.startswith("--")}
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    steps = [tuple(map(int, each.split("@"))) for each in given.get("--steps", STEPS).split(",")]
    config = shape(given.get("--model", "qwen3-next-24-layers"), int(given.get("--layers", "4")))
    results: dict[str, Any] = {**facts(), "config": config, "recipes": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder, target = empty_checkpoint(Path(temporary), config), targets.get_target("h200")
        for recipe in given.get("--recipes", "qserve").split(","):
            program = pipeline.plan(folder, target=target.name, recipe=recipe).program
            opened = open_random(recipe, folder, 1 << 15, 1 << 15, max(rows for rows, _ in steps), slots=1)
            print(recipe, opened.notes, flush=True)
            result = results["recipes"][recipe] = []
            for rows, context in steps:
                result.append(profile(opened.target, program, rows, context))
                write(results, paths)
            opened.close()


if __name__ == "__main__":
    main()
