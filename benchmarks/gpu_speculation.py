"""Speculation on this GPU: a Llama-3-8B configuration with random weights, acceptance replayed from pycode-26m.

    python benchmarks/gpu_speculation.py [out.json] [--parts=nested,quantspec,qserve+head,...] [--no-torch]
    python benchmarks/gpu_speculation.py [out.json] --exact [--parts=bf16,qserve,...]

A round of gamma drafts and its verification is timed as it runs, one graph; what it brings is the acceptance by place
that the same drafts have on pycode-26m with that gamma (RECIPE_TRACE, HEAD_TRACES), as random weights accept nothing.
Beside it is plain decoding by the verifying path, for `quantspec` and `quantspec-w8` also by the recipe bf16.

RECIPE+head is a recipe with a draft head of EAGLE-3's size for the configuration, RECIPE+head-OWN one with a head that
has the formats of the recipe OWN; the traces are those of samples/pycode-26m-head as it is built by default, which
benchmarks/speculation.py measures. `steps` are the seconds of a step of the model over
the rows of that many drafts, with the features of the rows, of the head's first step and of each later one.

With --exact, pycode-26m with its head is built for this GPU, and tokens are counted that differ from decoding without
drafts: prompts in groups of 1 to 4 and all at once, greedy and drawn.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import facts, this_target
from benchmarks.gpu_e2e import (
    CONFIG,
    CONTEXT,
    Opened,
    decode_rate,
    empty_checkpoint,
    empty_head,
    kernel_times,
    open_random,
    replay_seconds,
    sequences,
    torch_rates,
    write,
)
from benchmarks.speculation import HEAD, acceptance
from qcompile import SamplingParams, recipes
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.heads import CudaHeadSpeculator
from qcompile.runtime.llm import LLM
from qcompile.runtime.options import AUTO
from qcompile.runtime.request import SequenceState, SpeculationState
from qcompile.runtime.sampling.sampling import Sampler
from qcompile.runtime.step import Rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECIPE_TRACE = RESULTS / "speculation.json"
HEAD_TRACES = {
    "255 prompts": RESULTS / "speculation_heads.json",
    "humaneval": RESULTS / "speculation_heads_humaneval.json",
}
"""Results with the acceptance of HEAD_VARIANT, by the name of their prompts. Rates are those of the first."""
HEAD_VARIANT = "bf16+head"
HEAD_RECIPE = recipes.HEAD_RECIPE
WITH_HEAD = "+head"
"""Ends the name of a recipe with a draft head."""
GAMMAS = (1, 2, 3, 4, 5, 6)
ROUNDS = 27
"""As many as bring 128 tokens at 4.7 each: a hierarchical cache rounds a group of positions once in that time."""
HEAD_CASES = ((1, CONTEXT), (8, CONTEXT), (32, CONTEXT))
CASES = {
    "nested": ((1, CONTEXT), (8, CONTEXT)),
    "qspec": ((1, CONTEXT), (8, CONTEXT), (16, CONTEXT), (32, CONTEXT)),
    "quantspec": ((1, 1 << 15), (1, 1 << 17)),
    "quantspec-w8": ((1, 1 << 15), (1, 1 << 17)),
    **{f"{recipe}{WITH_HEAD}{own}": HEAD_CASES for own in ("", "-w4a16") for recipe in ("qserve", "w4a16")},
}
"""(batch, context) by recipe."""
EXACT = ("bf16", "qserve", "w4a16")
TOKENS = 64
"""Tokens generated for each prompt that is compared."""
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "top_k": 40, "seed": 7},
}
"""Sampling parameters by name."""


def tokens_a_round(variant: str, trace: Path = RECIPE_TRACE) -> dict[int, float]:
    """By gamma: the target's token and the drafts accepted, place by place of the round, on pycode-26m."""
    result = json.loads(trace.read_text(encoding="utf-8"))["variants"][variant]["exact"]["by_gamma"]
    return {gamma: 1 + sum(result[str(gamma)]["accepted_per_position"]) for gamma in GAMMAS if str(gamma) in result}


def round_seconds(opened: Opened, batch: int, context: int, gamma: int) -> float:
    """Seconds of a round, the best of several times ROUNDS that follow each other on the GPU."""
    assert opened.speculator
    best = float("inf")
    for _ in range(3):  # the first captures the graph
        room = ROUNDS * (gamma + 1)  # whatever is accepted, all rounds are made
        rows = sequences(opened.target, batch, context, room + gamma + 1)
        requests: Any = [
            SimpleNamespace(
                id=index,
                sequence=SequenceState([*range(context), 100], list(r.pages), computed=context),
                sampler=Sampler(SamplingParams(temperature=0), 0, (), opened.target.limits.vocab),
                drafts=SpeculationState(),
            )
            for index, r in enumerate(rows)
        ]
        for request in requests:
            opened.speculator.start(request)
        ends = [context + 1 + room] * batch
        started = time.perf_counter()
        _, made = opened.speculator.rounds(requests, [gamma] * batch, ROUNDS, ends)
        best = min(best, (time.perf_counter() - started) / made)
    return best


