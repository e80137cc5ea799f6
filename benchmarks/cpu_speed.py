"""Speed of every recipe of the sample model on this machine, one thread and all.

    python benchmarks/cpu_speed.py [--model samples/pycode-26m] [--recipes w4a8,bf16] [--rounds 5]

Recipes take turns in every round, and medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, build, streamed_bytes, write_result
from qcompile.cli import bench, console
from qcompile.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PLAIN = [name for name, recipe in RECIPES.items() if not recipe.drafts and not recipe.calibrated]
SIZES = bench.Sizes(tg=128, pp=(128, 512), verify=(1, 2, 4, 8), repeats=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "samples" / "pycode-26m")
    parser.add_argument("--recipes", default=",".join(PLAIN), help="default: those that neither draft nor calibrate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "bench", help="where artifacts go")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    recipes = arguments.recipes.split(",")
    artifacts = build(arguments.model, recipes, arguments.work)
    threads = sorted({1, len(os.sched_getaffinity(0))})
    samples: dict[tuple[str, int, str], list[float]] = {}
    with console.Progress() as progress:
        turns = [(recipe, count) for _ in range(arguments.rounds) for recipe in recipes for count in threads]
        for done, (recipe, count) in enumerate(turns, start=1):
            with qcompile.load(artifacts[recipe], threads=count) as llm:
                speeds = bench.measure(llm, SIZES, lambda stage, done, total: None)
            for test, speed in speeds.items():
                samples.setdefault((recipe, count, test), []).append(speed)
            progress("measuring", done, len(turns))
    medians = {key: statistics.median(values) for key, values in samples.items()}
    tests = list(dict.fromkeys(test for _, _, test in medians))
    rows = [
        [recipe, str(count), *(f"{medians[recipe, count, test]:.0f}" for test in tests)]
        for recipe in recipes
        for count in threads
    ]
    print(console.table(["tokens/s", "threads", *tests], rows))
    document = {
        "model": arguments.model.name,
        "rounds": arguments.rounds,
        "streamed_bytes": {recipe: streamed_bytes(path) for recipe, path in artifacts.items()},
        "tokens_per_second": [
            {"recipe": recipe, "threads": count, "test": test, "median": speed, "samples": samples[recipe, count, test]}
            for (recipe, count, test), speed in medians.items()
        ],
    }
    write_result(arguments.out or RESULTS / f"cpu_speed_{arguments.model.name}.json", document)


if __name__ == "__main__":
    main()
