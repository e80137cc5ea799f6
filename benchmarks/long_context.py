"""QuantSpec's hierarchical cache against a 16-bit one at a long context: bytes, time of attention, acceptance.

    python benchmarks/long_context.py TEXT.jsonl [--context 16384]

The model is pycode-26m with its rope stretched to the context. Both artifacts draft with 4-bit weights; they differ in
the cache alone. Attention of the draft is timed over one row, of the verifying path over gamma + 1 = 5, both caches in
turn at the same positions, filled with the same text; times are medians of the calls' own profile, summed over layers.
Where the hierarchical cache appends inside its attention, the 16-bit one has done so before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile import SamplingParams
from qcompile.cli import console
from qcompile.runtime.llm import LLM
from qcompile.runtime.speculation.stages import Speculator
from qcompile.runtime.step import Rows, StepExecutor

ROOT = Path(__file__).parents[1]
TRAINED = 2048
GAMMA = 4
HALF_GROUP = 64
"""Timed rows come so far before the end of the context: between the ends of groups, where nothing is rounded."""
SPARE = 512
"""Positions behind the context."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--answer", type=int, default=96, help="tokens generated for the acceptance")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "long", help="where artifacts go")
    parser.add_argument("--out", type=Path, default=RESULTS / "long_context.json")
    arguments = parser.parse_args()
    model = stretched(arguments.work / "model", arguments.context + SPARE)
    result: dict[str, Any] = {}
    opened: dict[str, tuple[LLM, list[int], list[int]]] = {}
    for format in ("kv_hier", "kv16"):
        path = arguments.work / format
        if not (path / "qcompile.json").exists():
            qcompile.build(str(model), path, recipe="quantspec", options={"cache.format": format})
        llm = qcompile.load(path, max_batch=1, gamma=GAMMA)
        tokens = text_tokens(llm, arguments.text, arguments.context)
        pages = llm.engine.pool.take(llm.engine.pool.pages_for(arguments.context + SPARE))
        fill(llm.executor, tokens, pages)
        opened[format] = llm, tokens, pages
        held = llm.engine.pool.pages_for(arguments.context) * llm.manifest["runtime"]["kv"]["page_bytes"]
        result[format] = {"cache_bytes": held}
        console.log(f"{format}: filled")
    for format, (draft, verify) in attention_times(opened, arguments.repeats).items():
        result[format] |= {"draft_attention_seconds": draft, "verify_attention_seconds": verify}
    ratios = {key: round(result["kv_hier"][key] / result["kv16"][key], 3) for key in result["kv16"]}
    facts = {"model": "pycode-26m", "context": arguments.context, "over_kv16": ratios, **result}
    write_result(arguments.out, facts)
    for format, (llm, tokens, pages) in opened.items():
        llm.engine.pool.give_back(pages)
        result[format]["acceptance"] = acceptance(llm, tokens[: arguments.context - arguments.answer], arguments.answer)
        write_result(arguments.out, facts)


def stretched(path: Path, positions: int) -> Path:
    """A copy of the sample model for `positions` positions, with the wavelengths of its rope longer by as much."""
    source = ROOT / "samples" / "pycode-26m"
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copy(file, path / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    scaling = {"rope_type": "linear", "factor": positions / TRAINED}
    config |= {"max_position_embeddings": positions, "rope_scaling": scaling}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def text_tokens(llm: LLM, file: Path, count: int) -> list[int]:
    """The first `count` tokens of the file's documents."""
    tokens: list[int] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        assert llm.tokenizer is not None
        tokens += [0, *llm.tokenizer.encode(json.loads(line)["text"]).ids]
        if len(tokens) >= count:
            break
    return tokens[:count]


def fill(executor: StepExecutor, tokens: list[int], pages: list[int]) -> None:
    """Compute the tokens' keys and values."""
    step = executor.limits.max_tokens
    for start in range(0, len(tokens), step):
        executor.step([Rows(tokens[start : start + step], start, pages, 0)], logits=False)


def attention_times(
    opened: dict[str, tuple[LLM, list[int], list[int]]], repeats: int
) -> dict[str, tuple[float, float]]:
    """Seconds of attention in a step of the draft and of the verifying path, by cache."""
    seconds: dict[str, tuple[list[float], list[float]]] = {format: ([], []) for format in opened}
    for _ in range(repeats):
        for format, (llm, tokens, pages) in opened.items():
            drafts = llm.engine.speculation.drafter
            assert isinstance(drafts, Speculator) and drafts.stages[0].executor
            for place, (executor, rows) in enumerate(((drafts.stages[0].executor, 1), (llm.executor, GAMMA + 1))):
                executor.profile(True)
                executor.step([Rows(tokens[:rows], len(tokens) - HALF_GROUP, pages, rows)], logits=False)
                calls = executor.profile_read()
                executor.profile(False)
                seconds[format][place].append(sum(calls[name][0] for name in calls if "attention" in name))
    return {
        format: (statistics.median(draft), statistics.median(verify)) for format, (draft, verify) in seconds.items()
    }


def acceptance(llm: LLM, tokens: list[int], answer: int) -> float:
    """Accepted over drafted tokens of one greedy answer."""
    output = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))[0]
    assert output.speculation is not None and output.speculation.acceptance_rate is not None
    return round(output.speculation.acceptance_rate, 4)


if __name__ == "__main__":
    main()
