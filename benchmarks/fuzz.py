"""The graph fuzzer: random decoders through passes, code generation and runtime, against their reference bodies.

    python benchmarks/fuzz.py [--first 0] [--seeds 500] [--out FILE]

Seed s draws a decoder from the supported operators (tests/support/random_graphs.py), a recipe, and which rewriting
passes run (tests/support/fuzzing.py). It is right when the generated code computes what the last graph's reference
bodies do, steps of 5 tokens give the very bits of one long step, and, in float32, nothing has changed since the first
graph. A refusal by name is allowed; a crash and a silent mismatch are not. Kernels are compiled at -Og, since there are
500.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, write_result
from qcompile import pipeline
from qcompile.codegen.cpu import compiler
from tests.conftest import UndrawnPage
from tests.support.fuzzing import examine


def quickly_compiled() -> None:
    """Less optimization, and no drawn page: a quarter of the time, and the same source."""
    compiler._COMMON = tuple("-Og" if flag == "-O3" else flag for flag in compiler._COMMON)
    pipeline.PageWriter = UndrawnPage  # type: ignore[misc, assignment]


def one(seed: int) -> dict[str, Any]:
    """The outcome of a seed; a crash is one, with where it happened."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return asdict(examine(seed, Path(folder) / "out"))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            reason = f"{type(error).__name__}: {error} at {where}"
            return {"verdict": "crash", "reason": reason, "drawn": {"seed": seed}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULTS / "fuzz.json")
    arguments = parser.parse_args()
    quickly_compiled()
    started = time.perf_counter()
    verdicts: Counter[str] = Counter()
    recipes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    worst: dict[str, float] = {}
    faults = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["QCOMPILE_CACHE"] = cache
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            result = one(seed)
            verdicts[result["verdict"]] += 1
            if result["verdict"] in ("wrong", "crash"):
                faults.append(result)
                print(result, flush=True)
            elif result["verdict"] == "refused":
                reasons[result["reason"].partition(": ")[2] or result["reason"]] += 1
            else:
                recipes[result["recipe"]] += 1
                worst[result["recipe"]] = max(worst.get(result["recipe"], 0.0), result["errors"]["generated"])
    print(dict(verdicts), f"{time.perf_counter() - started:.0f} s")
    document = {
        "first": arguments.first,
        "seeds": arguments.seeds,
        "verdicts": verdicts,
        "right_by_recipe": recipes,
        "largest_error_by_recipe": worst,
        "refusals": reasons,
        "faults": faults,
        "seconds": round(time.perf_counter() - started),
        "met": not faults,
    }
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
