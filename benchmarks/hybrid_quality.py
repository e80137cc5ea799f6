"""What recipes cost on a model with recurrent states, beside one with attention alone.

    python benchmarks/hybrid_quality.py heldout.jsonl MODEL [MODEL ...] [--calib calib.jsonl] [--windows N] [--jobs N]
        [--prompts prompts.jsonl ...] [--recipes f32 w4a8 ...]

Each MODEL is built with every recipe of RECIPES, and evaluated on the first windows of 2,048 tokens. `share` is the
perplexity over that of float32, less 1. With prompts, the recipes of DRAFTING continue each by 128 tokens, greedily, in
batches of 16: plain, and with drafts of every length of GAMMAS. `differ` counts tokens that are not the same. The
hybrid is that of train_hybrid.py. Result: results/hybrid_quality.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result

DRAFTING, GAMMAS, TOKENS, BATCH = ("nested", "ml-specqd", "qspec"), (1, 4, 8), 128, 16
RECIPES = ("f32", "bf16", "w8a8", "w4a8", "mixllm", "nested", "qserve", "mxfp4")


def measure(model: Path, recipe: str, data: Path, calib: Path | None, windows: int) -> dict[str, Any]:
    """The perplexity of `model` with `recipe`."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "artifact"
        qcompile.build(model, artifact, recipe=recipe, calib=calib if recipe not in ("f32", "bf16") else None)
        with qcompile.load(artifact, threads=2) as llm:
            result = llm.perplexity(data, max_windows=windows)
    return {"model": model.name, "recipe": recipe, "perplexity": result.perplexity, "windows": result.windows}


def differing(texts: list[list[int]], others: list[list[int]]) -> int:
    """How many tokens differ."""
    pairs = zip(texts, others, strict=True)
    return sum(a != b for ours, theirs in pairs for a, b in itertools.zip_longest(ours, theirs))


def speculate(model: Path, recipe: str, prompts: list[str], calib: Path | None) -> dict[str, Any]:
    """How many tokens differ between plain decoding and decoding with drafts, and the share of accepted drafts."""
    rows: list[dict[str, Any]] = []
    plain: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "artifact"
        qcompile.build(model, artifact, recipe=recipe, calib=calib)
        for gamma in (0, *GAMMAS):
            with qcompile.load(artifact, threads=2, max_batch=BATCH, gamma=gamma) as llm:
                made = llm.generate(prompts, max_tokens=TOKENS, temperature=0)
                llm.engine.check()
            texts = [list(each.outputs[0].token_ids) for each in made]
            plain = plain or texts
            counts = {
                name: sum(sum(getattr(each.speculation, name)) for each in made if each.speculation)
                for name in ("drafted", "accepted")
            }
            rows.append({"gamma": gamma, "tokens": sum(map(len, texts)), "differ": differing(texts, plain), **counts})
    return {"model": model.name, "recipe": recipe, "prompts": len(prompts), "rounds": rows}


def main() -> None:
    """Measure all models and recipes, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--calib", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--recipes", nargs="*", default=RECIPES, help="f32 must be one of them")
    options = parser.parse_args()
    given = options.data, options.calib, options.windows
    tasks = [(model, recipe, *given) for model in options.models for recipe in options.recipes]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = []
        for row in pool.map(measure, *zip(*tasks, strict=True)):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
        lines = [line for path in options.prompts for line in path.read_text(encoding="utf-8").splitlines()]
        prompts = [next(value for value in json.loads(line).values() if isinstance(value, str)) for line in lines]
        pairs = [(model, recipe, prompts, options.calib) for model in options.models for recipe in DRAFTING if prompts]
        drafts = list(pool.map(speculate, *zip(*pairs, strict=True))) if pairs else []
    plain = {row["model"]: row["perplexity"] for row in rows if row["recipe"] == "f32"}
    for row in rows:
        row["share"] = row["perplexity"] / plain[row["model"]] - 1
        print(f"{row['model']:16}{row['recipe']:10}{row['perplexity']:12.4f}{100 * row['share']:+9.2f} %")
    for row in drafts:
        for each in row["rounds"]:
            kept = f"{each['accepted']} of {each['drafted']} drafts accepted"
            result = f"{each['differ']} of {each['tokens']} tokens differ, {kept}"
            print(f"{row['model']:16}{row['recipe']:10} gamma {each['gamma']}: {result}")
    calibrated = options.calib is not None
    write_result(
        RESULTS / "hybrid_quality.json", {**machine(), "calibrated": calibrated, "rows": rows, "drafts": drafts}
    )


if __name__ == "__main__":
    main()
