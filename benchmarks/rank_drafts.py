"""Drafts of recipes over several processes of a CPU: tokens that they change, and how many drafts are accepted.

    python benchmarks/rank_drafts.py prompts.jsonl [MORE.jsonl] [--model samples/pycode-26m] [--ranks 2]
        [--recipes nested qspec quantspec ml-specqd]

Each prompt is continued by 128 tokens, greedily, 16 at a time: without drafts, and with drafts of every length of
GAMMAS. `differ` counts tokens that are not the same as without. `alone` is the acceptance of the same recipe in one
process. Result: results/rank_drafts.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result
from qcompile import SamplingParams

GAMMAS: tuple[int, ...] = (1, 2, 4, 8)
TOKENS, BATCH = 128, 16


def continued(artifact: Path, prompts: Sequence[str], gamma: int, threads: int) -> tuple[list[list[int]], list[int]]:
    """The tokens that continue each prompt, and how many drafts were made and accepted."""
    with qcompile.load(artifact, threads=threads, max_batch=BATCH, gamma=gamma) as llm:
        outputs = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=TOKENS))
        llm.engine.check()
    told = [output.speculation for output in outputs if output.speculation]
    counts = [sum(sum(each.drafted) for each in told), sum(sum(each.accepted) for each in told)]
    return [list(output.outputs[0].token_ids) for output in outputs], counts


def measure(model: Path, recipe: str, prompts: Sequence[str], ranks: int) -> dict[str, Any]:
    """What drafts of `recipe` change, at each gamma."""
    row: dict[str, Any] = {"recipe": recipe, "prompts": len(prompts), "differ": {}, "acceptance": {}, "alone": {}}
    with tempfile.TemporaryDirectory() as folder:
        artifacts = {count: Path(folder) / str(count) for count in (1, ranks)}
        for count, artifact in artifacts.items():
            qcompile.build(model, artifact, recipe=recipe, options={"shard.ranks": str(count)})
        plain, _ = continued(artifacts[ranks], prompts, 0, 1)
        row["tokens"] = sum(map(len, plain))
        for gamma in GAMMAS:
            tokens, (drafted, accepted) = continued(artifacts[ranks], prompts, gamma, 1)
            pairs = zip(plain, tokens, strict=True)
            row["differ"][str(gamma)] = sum(a != b for pair in pairs for a, b in itertools.zip_longest(*pair))
            row["acceptance"][str(gamma)] = round(accepted / max(drafted, 1), 4)
        _, (drafted, accepted) = continued(artifacts[1], prompts, GAMMAS[-2], ranks)
        row["alone"][str(GAMMAS[-2])] = round(accepted / max(drafted, 1), 4)
    return row


def main() -> int:
    """Measure all recipes, print and write the rows. Returns 4 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "samples" / "pycode-26m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--recipes", nargs="*", default=["nested", "qspec", "quantspec", "ml-specqd"])
    options = parser.parse_args()
    lines = [line for path in options.prompts for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [json.loads(line)["prompt"] for line in lines]
    rows = []
    for recipe in options.recipes:
        rows.append(measure(options.model, recipe, prompts, options.ranks))
        print(rows[-1], flush=True)
        write_result(
            RESULTS / "rank_drafts.json",
            {**machine(), "model": options.model.name, "ranks": options.ranks, "rows": rows},
        )
    return 4 if any(any(row["differ"].values()) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
