"""A sample model on this GPU beside the CPU: perplexity of each recipe, and batch invariance of its rows.

    python benchmarks/gpu_quality.py MODEL heldout.jsonl [out.json] [--gpu-only] [--recipes=qserve,w4a16,...]
        [--prompts=PROMPTS.jsonl,MORE.jsonl] [--draft=MODEL] [--ranks=2]

A recipe may be followed by drafts, as in ml-specqd+other+lookup; `other` is the model given as --draft. With prompts,
recipes that draft generate 128 tokens of each with every gamma, 48 at a time; `differing` counts tokens that are not
plain decoding's. `invariance` counts requests with tokens or log probabilities that differ, in any bit, between alone
and in 200 random batches of 1 to 32 in which drafts are of random gammas. `different_bits` compares logits of four
sequences' last nine rows with each row computed alone: in steps of 2 to 9 rows, as a batch, by the kernels of long
steps, and again from the first position on, with 400 rows a step in place of 512; of a model with recurrent states,
the logits of four texts computed at once, in steps of CHUNKS rows and alone. --ranks: as many GPUs compute
the model together.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import facts, this_target
from qcompile import SamplingParams
from qcompile.runtime.options import AUTO
from qcompile.runtime.step import Rows

RECIPES = (
    *("qserve", "qserve-channel", "w4a8", "w8a8", "w4a16", "bf16", "nested", "qspec", "quantspec"),
    *("quantspec-w8", "mixllm", "mxfp4", "qspec-w4a4", "qspec-atom", "ml-specqd", "nested+lookup"),
)
CHAINS = ("ml-specqd+other", "ml-specqd+other+lookup")
GAMMAS = (4, 1, 2, 3, 5, 6, 7, 8, AUTO)
TOKENS, BATCHES, FEW_TOKENS, TOGETHER = 128, 200, 12, 48
LENGTHS = (300, 1111, 64, 700)
LAST, MANY = 9, 400
CHUNKS = (1, 2, 5, 9, 64, 100)


def bits_by_chunk(llm: qcompile.LLM) -> dict[str, int]:
    """Logits that differ in any bit from those of steps of 512 rows, where a state cannot be computed again."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(2, llm.vocab_size, (len(LENGTHS), LENGTHS[0])))
    wanted = llm.logits(ids).view(torch.int32)
    others = {f"{chunk} rows": llm.logits(ids, chunk=chunk) for chunk in CHUNKS}
    result = {name: int((logits.view(torch.int32) != wanted).sum()) for name, logits in others.items()}
    return result | {"alone": int((llm.logits(ids[:1]).view(torch.int32) != wanted[:1]).sum())}


def different_bits(llm: qcompile.LLM) -> dict[str, int]:
    """Logits that differ in any bit from those of rows alone, by how the rows were computed."""
    executor, pool = llm.executor, llm.engine.pool
    if executor.state_slots:
        return bits_by_chunk(llm)
    draw = np.random.default_rng(0)
    texts = [draw.integers(2, llm.vocab_size, length).tolist() for length in LENGTHS]
    pages = [pool.take(executor.limits.pages_for(length)) for length in LENGTHS]
    starts = [length - LAST for length in LENGTHS]

    def step(sequence: int, start: int, end: int, outputs: int) -> np.ndarray:
        _, logits = executor.step([Rows(texts[sequence][start:end], start, pages[sequence], outputs)], True)
        return np.empty(0) if logits is None else logits.view(np.int32).copy()

    def together(row: int) -> np.ndarray:
        rows = [Rows(texts[i][s + row : s + row + 1], s + row, pages[i], 1) for i, s in enumerate(starts)]
        logits = executor.step(rows, True)[1]
        assert logits is not None
        return logits.view(np.int32).copy()

    def anew(sequence: int, end: int) -> np.ndarray:
        ends = range(end % MANY or MANY, end + 1, MANY)
        return [step(sequence, max(0, e - MANY), e, LAST if e == end else 0) for e in ends][-1]

    for i, start in enumerate(starts):
        for begin in range(0, start, 512):
            step(i, begin, min(begin + 512, start), 0)
    alone = [np.concatenate([step(i, s + r, s + r + 1, 1) for r in range(LAST)]) for i, s in enumerate(starts)]

    def differ(outcome: Sequence[np.ndarray], rows: int) -> int:
        return sum(int((a != b[:rows]).sum()) for a, b in zip(outcome, alone, strict=True))

    result = {}
    for rows in (2, 3, 4, 5, LAST):
        result[f"{rows} rows"] = differ([step(i, s, s + rows, rows) for i, s in enumerate(starts)], rows)
    batches = [together(row) for row in range(LAST)]
    result["batch"] = differ([np.stack([batch[i] for batch in batches]) for i in range(len(starts))], LAST)
    long = [step(i, max(0, s - 40), s + LAST, LAST) for i, s in enumerate(starts)]
    result["long step"] = differ(long, LAST)
    result["anew"] = differ([anew(i, s + LAST) for i, s in enumerate(starts)], LAST)
    for each in pages:
        pool.give_back(each)
    return result


