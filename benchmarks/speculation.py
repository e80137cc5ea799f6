"""Speculation on prompts: is it exact, what is accepted, what does it bring?

    python benchmarks/speculation.py PROMPTS.jsonl [MORE.jsonl] [--variants ml-specqd,nested] [--parts exact,speed]

`exact` generates every prompt with every gamma, in batches, and counts tokens that differ from plain decoding of the
verifying path; acceptance is that of gamma 4. `speed` takes prompts one by one, plain decoding and each variant's
`auto` in turn, and reports medians. Every part of every variant (of `exact`, every gamma) is written when it is done,
and what is in the result file is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, write_result

import qcompile
from qcompile import SamplingParams, console
from qcompile.artifact import read_manifest
from qcompile.pipeline import LOOKUP
from qcompile.runtime.gamma import AUTO
from qcompile.runtime.llm import LLM
from qcompile.tune import tune

ROOT = Path(__file__).parents[1]
SMALL = str(ROOT / "samples" / "pycode-1m")
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "ml-specqd": ("ml-specqd", []),
    "ml-specqd+1m": ("ml-specqd", [SMALL]),
    "ml-specqd+lookup": ("ml-specqd", [LOOKUP]),
    "ml-specqd+1m+lookup": ("ml-specqd", [SMALL, LOOKUP]),
    "bf16+1m": ("bf16", [SMALL]),
    "nested": ("nested", []),
    "qspec": ("qspec", []),
    "qspec-w4a4": ("qspec-w4a4", []),
    "quantspec": ("quantspec", []),
}
"""Recipe and further drafts by name."""

GAMMAS = (4, 1, 8, AUTO, 2, 3, 5, 6, 7)
TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--parts", default="exact,speed")
    parser.add_argument("--limit", type=int, help="take so many prompts, evenly spread")
    parser.add_argument("--rounds", type=int, default=1, help="of the speed part")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "speculation", help="where artifacts go")
    parser.add_argument("--out", type=Path, default=RESULTS / "speculation.json")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    results: dict[str, dict[str, Any]] = known.get("variants", {})
    prompts = read(arguments.prompts, arguments.limit)
    for name in arguments.variants.split(","):
        found = results.setdefault(name, {})
        for part in arguments.parts.split(","):
            if part in found and len(found[part].get("differing", GAMMAS)) == len(GAMMAS):
                continue
            artifact = built(name, arguments.work)
            console.log(f"{name}: {part}")
            facts = {"model": "pycode-26m", "prompts": len(prompts), "tokens": TOKENS, "variants": results}
            if part == "exact":
                for exactness in exact(artifact, prompts, found.get(part, {})):
                    found[part] = exactness
                    write_result(arguments.out, facts)
                continue
            if part == "memory":
                found[part] = memory(artifact)
                write_result(arguments.out, facts)
                continue
            if "tuned" not in read_manifest(artifact):
                tune(artifact, arguments.prompts[0], 32, None, batches=(1,))
            found["tuned"] = read_manifest(artifact)["tuned"]
            found[part] = speed(artifact, prompts, arguments.rounds)
            write_result(arguments.out, facts)


def read(files: list[Path], limit: int | None) -> list[str]:
    """The prompts of JSONL files, all or `limit` of them."""
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows]
    return prompts[:: max(1, len(prompts) // limit)][:limit] if limit else prompts


def built(name: str, folder: Path) -> Path:
    """The variant's artifact, built once."""
    recipe, drafts = VARIANTS[name]
    path = folder / name
    if not (path / "qcompile.json").exists():
        qcompile.build(str(ROOT / "samples" / "pycode-26m"), path, recipe=recipe, drafts=drafts)
    return path


def generate(llm: LLM, prompts: list[str], gamma: int) -> list[Any]:
    """All prompts in batches, greedily."""
    llm.engine.gamma = gamma
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))


