"""Sampling on this GPU: its speed beside greedy decoding and the host's sampler, and that it draws the host's tokens.

    python benchmarks/gpu_sampling.py MODEL prompts.jsonl [out.json] [--draft=MODEL] [--no-speed] [--recipes=nested,...]

Speed is that of a Llama-3-8B configuration with random weights (benchmarks/gpu_e2e.py), recipe `qserve`, from 1,024
tokens of context, in tokens per second of the whole batch. "host" draws each token from downloaded logits
(runtime/sampling/sampling.py), the way of options that the kernels do not have.

For MODEL, each prompt gives 64 tokens with options that rotate through COMPARED. `by_host` counts tokens of the kernels
that are not the host's, `drafts` those that drafts changed, by gamma, and `alone` those of prompts run one by one that
are not those of the batch. Log probabilities count too: with the host's, if they differ by more than 1e-11.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import facts, this_target
from benchmarks.gpu_e2e import CONTEXT, STEPS, empty_checkpoint, open_random, sequences
from qcompile import SamplingParams
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.options import AUTO
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.inputs import SamplingInputs
from qcompile.runtime.sampling.logprobs import Logprob, logprobs_of, reported_logprobs
from qcompile.runtime.sampling.sampling import Sampler

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k and top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.1},
    "all penalties": {
        **{"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
        **{"frequency_penalty": 0.1, "presence_penalty": 0.2},
    },
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "biases": {"temperature": 0.0, "logit_bias": {token: 3.0 - token % 7 for token in range(40, 340)}},
}
COMPARED = [
    *OPTIONS.values(),
    OPTIONS["all penalties"] | {"logprobs": 5, "logit_bias": OPTIONS["biases"]["logit_bias"]},
    OPTIONS["logprobs"] | {"prompt_logprobs": 3},
    OPTIONS["top_p"] | {"prompt_logprobs": 20, "logprobs": 0},
]
BATCHES = (1, 8, 64)
Told = tuple[int, dict[int, Logprob]]
"""A token, and its log probabilities: empty if none were asked for."""
RECIPES, GAMMAS, TOKENS = ("nested", "qspec", "quantspec", "ml-specqd+other", "nested+lookup"), (1, 4, 7, AUTO), 64


def rate(executor: CudaExecutor, batch: int, options: dict[str, Any]) -> float:
    """Tokens per second with sampling by kernels; greedy without options."""
    rows = sequences(executor, batch, CONTEXT, STEPS)
    params = SamplingParams(**options)
    vocab = executor.limits.vocab

    def sampling(steps: int) -> list[SamplingInputs]:
        return [_sampler(params, i, vocab).inputs(CONTEXT, steps) for i in range(batch)] if options else []

    executor.decode(rows, 8, sampling(8))
    best = 0.0
    for _ in range(3):
        given = sampling(STEPS)
        started = time.perf_counter()
        tokens = executor.decode(rows, STEPS, given)
        for index, inputs in enumerate(given):
            if inputs.reports is not None:
                reported_logprobs(inputs.reports, tokens[index::batch], None)
        best = max(best, batch * STEPS / (time.perf_counter() - started))
    return best


def _sampler(params: SamplingParams, index: int, vocab: int) -> Sampler:
    """A sampler after CONTEXT tokens, all different: the longest list for penalties."""
    return Sampler(params, index, range(index, index + CONTEXT), vocab)


def host_rate(executor: CudaExecutor, batch: int, options: dict[str, Any]) -> float:
    """Tokens per second where the host draws from downloaded logits."""
    rows = sequences(executor, batch, CONTEXT, STEPS)
    samplers = [_sampler(SamplingParams(**options), i, executor.limits.vocab) for i in range(batch)]
    executor.step(rows, True)
    steps = 8 if batch < 32 else 2
    started = time.perf_counter()
    for at in range(steps):
        _, logits = executor.step([row._replace(start=CONTEXT + at) for row in rows], True)
        assert logits is not None
        for index, sampler in enumerate(samplers):
            token = sampler.draw(logits[index])
            if "logprobs" in options:
                logprobs_of(logits[index], token, options["logprobs"], None)
    return batch * steps / (time.perf_counter() - started)


def speeds(folder: Path) -> list[dict[str, Any]]:
    """The rates of each batch and option."""
    opened = open_random("qserve", empty_checkpoint(folder), max(BATCHES) * (CONTEXT + 2 * STEPS), CONTEXT + 2 * STEPS)
    result = []
    for batch in BATCHES:
        row: dict[str, Any] = {"batch": batch, "greedy": rate(opened.target, batch, {})}
        row["kernels"] = {name: rate(opened.target, batch, options) for name, options in OPTIONS.items()}
        row["host"] = {name: host_rate(opened.target, batch, options) for name, options in OPTIONS.items()}
        result.append(row)
        print(row, flush=True)
    opened.close()
    return result


def exactness(path: Path, prompts: list[str]) -> dict[str, Any]:
    """Tokens that differ, as the top says."""
    params = [SamplingParams(max_tokens=TOKENS, seed=i, **COMPARED[i % len(COMPARED)]) for i in range(len(prompts))]
    with qcompile.load(path, max_batch=48, prefix_caching=False) as llm:

        def tokens(gamma: int | str, chosen: range = range(len(prompts))) -> list[list[Told]]:
            llm.engine.speculation.gamma = gamma  # type: ignore[assignment]
            outputs = llm.generate([prompts[i] for i in chosen], [params[i] for i in chosen])
            return [_told(output) for output in outputs]

        plain = tokens(0)
        result: dict[str, Any] = {"tokens": sum(map(len, plain))}
        if llm.engine.speculation.drafter:
            by_gamma = {"auto" if g == AUTO else str(g): _differing(plain, tokens(g)) for g in GAMMAS}
            result["drafts"] = by_gamma
        some = range(0, len(prompts), 8)
        result["alone"] = _differing([plain[i] for i in some], [tokens(0, range(i, i + 1))[0] for i in some])
        CudaExecutor.samples = False
        llm.engine.scheduler.samples = False
        result["by_host"] = _differing(plain, tokens(0), 1e-11)
        CudaExecutor.samples = True
    return result


def _told(output: RequestOutput) -> list[Told]:
    """Tokens of the prompt that have log probabilities, then the generated ones."""
    sample, known = output.outputs[0], output.prompt_logprobs or []
    told = [(token, logprobs) for token, logprobs in zip(output.prompt_token_ids, known, strict=False) if logprobs]
    return told + list(zip(sample.token_ids, sample.logprobs or [{} for _ in sample.token_ids], strict=True))


def _differing(a: list[list[Told]], b: list[list[Told]], most: float = 0.0) -> int:
    """Places in which tokens differ, or their log probabilities by more than `most`; and tokens that only one has."""
    pairs = list(zip(a, b, strict=True))
    unequal = sum(not _equal(x, y, most) for pair in pairs for x, y in zip(*pair, strict=False))
    return unequal + sum(abs(len(x) - len(y)) for x, y in pairs)


def _equal(a: Told, b: Told, most: float) -> bool:
    if a[0] != b[0] or list(a[1]) != list(b[1]):
        return False
    pairs = [(one, b[1][token]) for token, one in a[1].items()]
    return all(x.rank == y.rank and abs(x.logprob - y.logprob) <= most for x, y in pairs)


def main() -> None:
    options = [a for a in sys.argv[1:] if a.startswith("--")]
    model, file, *out = [a for a in sys.argv[1:] if not a.startswith("--")]
    other = next((a.split("=", 1)[1] for a in options if a.startswith("--draft=")), "")
    named = [a.split("=", 1)[1].split(",") for a in options if a.startswith("--recipes=")]
    prompts = [json.loads(line)["prompt"] for line in Path(file).read_text("utf-8").splitlines()]
    result: dict[str, Any] = {**facts(), "speed": [], "exactness": []}

    def write() -> None:
        if out:  # after each, as machines are lent by the minute
            Path(out[0]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        if "--no-speed" not in options:
            result["speed"] = speeds(Path(folder))
            write()
        for name in named[0] if named else RECIPES:
            recipe, *drafts = name.split("+")
            given = [other if draft == "other" else draft for draft in drafts]
            path = qcompile.build(model, Path(folder) / name, target=this_target(), recipe=recipe, drafts=given).path
            result["exactness"].append({"recipe": name, **exactness(path, prompts)})
            print(result["exactness"][-1], flush=True)
            write()


if __name__ == "__main__":
    main()
