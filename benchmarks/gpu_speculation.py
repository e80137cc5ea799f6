"""Speculation on this GPU: a Llama-3-8B configuration with random weights, acceptance replayed from pycode-26m.

    python benchmarks/gpu_speculation.py [out.json] [--parts=nested,quantspec,...] [--no-torch]

A round of gamma drafts and its verification is timed as it runs, one graph; what it brings is the acceptance by place
that the same recipe has on pycode-26m with that gamma (benchmarks/results/speculation.json), as random weights accept
nothing.
Beside it is plain decoding by the verifying path, for `quantspec` and `quantspec-w8` also by the recipe bf16.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import facts
from benchmarks.gpu_e2e import (
    CONFIG,
    CONTEXT,
    Opened,
    decode_rate,
    empty_checkpoint,
    open_random,
    sequences,
    torch_rates,
    write,
)
from qcompile import SamplingParams
from qcompile.runtime.request import SequenceState, SpeculationState
from qcompile.runtime.sampling.sampling import Sampler

TRACE = Path(__file__).parent / "results" / "speculation.json"
GAMMAS = (1, 2, 3, 4, 5, 6)
ROUNDS = 27
"""As many as bring 128 tokens at 4.7 each: a hierarchical cache rounds a group of positions once in that time."""
CASES = {
    "nested": ((1, CONTEXT), (8, CONTEXT)),
    "qspec": ((1, CONTEXT), (8, CONTEXT), (16, CONTEXT), (32, CONTEXT)),
    "quantspec": ((1, 1 << 15), (1, 1 << 17)),
    "quantspec-w8": ((1, 1 << 15), (1, 1 << 17)),
}
"""(batch, context) by recipe."""


def tokens_a_round(recipe: str) -> dict[int, float]:
    """By gamma: the target's token and the drafts accepted, place by place of the round, on pycode-26m."""
    result = json.loads(TRACE.read_text(encoding="utf-8"))["variants"][recipe]["exact"]["by_gamma"]
    return {gamma: 1 + sum(result[str(gamma)]["accepted_per_position"]) for gamma in GAMMAS}


def round_seconds(opened: Opened, batch: int, context: int, gamma: int) -> float:
    """Seconds of a round, the best of several times ROUNDS that follow each other on the GPU."""
    assert opened.speculator
    best = float("inf")
    for _ in range(3):  # the first captures the graph
        room = ROUNDS * (gamma + 1)  # whatever is accepted, all rounds are made
        rows = sequences(opened.target, batch, context, room + gamma + 1)
        requests: Any = [
            SimpleNamespace(
                sequence=SequenceState([*range(context), 100], list(r.pages), context),
                sampler=Sampler(SamplingParams(temperature=0), 0, (), opened.target.limits.vocab),
                drafts=SpeculationState(),
            )
            for r in rows
        ]
        ends = [context + 1 + room] * batch
        started = time.perf_counter()
        _, made = opened.speculator.rounds(requests, [gamma] * batch, ROUNDS, ends)
        best = min(best, (time.perf_counter() - started) / made)
    return best


def measure(recipe: str, folder: Path) -> list[dict[str, Any]]:
    """One entry for each case of a recipe."""
    brings, result = tokens_a_round(recipe), []
    cases = CASES[recipe]
    most = max(context for _, context in cases) + 512
    opened = open_random(recipe, folder, max(batch for batch, _ in cases) * most, most)
    for batch, context in cases:
        plain = decode_rate(opened.target, batch, context, 64)
        rounds = {gamma: round_seconds(opened, batch, context, gamma) for gamma in GAMMAS}
        rates = {gamma: batch * brings[gamma] / rounds[gamma] for gamma in GAMMAS}
        gamma = max(GAMMAS, key=lambda g: rates[g])
        entry: dict[str, Any] = {"recipe": recipe, "batch": batch, "context": context, "gamma": gamma}
        entry |= {"tokens_per_second": rates[gamma], "plain": plain, "over_plain": rates[gamma] / plain}
        entry["tokens_a_round"] = brings[gamma]
        entry |= {"round_seconds": rounds, "by_gamma": rates, **opened.notes}
        result.append(entry)
        print(f"{recipe:10} batch {batch:3} context {context:6}: plain {plain:7.0f}, gamma {gamma}", end=" ")
        times = {g: round(1e3 * seconds, 2) for g, seconds in rounds.items()}
        print(f"{rates[gamma]:7.0f} tokens/s, {rates[gamma] / plain:.2f}x, ms a round {times}", flush=True)
    opened.close()
    return result


def plain_bf16(folder: Path) -> dict[int, float]:
    """Tokens per second of plain decoding by the recipe bf16, at the contexts of `quantspec`."""
    contexts = [context for _, context in CASES["quantspec"]]
    opened = open_random("bf16", folder, max(contexts) + 512, max(contexts) + 512)
    result = {context: decode_rate(opened.target, 1, context, 64) for context in contexts}
    opened.close()
    print("bf16, plain:", {context: round(rate) for context, rate in result.items()}, flush=True)
    return result


def main() -> None:
    named = [a.split("=", 1)[1].split(",") for a in sys.argv[1:] if a.startswith("--parts=")]
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    parts = named[0] if named else list(CASES)
    results: dict[str, Any] = {**facts(), "trace": "pycode-26m, by gamma", "speculation": []}
    CONFIG["max_position_embeddings"] = 1 << 18
    with tempfile.TemporaryDirectory() as temporary:
        folder = empty_checkpoint(Path(temporary))
        for recipe in parts:
            results["speculation"] += measure(recipe, folder)
            write(results, paths)
        if any(part.startswith("quantspec") for part in parts):
            results["plain_bf16"] = result = plain_bf16(folder)
            for entry in results["speculation"]:
                if entry["context"] in result:
                    entry["over_plain_bf16"] = entry["tokens_per_second"] / result[entry["context"]]
                    print(f"{entry['recipe']} {entry['context']}: {entry['over_plain_bf16']:.2f}x bf16", flush=True)
            write(results, paths)
    if "--no-torch" not in sys.argv:
        CONFIG["max_position_embeddings"] = 8192
        results["torch_bf16"] = torch_rates((1,))
        write(results, paths)


if __name__ == "__main__":
    main()