def exact(artifact: Path, prompts: list[str], known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Tokens that differ from plain decoding, by gamma; acceptance at gamma 4. Yields after each gamma not `known`."""
    with qcompile.load(artifact) as llm:
        plain = [output.outputs[0].token_ids for output in generate(llm, prompts, 0)]
        differing: dict[str, int] = dict(known.get("differing", {}))
        found = {name: value for name, value in known.items() if name not in ("tokens", "differing")}
        for gamma in (gamma for gamma in GAMMAS if _name(gamma) not in differing):
            outputs = generate(llm, prompts, gamma)
            pairs = zip(plain, (output.outputs[0].token_ids for output in outputs), strict=True)
            differing[_name(gamma)] = sum(sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairs)
            if gamma == 4:
                found = acceptance(outputs)
            yield {"tokens": sum(map(len, plain)), "differing": differing, **found}


def _name(gamma: int) -> str:
    return "auto" if gamma == AUTO else str(gamma)


def acceptance(outputs: list[Any]) -> dict[str, Any]:
    """Accepted over drafted tokens, all prompts together and by place in the round."""
    samples = [output.speculation for output in outputs if output.speculation]
    drafted = [sum(column) for column in zip(*(s.drafted for s in samples), strict=True)]
    accepted = [sum(column) for column in zip(*(s.accepted for s in samples), strict=True)]
    return {
        "acceptance": round(sum(accepted) / sum(drafted), 4),
        "tokens_per_round": round(1 + sum(accepted) / sum(s.rounds for s in samples), 3),
        "accepted_per_position": [round(kept / made, 4) for kept, made in zip(accepted, drafted, strict=True) if made],
    }


RESIDENT = """
import sys, qcompile
with qcompile.load(sys.argv[1], threads=1, max_batch=1, gamma=int(sys.argv[2])) as llm:
    llm.generate("def main(", temperature=0, max_tokens=64, ignore_eos=True)
    print(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
"""


def memory(artifact: Path) -> dict[str, Any]:
    """Bytes that the drafts add: to the weights, to the artifact's files, and to the process that generates."""
    manifest = read_manifest(artifact)
    runtime, files = manifest["runtime"], manifest["files"]
    program = json.loads((artifact / "graphs" / "program.json").read_text(encoding="utf-8"))
    sizes = [entry["bytes"] for entry in runtime["weights"]]
    own = sum(sizes[: len(program["weights"])])
    added = sum(files[name]["bytes"] for name in files if "draft" in name) + sum(sizes) - own
    total = sum(entry["bytes"] for entry in files.values())
    resident = {}
    for way, gamma in (("without", 0), ("with", 4)):
        command = [sys.executable, "-c", RESIDENT, str(artifact), str(gamma)]
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        resident[way] = 1024 * int(found.stdout)
    return {
        "weight_bytes": {"verify": own, "all": sum(sizes)},
        "artifact_bytes": {"verify": total - added, "all": total},
        "resident_bytes": resident,
        "over_verify": {
            "weights": round(sum(sizes) / own, 4),
            "artifact": round(total / (total - added), 4),
            "resident": round(resident["with"] / resident["without"], 4),
        },
    }


def speed(artifact: Path, prompts: list[str], rounds: int) -> dict[str, Any]:
    """Decoding speed prompt by prompt, plain, with fixed gammas and `auto` in turn: medians and the worst ratio."""
    ways = {"plain": 0, "gamma 4": 4, "auto": AUTO}
    seconds: dict[str, list[list[float]]] = {way: [[] for _ in prompts] for way in ways}
    with qcompile.load(artifact) as llm:
        for _ in range(rounds):
            for index, prompt in enumerate(prompts):
                for way, gamma in ways.items():
                    started = time.perf_counter()
                    output = generate(llm, [prompt], gamma)[0]
                    prefill = output.metrics.prefill_seconds
                    seconds[way][index].append(time.perf_counter() - started - prefill)
    medians = {way: [statistics.median(times) for times in every] for way, every in seconds.items()}
    ratios = {way: [a / b for a, b in zip(medians["plain"], medians[way], strict=True)] for way in ways}
    return {
        "tokens_per_second": {way: round((TOKENS - 1) / statistics.median(times), 1) for way, times in medians.items()},
        "over_plain": {way: round(statistics.median(found), 3) for way, found in ratios.items() if way != "plain"},
        "worst_over_plain": {way: round(min(found), 3) for way, found in ratios.items() if way != "plain"},
        "prompts": len(prompts),
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