def measure(part: str, folder: Path) -> list[dict[str, Any]]:
    """One entry for each case of a recipe, or of a recipe with a head."""
    recipe, head, own = part.partition(WITH_HEAD)
    recipes.HEAD_RECIPE = own.removeprefix("-") or HEAD_RECIPE
    traces = {name: tokens_a_round(HEAD_VARIANT, path) for name, path in HEAD_TRACES.items()} if head else {}
    brings = next(iter(traces.values())) if head else tokens_a_round(recipe)
    most = max(context for _, context in CASES[part]) + 512
    drafts = [str(folder / "head")] if head else []
    opened = open_random(recipe, folder, max(batch for batch, _ in CASES[part]) * most, most, drafts=drafts)
    result = []
    for batch, context in CASES[part]:
        plain = plain_rate(opened, batch, context)
        rounds = {gamma: round_seconds(opened, batch, context, gamma) for gamma in GAMMAS}
        entry: dict[str, Any] = {"recipe": part, "batch": batch, "context": context}
        entry |= {**rated(batch, plain, rounds, brings), "round_seconds": rounds, **opened.notes}
        if head:
            entry["by_trace"] = {name: rated(batch, plain, rounds, each) for name, each in traces.items()}
            entry["steps"] = {gamma: step_seconds(opened, batch, context, gamma) for gamma in GAMMAS}
        if head and batch == 1:
            entry["head_kernels"] = kernel_times(head_of(opened), sequences(head_of(opened), 1, context, 8))
        result.append(entry)
        print(told(entry), flush=True)
    opened.close()
    return result


def rated(batch: int, plain: float, rounds: dict[int, float], brings: dict[int, float]) -> dict[str, Any]:
    """Rates by gamma, and the best of them beside that of plain decoding."""
    rates = {gamma: batch * many / rounds[gamma] for gamma, many in brings.items()}
    gamma = max(rates, key=lambda g: rates[g])
    best = {"gamma": gamma, "tokens_per_second": rates[gamma], "plain": plain, "over_plain": rates[gamma] / plain}
    return {**best, "tokens_a_round": brings[gamma], "by_gamma": rates}


def told(entry: dict[str, Any]) -> str:
    """An entry as a line of text."""
    times = {gamma: round(1e3 * seconds, 2) for gamma, seconds in entry["round_seconds"].items()}
    text = f"{entry['recipe']:12} batch {entry['batch']:3} context {entry['context']:6}: plain {entry['plain']:7.0f}"
    for name, rated in entry.get("by_trace", {"": entry}).items():
        text += f", {name} gamma {rated['gamma']} {rated['tokens_per_second']:7.0f} tokens/s"
        text += f" {rated['over_plain']:.2f}x"
    text += f", ms a round {times}"
    if "steps" in entry:
        text += (
            f", ms a step { ({g: [round(1e3 * s, 3) for s in each.values()] for g, each in entry['steps'].items()}) }"
        )
    return text


def plain_rate(opened: Opened, batch: int, context: int) -> float:
    """Tokens per second of decoding without drafts; the target then returns no features."""
    if opened.target.features is None:
        return decode_rate(opened.target, batch, context, 64)
    opened.target.return_features(False)
    rate = decode_rate(opened.target, batch, context, 64)
    opened.target.return_features(True)
    return rate


def head_of(opened: Opened) -> CudaExecutor:
    """The executor of the head."""
    assert opened.speculator
    head = opened.speculator.stages[0].executor
    assert isinstance(head, CudaExecutor)
    return head


def step_seconds(opened: Opened, batch: int, context: int, gamma: int) -> dict[str, float]:
    """Seconds of the parts of a round: the target's step of gamma + 1 rows, the head's first step, a later one."""
    each = {
        "target": (opened.target, gamma + 1),
        "head first": (head_of(opened), gamma + 1),
        "head": (head_of(opened), 1),
    }
    result = {}
    for name, (executor, rows) in each.items():
        step = [
            Rows([*s.tokens] * rows, s.start, s.pages, rows if name == "target" else 1)
            for s in sequences(executor, batch, context, 16)
        ]
        result[name] = graph_seconds(executor, step)
    return result


def graph_seconds(executor: CudaExecutor, rows: Sequence[Rows]) -> float:
    """Seconds of a step as a graph, the median of several replays."""
    gpu, counts = executor.driver, executor.fill(rows)
    calls = executor.launcher.prepare(executor.plan["launches"], counts)
    with gpu.captured() as graph:
        for _, call in calls * 8:
            call.run()
    return replay_seconds(gpu, graph[0], 5) / 8


