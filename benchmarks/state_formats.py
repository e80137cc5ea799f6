"""What matrix states in fewer bits cost and save on a model with recurrent states.

    python benchmarks/state_formats.py MODEL heldout.jsonl [out.json] [--windows N] [--batch N] [--recipe f32]

The model is built with each format of `cache.states`. `perplexity` is that of the first windows of 2,048 tokens;
`share` is the perplexity over that of float32 states, less 1. `decode` is tokens a second of a batch of requests on one
thread, in the best of seven runs, each of all formats. The hybrid is that of train_hybrid.py.

`drift` is of one head of 128 x 128 with a delta rule on random numbers: how far its state is from that of float64 after
DRIFT_TOKENS positions, in parts of its norm, by decay and by the number of positions between two roundings.
`forgotten` is the same after as many positions more with decay alone, in parts of the norm before these. Result:
results/state_formats.json.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result
from qcompile.formats.states import BLOCK_TOKENS, STATE_FORMATS, StateFormat
from qcompile.ops.recurrent_step import rounded, widened
from qcompile.runtime.sampling.params import SamplingParams

RUNS, TOKENS = 7, 64
SIZE, DRIFT_TOKENS, RATES = 128, 2048, (0.1, 0.01, 0.001)


def decode_seconds(llm: Any, batch: int) -> float:
    """Seconds for TOKENS tokens of each request of a batch, less those for the first one."""
    prompts = [[1 + index] * 8 for index in range(batch)]
    taken = []
    for count in (1, TOKENS):
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        taken.append(time.perf_counter() - start)
    return taken[1] - taken[0]


def measure(model: Path, recipe: str, data: Path, windows: int, batch: int) -> list[dict[str, Any]]:
    """A row for each format."""
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        loaded = {}
        for states in STATE_FORMATS:
            artifact = Path(folder) / states
            qcompile.build(model, artifact, recipe=recipe, options={"cache.states": states})
            loaded[states] = llm = opened.enter_context(
                qcompile.load(artifact, threads=1, max_batch=batch, prefix_caching=False)
            )
            result = llm.perplexity(data, max_windows=windows)
            slot_bytes = llm.manifest["runtime"]["kv"]["slot_bytes"]
            facts = {"perplexity": result.perplexity, "windows": result.windows, "slot_bytes": slot_bytes}
            rows[states] = {"model": model.name, "recipe": recipe, "states": states, **facts, "batch": batch}
            print(rows[states], file=sys.stderr, flush=True)
        taken: dict[str, list[float]] = {states: [] for states in loaded}
        for _ in range(RUNS):
            for states, llm in loaded.items():
                taken[states].append(decode_seconds(llm, batch))
    for name, row in rows.items():
        row["share"] = row["perplexity"] / rows["f32"]["perplexity"] - 1
        row["decode"] = batch * (TOKENS - 1) / min(taken[name])
    return list(rows.values())


def drift(rate: float, stored: StateFormat, block: int) -> dict[str, Any]:
    """How far a state that fades by e^-rate a position is from that of float64."""
    made = torch.Generator().manual_seed(1)
    exact = torch.zeros(1, SIZE, SIZE, dtype=torch.float64)
    state, result = exact.float(), {}
    for position in range(2 * DRIFT_TOKENS):
        if position == DRIFT_TOKENS:
            norm = exact.norm()
            result["drift"] = float((state - exact).norm() / norm)
        key = torch.randn(SIZE, generator=made, dtype=torch.float64)
        key, value = key / key.norm(), torch.randn(SIZE, generator=made, dtype=torch.float64)
        exact, state = exact * math.exp(-rate), state * math.exp(-rate)
        if position < DRIFT_TOKENS:
            exact = exact + key[:, None] * (value - key @ exact[0]) / 2
            one, other = key.float(), value.float()
            state = state + one[:, None] * (other - one @ state[0]) / 2
        if (position + 1) % block == 0:
            state = widened(*rounded(state, stored), torch.float32)
    result["forgotten"] = float((state - exact).norm() / norm)
    return {"rate": rate, "states": stored, "block": block, **result}


def drifts() -> list[dict[str, Any]]:
    """A row for each decay, format, and number of positions between roundings."""
    formats: tuple[StateFormat, ...] = ("bf16", "int8")
    rows = [drift(rate, stored, block) for rate in RATES for stored in formats for block in (1, BLOCK_TOKENS)]
    for row in rows:
        print(
            f"decay e^-{row['rate']}, {row['states']} after {row['block']}: {row['drift']:.2e}, {row['forgotten']:.2e}"
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=RESULTS / "state_formats.json")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--recipe", default="f32")
    given = parser.parse_args(arguments)
    drifting = drifts()
    rows = measure(given.model, given.recipe, given.data, given.windows, given.batch)
    for row in rows:
        counts = f"{row['slot_bytes']:10,} bytes a slot, {row['decode']:8.1f} tokens/s of {row['batch']} requests"
        print(f"{row['states']:5}{row['perplexity']:12.5f}{100 * row['share']:+9.4f} %{counts}")
    write_result(given.out, {**machine(), "block_tokens": BLOCK_TOKENS, "rows": rows, "drift": drifting})


if __name__ == "__main__":
    main()
