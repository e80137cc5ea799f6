"""Structured outputs, bans and stops on this GPU: outputs that differ by batch, drafts or size of steps, and speed.

    python benchmarks/gpu_structured.py MODEL prompts.jsonl [out.json] [--recipes=nested,qserve] [--target=cpu]

Requests rotate through MIXED, greedy or drawn with a seed. `differing` counts requests with other tokens than in one
batch without drafts in steps of 512 rows. `valid` and `invalid` count the finished outputs of grammars that match them
or not, `cut` those that max_tokens ended. Speed is in tokens per second of 64 requests, plain and confined to a regular
expression; the first request of each kind is not timed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import facts, this_target
from qcompile import LLM, SamplingParams

NUMBERED = "[a-z]{3,9}=[0-9]{1,4}"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
MIXED: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"structured_outputs": {"regex": NUMBERED}},
    {"stop_token_ids": [13], "min_tokens": 4},
    {"bad_words": ["self", " ="]},
    {},
]
TOKENS, BATCH, STEP_ROWS = 96, 64, (512, 2048)


def params(index: int) -> SamplingParams:
    """The options of a request; every third is drawn."""
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": index} if index % 3 == 0 else {"temperature": 0.0}
    return SamplingParams(max_tokens=TOKENS, **drawn, **MIXED[index % len(MIXED)])


def verdict(index: int, output: qcompile.CompletionOutput) -> str:
    """`valid`, `invalid` or `cut` for a request with a grammar, else an empty text."""
    if index % len(MIXED) > 1:
        return ""
    if output.finish_reason == "length":
        return "cut"
    if index % len(MIXED) == 1:
        return "valid" if re.fullmatch(NUMBERED, output.text) else "invalid"
    try:
        value = json.loads(output.text)
    except ValueError:
        return "invalid"
    return "valid" if value.keys() == {"n", "ok"} and 0 <= value["n"] <= 999 else "invalid"


def speed(llm: LLM, prompt: str, options: dict[str, Any]) -> int:
    """Tokens per second of BATCH requests alike."""
    wanted = [SamplingParams(temperature=0.0, max_tokens=128, **options)] * BATCH
    for timed in (False, True):
        started = time.perf_counter()
        tokens = sum(len(out.outputs[0].token_ids) for out in llm.generate([prompt] * BATCH, wanted))
        if timed:
            return round(tokens / (time.perf_counter() - started))
    raise AssertionError


def measure(artifact: Path, prompts: Sequence[str], gammas: Sequence[int]) -> dict[str, Any]:
    """What one artifact does."""
    wanted = [params(index) for index in range(len(prompts))]
    result: dict[str, Any] = {"requests": len(prompts), "differing": {}, "valid": 0, "invalid": 0, "cut": 0}
    first: list[list[int]] = []
    for gamma in gammas:
        for rows in STEP_ROWS:
            with qcompile.load(artifact, gamma=gamma, max_num_batched_tokens=rows) as llm:
                outputs = [out.outputs[0] for out in llm.generate(list(prompts), wanted)]
                alone = [llm.generate([p], [w])[0].outputs[0] for p, w in zip(prompts, wanted, strict=True)]
            first = first or [list(output.token_ids) for output in outputs]
            for how, ones in (("batch", outputs), ("alone", alone)):
                differ = sum(list(one.token_ids) != tokens for one, tokens in zip(ones, first, strict=True))
                result["differing"][f"{how}, gamma {gamma}, {rows} rows"] = differ
            for index, output in enumerate(outputs):
                if said := verdict(index, output):
                    result[said] += 1
    with qcompile.load(artifact, gamma=0) as llm:
        result["plain_tokens_s"] = speed(llm, prompts[0], {"ignore_eos": True})
        result["confined_tokens_s"] = speed(llm, prompts[0], {"structured_outputs": {"regex": "[a-z ]{600,}"}})
    return result


def main() -> None:
    options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    model, file, *out = [a for a in sys.argv[1:] if not a.startswith("--")]
    prompts = [json.loads(line)["prompt"] for line in Path(file).read_text("utf-8").splitlines()][:30]
    target = options.get("target") or this_target()
    results: dict[str, Any] = {}
    for recipe in options.get("recipes", "nested,qserve").split(","):
        with tempfile.TemporaryDirectory() as folder:
            qcompile.build(model, Path(folder) / "out", recipe=recipe, target=target)
            results[recipe] = measure(Path(folder) / "out", prompts, (0, 4) if recipe == "nested" else (0,))
        print(recipe, json.dumps(results[recipe]), flush=True)
        if out:  # after each, as machines are lent by the minute
            where = facts() if target != "cpu" else {"target": target, "date": time.strftime("%F")}
            Path(out[0]).write_text(json.dumps({**where, "recipes": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
