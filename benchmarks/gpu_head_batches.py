"""What a draft head costs or gains an engine on this GPU by the number of requests: pycode-26m with its head.

    python benchmarks/gpu_head_batches.py [out.json]

Requests of 32 random tokens generate TOKENS each, all at once, with an artifact without drafts and with one with the
head, at gamma 0, `auto` and 3. A rate is generated tokens per second of the median of REPEATS calls of `generate`,
prompts included, after one that is not measured. `first` is that first call, with the trials of `auto`.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import write_result
from benchmarks.gpu_common import facts, this_target
from benchmarks.speculation import HEAD
from qcompile import SamplingParams
from qcompile.runtime.options import AUTO
from qcompile.runtime.speculation.explained import explained

MODEL = Path(__file__).parents[1] / "samples" / "pycode-26m"
RECIPE = "qserve"
BATCHES = (1, 16, 64, 256)
PROMPT, TOKENS, REPEATS = 32, 768, 3
CASES: tuple[tuple[str, int | str], ...] = (("plain", 0), ("head", 0), ("head", AUTO), ("head", 3))
"""(artifact, gamma)"""


def measure(artifact: Path, gamma: int | str, batch: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Rates of `batch` requests, and their tokens."""
    drawn = random.Random(1)
    prompts = [[drawn.randrange(5, 8000) for _ in range(PROMPT)] for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    rates = []
    options: dict[str, Any] = {"gamma": gamma, "max_batch": max(BATCHES), "prefix_caching": False}
    with qcompile.load(artifact, **options) as llm:
        for _ in range(1 + REPEATS):
            started = time.perf_counter()
            outputs = llm.generate(prompts, params)
            rates.append(batch * TOKENS / (time.perf_counter() - started))
        chooser = llm.engine.speculation.chooser
        known = [each.json for each in explained(chooser) if each.batch == batch] if chooser else []
    result = {
        "batch": batch,
        "gamma": "auto" if gamma == AUTO else gamma,
        "first": rates[0],
        "tokens_per_second": statistics.median(rates[1:]),
    }
    return result | ({"auto": known} if known else {}), [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    """Measure all cases of all batches; writes after each batch."""
    paths = [Path(argument) for argument in sys.argv[1:]]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, drafts in (("plain", ()), ("head", [str(HEAD)])):
            qcompile.build(str(MODEL), folder / name, recipe=RECIPE, drafts=drafts, target=this_target())
        for batch in BATCHES:
            wanted: list[list[int]] = []
            for name, gamma in CASES:
                result, tokens = measure(folder / name, gamma, batch)
                wanted = wanted or tokens
                pairs = [
                    pair for one, other in zip(wanted, tokens, strict=True) for pair in zip(one, other, strict=True)
                ]
                results.append({"artifact": name} | result | {"differing": sum(a != b for a, b in pairs)})
                print(results[-1], flush=True)
            for path in paths:
                write_result(path, facts() | {"model": "pycode-26m", "recipe": RECIPE, "cases": results})


if __name__ == "__main__":
    main()