# ---- exactness --------------------------------------------------------------------------------


def exactness(recipe: str, folder: Path) -> dict[str, Any]:
    """Tokens of pycode-26m that differ with its head from those without, by size of group and gamma."""
    path, prompts = folder / recipe, sample_prompts(24)
    qcompile.build(str(ROOT / "samples" / "pycode-26m"), path, recipe=recipe, target=this_target(), drafts=[HEAD])
    result: dict[str, Any] = {"recipe": recipe, "prompts": len(prompts), "differing": {}, "by_gamma": {}}
    with qcompile.load(path, prefix_caching=False) as llm:
        assert isinstance(llm.engine.speculation.drafter, CudaHeadSpeculator)
        wanted = {kind: generated(llm, prompts, len(prompts), 0, options)[0] for kind, options in SAMPLING.items()}
        result["tokens"] = sum(map(len, wanted["greedy"]))
        for size, gamma, kind in product((1, 2, 3, 4, len(prompts)), (1, 2, 3, 4, AUTO), SAMPLING):
            tokens, outputs = generated(llm, prompts, size, gamma, SAMPLING[kind])
            pairs = zip(wanted[kind], tokens, strict=True)
            name = f"{kind}, {size} at once, gamma {'auto' if gamma == AUTO else gamma}"
            result["differing"][name] = sum(sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairs)
            if gamma == 4:
                result["by_gamma"][f"{kind}, {size} at once"] = acceptance(outputs)
    return result


def sample_prompts(many: int) -> list[str]:
    """Prompts of the samples, and beginnings of pieces of their texts."""
    prompts = [row["prompt"] for row in rows_of("prompts.jsonl")]
    for text in (row["text"] for name in ("heldout.jsonl", "text.jsonl") for row in rows_of(name)):
        prompts += [text[start : start + 200] for start in range(0, len(text) - 200, 4000)]
    return prompts[:many]


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a file of the samples."""
    return [json.loads(line) for line in (ROOT / "samples" / name).read_text(encoding="utf-8").splitlines()]


def generated(
    llm: LLM, prompts: Sequence[str], size: int, gamma: int, options: dict[str, Any]
) -> tuple[list[list[int]], list[Any]]:
    """The tokens and outputs of the prompts, `size` of them at once."""
    llm.engine.speculation.gamma = gamma
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options)
    groups = [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]
    outputs = [output for group in groups for output in llm.generate(group, params)]
    return [output.outputs[0].token_ids for output in outputs], outputs


def main() -> None:
    named = [a.split("=", 1)[1].split(",") for a in sys.argv[1:] if a.startswith("--parts=")]
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    if "--exact" in sys.argv:
        exact: dict[str, Any] = {**facts(), "model": "pycode-26m", "exact": []}
        with tempfile.TemporaryDirectory() as temporary:
            for recipe in named[0] if named else EXACT:
                exact["exact"].append(exactness(recipe, Path(temporary)))
                differing = exact["exact"][-1]["differing"]
                print(recipe, "tokens that differ:", {k: v for k, v in differing.items() if v} or 0, flush=True)
                print(exact["exact"][-1]["by_gamma"], flush=True)
                write(exact, paths)
        return
    parts = named[0] if named else list(CASES)
    results: dict[str, Any] = {**facts(), "trace": "pycode-26m, by gamma", "speculation": []}
    CONFIG["max_position_embeddings"] = 1 << 18
    with tempfile.TemporaryDirectory() as temporary:
        folder = empty_checkpoint(Path(temporary))
        empty_head(folder / "head")
        for part in parts:
            results["speculation"] += measure(part, folder)
            write(results, paths)
        if any(part.startswith("quantspec") for part in parts):
            results["plain_bf16"] = result = plain_bf16(folder)
            for entry in results["speculation"]:
                if entry["context"] in result:
                    entry["over_plain_bf16"] = entry["tokens_per_second"] / result[entry["context"]]
                    print(f"{entry['recipe']} {entry['context']}: {entry['over_plain_bf16']:.2f}x bf16", flush=True)
            write(results, paths)
    if "--no-torch" not in sys.argv:
        CONFIG["max_position_embeddings"] = 8192
        results["torch_bf16"] = torch_rates((1,))
        write(results, paths)


def plain_bf16(folder: Path) -> dict[int, float]:
    """Tokens per second of plain decoding by the recipe bf16, at the contexts of `quantspec`."""
    contexts = [context for _, context in CASES["quantspec"]]
    opened = open_random("bf16", folder, max(contexts) + 512, max(contexts) + 512)
    result = {context: decode_rate(opened.target, 1, context, 64) for context in contexts}
    opened.close()
    print("bf16, plain:", {context: round(rate) for context, rate in result.items()}, flush=True)
    return result


if __name__ == "__main__":
    main()
