"""Conversations with and without prefix caching: time to the first token by turn, and that no token differs.

    python benchmarks/prefixes.py [--model samples/pycode-26m] [--recipe w4a8] [--target cpu] [--text heldout.jsonl]
        [--ranks 1] [--draft lookup]

Each conversation begins with the same 512 tokens; a turn adds 60 tokens and an answer of 64, and asks with all of them.
Turns of all conversations alternate, as a server's do, in both models in turn. "together" is the time until all answers
to `--samples` prompts with one start of 1,024 tokens, asked at once, have their first token. "reused" is the number of
tokens of a turn's prompt that were not computed again, the smallest of all conversations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile import SamplingParams
from qcompile.cli import console
from qcompile.texts import lines, parsed, read, text_of

ROOT = Path(__file__).parents[1]
SYSTEM, QUESTION, ANSWER, TURNS = 512, 60, 64, 8
WAYS = {"cached": True, "computed": False}


def converse(llm: qcompile.LLM, history: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token of the answer, the answer, and how many tokens of the prompt were reused."""
    output = llm.generate([history], SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))[0]
    metrics = output.metrics
    return metrics.first_token_time - metrics.arrival_time, output.outputs[0].token_ids, metrics.cached_tokens


def together(llm: qcompile.LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds until all prompts asked at once have their first token, and their answers."""
    started = time.monotonic()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return max(o.metrics.first_token_time for o in outputs) - started, [o.outputs[0].token_ids for o in outputs]


def opened(arguments: argparse.Namespace) -> dict[str, qcompile.LLM]:
    """The model, built as the arguments say, once for each of WAYS."""
    how = {"target": arguments.target, "recipe": arguments.recipe, "drafts": arguments.draft}
    how |= {"options": {"shard.ranks": str(arguments.ranks)}} if arguments.ranks > 1 else {}
    qcompile.build(str(arguments.model), arguments.work, **how)
    return {way: qcompile.load(arguments.work, kv_cache_bytes=1 << 28, prefix_caching=on) for way, on in WAYS.items()}


def gpu() -> dict[str, Any]:
    """Device and versions; imported here, since a CPU needs no Triton."""
    from benchmarks.gpu_common import facts

    return facts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "samples" / "pycode-26m")
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--text", type=Path, default=ROOT.parent / "shared" / "data" / "heldout.jsonl")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=1, help="processes that compute the model together")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "prefixes", help="where the artifact goes")
    parser.add_argument("--out", type=Path, default=RESULTS / "prefixes.json")
    arguments = parser.parse_args()
    models = opened(arguments)
    some = models["cached"]
    documents = (text_of(parsed(line), "text") for _, line in lines(read(arguments.text)))
    tokens = [token for document in documents if document for token in some.encode(document, cut=True)]
    seconds: dict[str, list[list[float]]] = {way: [[] for _ in range(TURNS)] for way in models}
    reused: list[list[int]] = [[] for _ in range(TURNS)]
    histories = [tokens[:SYSTEM] for _ in range(arguments.conversations)]
    differing, at = 0, SYSTEM
    with console.Progress() as progress:
        for turn in range(TURNS):
            for number, history in enumerate(histories):
                history += tokens[at : at + QUESTION]
                at += QUESTION
                answers = []
                for way, llm in models.items():
                    taken, answer, known = converse(llm, history)
                    seconds[way][turn].append(taken)
                    answers.append(answer)
                    if way == "cached":
                        reused[turn].append(known)
                differing += sum(a != b for a, b in zip(*answers, strict=True))
                history += answers[0]
                progress("asking", turn * len(histories) + number, TURNS * len(histories))
    start = tokens[at : at + 1024]
    prompts = [start + tokens[at + 1024 + 20 * i :][:20] for i in range(arguments.samples)]
    at_once: dict[str, Any] = {way: together(llm, prompts) for way, llm in models.items()}
    differing += sum(a != b for a, b in zip(at_once["cached"][1], at_once["computed"][1], strict=True))
    by_turn = {way: [statistics.median(each) for each in turns] for way, turns in seconds.items()}
    fewest = [min(each) for each in reused]
    rows = [
        [str(turn + 1), *(f"{1e3 * by_turn[way][turn]:.1f}" for way in models), str(fewest[turn])]
        for turn in range(TURNS)
    ]
    print(console.table(["turn", *(f"{way} ms" for way in models), "reused"], rows))
    result = {"together_seconds": {way: each[0] for way, each in at_once.items()}, "differing": differing}
    print(result)
    copies = some.executor.copies.many if some.executor.copies else 0
    for llm in models.values():
        llm.engine.check()
        llm.close()
    facts = {} if arguments.target == "cpu" else gpu()
    facts |= {"model": arguments.model.name, "recipe": arguments.recipe, "target": arguments.target}
    facts |= {"ranks": arguments.ranks, "drafts": arguments.draft, "copies": copies}
    facts |= {"conversations": len(histories), "samples": arguments.samples, "system_tokens": SYSTEM}
    result |= {"reused_tokens_by_turn": fewest}
    write_result(arguments.out, {**facts, "first_token_seconds_by_turn": by_turn, **result})


if __name__ == "__main__":
    main()
