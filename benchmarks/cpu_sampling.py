"""Sampling on this CPU: its speed beside greedy decoding and Python's sampler, and that it draws the same tokens.

    python benchmarks/cpu_sampling.py [--model samples/pycode-26m] [--prompts prompts.jsonl] [--rounds 5] [--most 24]

Tokens per second of decoding 128 tokens of each prompt, one prompt at a time: medians of the rounds, in which recipes,
options, gammas and ways take turns. "python" draws each token in runtime/sampling/sampling.py, the way of options that
the library does not have. `differing` counts tokens that are not Python's without drafts, and those with log
probabilities that differ by more than 1e-11.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, build, write_result
from qcompile import SamplingParams
from qcompile.cli import console
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.options import AUTO
from qcompile.runtime.sampling.logprobs import Logprob

ROOT = Path(__file__).parents[1]
RECIPES = {"w4a8": (0,), "nested": (0, AUTO), "ml-specqd": (0, AUTO)}
TOKENS = 128
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.1},
    "all penalties": {
        **{"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
        **{"frequency_penalty": 0.1, "presence_penalty": 0.2},
    },
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


Told = tuple[int, dict[int, Logprob]]
"""A token, and its log probabilities: empty if none were asked for."""


def decoded(llm: qcompile.LLM, prompts: list[str], options: dict[str, Any]) -> tuple[float, list[list[Told]]]:
    """Tokens per second after the first of each prompt, and the tokens."""
    seconds, tokens = 0.0, []
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True, **options)
        output = llm.generate([prompt], params)[0]
        seconds += output.metrics.finished_time - output.metrics.first_token_time
        sample = output.outputs[0]
        result = sample.logprobs or [{} for _ in sample.token_ids]
        tokens.append(list(zip(sample.token_ids, result, strict=True)))
    return sum(len(one) - 1 for one in tokens) / seconds, tokens


def differ(a: Told, b: Told) -> bool:
    """Whether two tokens of equal place differ, as the top says."""
    if a[0] != b[0] or list(a[1]) != list(b[1]):
        return True
    pairs = [(one, b[1][token]) for token, one in a[1].items()]
    return any(x.rank != y.rank or abs(x.logprob - y.logprob) > 1e-11 for x, y in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "samples" / "pycode-26m")
    parser.add_argument("--prompts", type=Path, default=ROOT.parent / "shared" / "data" / "prompts.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=24, help="most prompts")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "bench", help="where artifacts go")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_sampling.json")
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text("utf-8").splitlines()[: arguments.most]
    prompts = [json.loads(line)["prompt"] for line in lines]
    artifacts = build(arguments.model, list(RECIPES), arguments.work)
    speeds: dict[tuple[str, int, str, str], list[float]] = {}
    first: dict[tuple[str, str], list[list[Told]]] = {}
    total = differing = 0
    with console.Progress() as progress:
        turns = [(r, gamma) for _ in range(arguments.rounds) for r, gammas in RECIPES.items() for gamma in gammas]
        for done, (recipe, gamma) in enumerate(turns, start=1):
            with qcompile.load(artifacts[recipe], gamma=gamma, prefix_caching=False) as llm:
                for name, options in OPTIONS.items():
                    for way in ("python", "library") if gamma == 0 else ("library",):
                        Executor.samples = llm.engine.scheduler.samples = way == "library"
                        speed, tokens = decoded(llm, prompts, options)
                        speeds.setdefault((recipe, gamma, name, way), []).append(speed)
                        wanted = first.setdefault((recipe, name), tokens)
                        pairs = [pair for two in zip(tokens, wanted, strict=True) for pair in zip(*two, strict=True)]
                        total += len(pairs)
                        differing += sum(differ(a, b) for a, b in pairs)
            progress("measuring", done, len(turns))
    rows = [
        {
            "recipe": recipe,
            "gamma": "auto" if gamma == AUTO else gamma,
            "options": name,
            "way": way,
            "median": statistics.median(samples),
        }
        for (recipe, gamma, name, way), samples in speeds.items()
    ]
    print(
        console.table(["recipe", "gamma", "options", "way", "tokens/s"], [[str(v) for v in r.values()] for r in rows])
    )
    document = {"model": arguments.model.name, "prompts": len(prompts), "rounds": arguments.rounds, "options": OPTIONS}
    write_result(arguments.out, {**document, "tokens": total, "differing": differing, "tokens_per_second": rows})


if __name__ == "__main__":
    main()