def exactness(llm: qcompile.LLM, prompts: list[str]) -> dict[str, Any]:
    """Tokens that drafts changed, by gamma; what was accepted at gamma 4."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    llm.engine.speculation.gamma = 0
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    result: dict[str, Any] = {"tokens": sum(map(len, plain)), "differing": {}}
    for gamma in GAMMAS:
        llm.engine.speculation.gamma = gamma
        outputs = llm.generate(prompts, params)
        pairs = zip(plain, (output.outputs[0].token_ids for output in outputs), strict=True)
        name = "auto" if gamma == AUTO else str(gamma)
        result["differing"][name] = sum(_differing(*pair) for pair in pairs)
        if gamma == GAMMAS[0]:
            counts = [output.speculation for output in outputs if output.speculation]
            result["acceptance"] = sum(sum(c.accepted) for c in counts) / sum(sum(c.drafted) for c in counts)
    return result


def _differing(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))


def invariance(llm: qcompile.LLM, prompts: list[str]) -> dict[str, int]:
    """Requests with results that changed in random batches."""
    make = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=FEW_TOKENS, logprobs=1)
    llm.engine.speculation.gamma = 0

    def facts_of(texts: list[str]) -> list[Any]:
        outputs = llm.generate(texts, params)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    some = make.sample(prompts, 64)
    alone = {text: facts_of([text])[0] for text in some}
    requests = changed = 0
    for _ in range(BATCHES):
        batch = [make.choice(some) for _ in range(make.randint(1, 32))]
        llm.engine.speculation.gamma = make.randint(0, 6) if llm.engine.speculation.drafter else 0
        requests += len(batch)
        changed += sum(alone[text] != got for text, got in zip(batch, facts_of(batch), strict=True))
    return {"requests": requests, "changed": changed}


class Given(NamedTuple):
    """What is measured on which texts; `other` is a draft model."""

    model: str
    documents: str
    targets: Sequence[str]
    prompts: list[str]
    other: str
    ranks: str


def measure(given: Given, name: str, folder: Path) -> dict[str, Any]:
    """Perplexity of a recipe by kind of target, and on the GPU what the top says."""
    recipe, *drafts = name.split("+")
    drafts = [given.other if draft == "other" else draft for draft in drafts]
    prompts, options = given.prompts, {"shard.ranks": given.ranks}
    outcome: dict[str, Any] = {"recipe": name}
    for target in given.targets if not drafts else [t for t in given.targets if t != "cpu"]:
        out = folder / f"{name}-{target}"
        path = qcompile.build(given.model, out, target=target, recipe=recipe, drafts=drafts, options=options).path
        if target != "cpu" and prompts:
            with qcompile.load(path, max_batch=TOGETHER, prefix_caching=False) as llm:
                if llm.engine.speculation.drafter:
                    outcome["exactness"] = exactness(llm, prompts)
                    print(name, outcome["exactness"], flush=True)
                outcome["invariance"] = invariance(llm, prompts)
                print(name, outcome["invariance"], flush=True)
        if drafts:  # the path that verifies is the recipe's
            continue
        with qcompile.load(path) as llm:
            kind = "cpu" if target == "cpu" else "gpu"
            result = llm.perplexity(given.documents)
            outcome[kind] = {"perplexity": result.perplexity}
            print(name, kind, result.perplexity, flush=True)
            if kind == "gpu":
                outcome[kind]["different_bits"] = different_bits(llm)
    print(outcome, flush=True)
    return outcome


def main() -> None:
    options = [a for a in sys.argv[1:] if a.startswith("--")]
    model, documents, *out = [a for a in sys.argv[1:] if not a.startswith("--")]
    named = [a.split("=", 1)[1].split(",") for a in options if a.startswith("--recipes=")]
    targets = (this_target(),) if "--gpu-only" in options else (this_target(), "cpu")
    files = next((a.split("=", 1)[1].split(",") for a in options if a.startswith("--prompts=")), [])
    ranks = next((a.split("=", 1)[1] for a in options if a.startswith("--ranks=")), "1")
    other = next((a.split("=", 1)[1] for a in options if a.startswith("--draft=")), "")
    prompts = [json.loads(line)["prompt"] for file in files for line in Path(file).read_text("utf-8").splitlines()]
    given = Given(model, documents, targets, prompts, other, ranks)
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name in named[0] if named else RECIPES + CHAINS * bool(other):
            rows.append(measure(given, name, Path(folder)))
            if out:  # after each, as machines are lent by the minute
                Path(out[0]).write_text(
                    json.dumps({**facts(), "ranks": int(ranks), "recipes": rows}, indent=1) + "\n", encoding="utf-8"
                )


if __name__ == "__main__":
    main()
