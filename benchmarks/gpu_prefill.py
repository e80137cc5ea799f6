"""Prompts of a Llama-3-8B configuration with random weights on this GPU, beside torch in bf16, in one run.

    python benchmarks/gpu_prefill.py [out.json] [--recipes=qserve,w4a16,...] [--rows=512,2048] [--no-torch] [--kernels]

`steps_ms` are milliseconds of a step without outputs, by its number of rows and by the number of tokens before it in
its sequence. `prompts` are the tokens per second of whole prompts, by the rows of a step and by length: steps one after
the other, queued as an engine queues them, until the first token is there. Torch's are those of transformers in bf16
with torch.compile, scaled dot product attention and the logits of the last token alone, a whole prompt in one pass.
`mixed_ms` is a step of DECODING sequences, one row each, and a prompt of the rest of MIXED_ROWS rows: with the decoding
in front, as the scheduler has it, by attention kernels of its own, and behind the prompt, by the prompt's; and the same
decoding and prompt as two steps. With --kernels the microseconds of each kernel of the largest step, and how often it
runs, by context.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import facts
from benchmarks.gpu_e2e import CONFIG, empty_checkpoint, kernel_times, open_random, write
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.memory import activation_bytes
from qcompile.runtime.step import Rows

ROWS = (512, 2048, 8192)
"""Rows of a step."""
MIXED_ROWS = 512
CONTEXTS = (0, 1024, 4096, 16384, 32256)
PROMPTS = (1024, 4096, 32768)
RECIPES = ("qserve", "w4a16", "nested", "quantspec", "bf16")
PROFILED = (0, 16384)
DECODING, BEHIND = 63, (1024, 4096)
"""Sequences that decode in a mixed step, and the tokens behind them and behind the prompt."""


def step_rows(executor: CudaExecutor, context: int, rows: int, outputs: int = 0) -> list[Rows]:
    """A step of `rows` tokens of a prompt that has `context` tokens behind it."""
    pages = range(executor.limits.pages_for(context + rows))
    return [Rows(list(range(100, 100 + rows)), context, pages, outputs)]


def mixed_rows(executor: CudaExecutor) -> tuple[list[Rows], list[Rows]]:
    """The sequences that decode, and the prompt, of a mixed step, over different pages."""
    each, count = executor.limits.pages_for(BEHIND[0] + 1), MIXED_ROWS - DECODING
    decoding = [Rows([100 + i], BEHIND[0], range(i * each, (i + 1) * each), 1) for i in range(DECODING)]
    pages = range(DECODING * each, DECODING * each + executor.limits.pages_for(BEHIND[1] + count))
    return decoding, [Rows(list(range(100, 100 + count)), BEHIND[1], pages, 1)]


def mixed_seconds(executor: CudaExecutor) -> dict[str, float]:
    """Of a mixed step in both orders, and of its parts as two steps."""
    decoding, prompt = mixed_rows(executor)
    every = {"decoding first": decoding + prompt, "prompt first": prompt + decoding}
    result = {name: rows_seconds(executor, rows) for name, rows in every.items()}
    return result | {"two steps": rows_seconds(executor, decoding) + rows_seconds(executor, prompt)}


def rows_seconds(executor: CudaExecutor, rows: list[Rows], repeats: int = 5) -> float:
    """The median time of a step."""
    taken = []
    executor.step(rows, False)
    executor.step(rows, False)
    for _ in range(repeats):
        started = time.perf_counter()
        executor.step(rows, False)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def prompt_rate(executor: CudaExecutor, length: int, rows: int) -> float:
    """Tokens per second of a prompt of whole steps of up to `rows` tokens, until its first token."""
    rows = min(rows, length)
    steps = [step_rows(executor, start, rows, int(start + rows == length)) for start in range(0, length, rows)]
    taken = []
    for _ in range(4):
        started = time.perf_counter()
        waits = [executor.start(rows, 1) for rows in steps]
        assert len(waits[-1]()) == 1
        taken.append(time.perf_counter() - started)
    return length / statistics.median(taken[1:])


def measure(recipe: str, folder: Path, sizes: Sequence[int], kernels: bool) -> dict[str, Any]:
    """Of one recipe, in steps of these `sizes`."""
    tokens = 6 * PROMPTS[-1]  # for mixed steps' rings, too
    opened = open_random(recipe, folder, tokens, PROMPTS[-1], max(*sizes, MIXED_ROWS))
    executor = opened.target
    contexts = {size: [c for c in CONTEXTS if c + size <= PROMPTS[-1]] for size in sizes}
    result: dict[str, Any] = {
        "steps_ms": {
            size: {c: 1e3 * rows_seconds(executor, step_rows(executor, c, size)) for c in contexts[size]}
            for size in sizes
        },
        "prompts": {size: {length: prompt_rate(executor, length, size) for length in PROMPTS} for size in sizes},
        "mixed_ms": {name: 1e3 * seconds for name, seconds in mixed_seconds(executor).items()},
        "activation_bytes": activation_bytes(executor.plan, executor.limits),
        "spilling": opened.notes["spilling"],
    }
    for size in sizes:
        print(
            f"{recipe:12} {size:5} ms:", *(f"{c}: {ms:.2f}" for c, ms in result["steps_ms"][size].items()), flush=True
        )
        print(f"{'':12} {'':5} tok/s:", *(f"{n}: {r:,.0f}" for n, r in result["prompts"][size].items()), flush=True)
    print(f"{'':12} mixed:", *(f"{name} {ms:.2f}" for name, ms in result["mixed_ms"].items()), flush=True)
    if kernels:
        result["kernels"] = {c: kernel_times(executor, step_rows(executor, c, max(sizes))) for c in PROFILED}
        for context, times in result["kernels"].items():
            total = sum(us * count for us, count in times.values())
            print(f"  at {context}: {total:.0f} us", flush=True)
            for label, (us, count) in times.items():
                print(f"    {us:7.1f} x {count:3} {label}", flush=True)
    opened.close()
    return result


def torch_rates() -> Iterator[tuple[int, float]]:
    """Lengths of prompts, and the tokens per second of each in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{k: v for k, v in CONFIG.items() if k != "architectures"})
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        torch.set_default_dtype(torch.float32)
    forward = torch.compile(model)
    for length in PROMPTS:
        with torch.inference_mode():
            ids = torch.randint(100, 1000, (1, length), device="cuda")
            taken = []
            for _ in range(5):
                torch.cuda.synchronize()
                started = time.perf_counter()
                forward(ids, use_cache=False, logits_to_keep=1).logits.argmax()
                torch.cuda.synchronize()
                taken.append(time.perf_counter() - started)
        rate = length / statistics.median(taken[2:])
        print(f"torch bf16 {length}: {rate:,.0f} tokens/s", flush=True)
        yield length, rate


def main() -> None:
    options = [a for a in sys.argv[1:] if a.startswith("--")]
    named = [a.split("=", 1)[1].split(",") for a in options if a.startswith("--recipes=")]
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    rows = [list(map(int, a.split("=", 1)[1].split(","))) for a in options if a.startswith("--rows=")]
    results: dict[str, Any] = {**facts(), "ours": {}}
    config = CONFIG | {"max_position_embeddings": PROMPTS[-1]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = empty_checkpoint(Path(temporary), config)
        for recipe in named[0] if named else RECIPES:
            results["ours"][recipe] = measure(recipe, folder, rows[0] if rows else ROWS, "--kernels" in options)
            write(results, paths)
    if "--no-torch" not in options:
        results["torch_bf16"] = {}
        for length, rate in torch_rates():
            results["torch_bf16"][length] = rate
            write(results, paths)


if __name__ == "__main__":
    main()
