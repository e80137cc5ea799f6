"""Speculation on prompts: is it exact, what is accepted, what does it bring?

    python benchmarks/speculation.py PROMPTS.jsonl [MORE.jsonl] [--variants ml-specqd,nested] [--parts exact,speed]

`exact` generates every prompt with every gamma, in batches, and counts tokens that differ from plain decoding of the
verifying path; acceptance is that of gamma 4, with that of every gamma below it. `speed` takes prompts one by one,
plain decoding, gamma 4 and `auto` in turn, and reports medians; `batches` does so for groups of 4 and of 16 prompts.
Every part of every variant (of `exact`, every gamma) is written when it is done, and what is in the result file is not
measured again. `speed` and `batches` keep the rounds they have made with the artifact: with `--seconds` they stop in
time, and the next call goes on.
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

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, core_distance, machine, write_result
from qcompile import SamplingParams
from qcompile.artifact.reader import read_manifest
from qcompile.cli import console
from qcompile.cli.tune import tune
from qcompile.drafts.paths import LOOKUP
from qcompile.recipes import get_recipe
from qcompile.runtime.llm import LLM
from qcompile.runtime.options import AUTO

ROOT = Path(__file__).parents[1]
SMALL = str(ROOT / "samples" / "pycode-1m")
HEAD = str(ROOT / "samples" / "pycode-26m-head")
"""A draft head, trained by benchmarks/train_head.py."""
CALIBRATED = "-calibrated"
"""Ends the names of variants that round the draft by calibration text (`--calib`), where the recipe needs none."""
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "ml-specqd": ("ml-specqd", []),
    "ml-specqd+1m": ("ml-specqd", [SMALL]),
    "ml-specqd+lookup": ("ml-specqd", [LOOKUP]),
    "ml-specqd+1m+lookup": ("ml-specqd", [SMALL, LOOKUP]),
    "bf16+1m": ("bf16", [SMALL]),
    **{f"{recipe}+head": (recipe, [HEAD]) for recipe in ("bf16", "w8a8", "w4a8", "w4a16")},
    "nested": ("nested", []),
    "nested+lookup": ("nested", [LOOKUP]),
    "qspec": ("qspec", []),
    "qspec-w4a4": ("qspec-w4a4", []),
    "qspec-atom": ("qspec-atom", []),
    "quantspec": ("quantspec", []),
    "quantspec-w8": ("quantspec-w8", []),
    **{f"{recipe}{CALIBRATED}": (recipe, []) for recipe in ("ml-specqd", "nested", "quantspec")},
}
"""Recipe and further drafts by name."""

GAMMAS = (4, 1, 8, AUTO, 2, 3, 5, 6, 7)
TOKENS = 128
WAYS = {"plain": 0, "gamma 4": 4, "auto": AUTO, "plain again": 0}
"""Gammas by name; plain decoding once more tells how far two measurements of the same differ."""
BATCHES = (4, 16)
GROUPS = 4
"""Groups of each size of BATCHES."""
LOST = "lost"
"""Key of what `auto` says itself of its time: the share that trials, and rounds that were too slow, cost a group."""
DISTANCE = "core distance"
"""Key of the nanoseconds between the two cores before a group."""
FAR = 150.0
"""From here on cores do not share a last-level cache."""
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--parts", default="exact,speed")
    parser.add_argument("--limit", type=int, help="number of prompts to take, evenly spread")
    parser.add_argument("--rounds", type=int, default=5, help="of the parts that measure speed")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round of them after so long")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "speculation", help="where artifacts go")
    parser.add_argument("--calib", type=Path, help="calibration text for recipes that want it")
    parser.add_argument("--out", type=Path, default=RESULTS / "speculation.json")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    results: dict[str, dict[str, Any]] = known.get("variants", {})
    prompts = read(arguments.prompts, arguments.limit)
    until = time.monotonic() + arguments.seconds
    commits: dict[str, Any] = known.get("measured", {})
    facts = {"model": "pycode-26m", "prompts": len(prompts), "tokens": TOKENS, "variants": results, "measured": commits}
    for name in arguments.variants.split(","):
        result = results.setdefault(name, {})
        for part in arguments.parts.split(","):
            if complete(result.get(part), arguments.rounds):
                continue
            artifact = built(name, arguments.work, arguments.calib)
            console.log(f"{name}: {part}")
            for value in measured(part, artifact, prompts, result.get(part, {}), arguments, until):
                result[part] = value
                commits[f"{part} of {name}"] = {key: machine()[key] for key in ("commit", "cores")}
                if "tuned" in read_manifest(artifact):
                    result["tuned"] = read_manifest(artifact)["tuned"]
                write_result(arguments.out, facts)


def complete(result: dict[str, Any] | None, rounds: int) -> bool:
    """Whether a part needs no more measuring."""
    if result is None:
        return False
    return result.get("rounds", rounds) >= rounds and len(result.get("differing", GAMMAS)) == len(GAMMAS)


def measured(
    part: str, artifact: Path, prompts: list[str], known: dict[str, Any], arguments: argparse.Namespace, until: float
) -> Iterator[dict[str, Any]]:
    """What is found of a part, again and again as it grows."""
    if part == "exact":
        yield from exact(artifact, prompts, known)
    elif part == "memory":
        yield memory(artifact)
    else:
        if "tuned" not in read_manifest(artifact):
            tune(artifact, arguments.prompts[0], 32)
        sizes = (1,) if part == "speed" else BATCHES
        kept = artifact.parent / f"{artifact.name}.{part}.json"
        rounds: list[Times] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
        with qcompile.load(artifact, prefix_caching=False) as llm:
            while len(rounds) < arguments.rounds and time.monotonic() < until:
                rounds.append(one_round(llm, prompts, sizes))
                kept.write_text(json.dumps(rounds), encoding="utf-8")
                yield summary(rounds, sizes)


def read(files: list[Path], limit: int | None) -> list[str]:
    """The prompts of JSONL files, all or `limit` of them."""
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows]
    return prompts[:: max(1, len(prompts) // limit)][:limit] if limit else prompts


def built(name: str, folder: Path, calib: Path | None = None) -> Path:
    """The variant's artifact, built once; one that wants calibration text gets `calib`."""
    recipe, drafts = VARIANTS[name]
    path = folder / name
    if not (path / "qcompile.json").exists():
        text = calib if get_recipe(recipe).calibrated or name.endswith(CALIBRATED) else None
        qcompile.build(str(ROOT / "samples" / "pycode-26m"), path, recipe=recipe, drafts=drafts, calib=text)
    return path


def generate(llm: LLM, prompts: list[str], gamma: int) -> list[Any]:
    """All prompts in batches, greedily."""
    llm.engine.speculation.gamma = gamma
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))


def exact(artifact: Path, prompts: list[str], known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Tokens that differ from plain decoding, and acceptance, by gamma. Yields after each gamma not `known`."""
    with qcompile.load(artifact, prefix_caching=False) as llm:
        plain = [output.outputs[0].token_ids for output in generate(llm, prompts, 0)]
        differing: dict[str, int] = dict(known.get("differing", {}))
        result = {name: value for name, value in known.items() if name not in ("tokens", "differing")}
        for gamma in (gamma for gamma in GAMMAS if _name(gamma) not in differing):
            outputs = generate(llm, prompts, gamma)
            pairs = zip(plain, (output.outputs[0].token_ids for output in outputs), strict=True)
            differing[_name(gamma)] = sum(sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairs)
            if gamma == 4:
                result |= acceptance(outputs)
            if gamma != AUTO:
                result["by_gamma"] = {**result.get("by_gamma", {}), str(gamma): acceptance(outputs)}
            yield {"tokens": sum(map(len, plain)), "differing": differing, **result}


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
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        resident[way] = 1024 * int(result.stdout)
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


def one_round(llm: LLM, prompts: list[str], sizes: tuple[int, ...]) -> Times:
    """Seconds of decoding by way and size of group: groups of that many prompts, every way in turn; LOST, DISTANCE too.

    For one prompt, from its first token to its last; for a group, all of its time but the longest prefill.
    """
    times: Times = {way: {str(size): [] for size in sizes} for way in (*WAYS, LOST, DISTANCE)}
    controller = llm.engine.speculation.controller
    assert controller is not None
    for size in sizes:
        chosen = prompts if size == 1 else prompts[:: max(1, len(prompts) // (size * GROUPS))]
        for start in range(0, len(chosen) - size + 1, size):
            times[DISTANCE][str(size)].append(core_distance())
            for way, gamma in WAYS.items():
                started, before = time.perf_counter(), (controller.seconds, controller.lost)
                outputs = generate(llm, chosen[start : start + size], gamma)
                prefill = max(output.metrics.prefill_seconds for output in outputs)
                whole = time.perf_counter() - started - prefill
                times[way][str(size)].append(outputs[0].metrics.decode_seconds if size == 1 else whole)
                if gamma == AUTO:
                    times[LOST][str(size)].append((controller.lost - before[1]) / (controller.seconds - before[0]))
    return times


def summary(rounds: list[Times], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Medians over rounds, group by group: speed of all groups' median, and how it compares with plain decoding's."""
    result: dict[str, Any] = {"rounds": len(rounds)}
    for size in map(str, sizes):
        every = {way: zip(*(times[way][size] for times in rounds), strict=True) for way in WAYS}
        medians = {way: [statistics.median(group) for group in groups] for way, groups in every.items()}
        ratios = {
            way: [a / b for a, b in zip(medians["plain"], medians[way], strict=True)] for way in WAYS if way != "plain"
        }
        # What is measured within a second of each other, as a prompt's ways are, is compared best.
        paired = {
            way: _paired([times["plain"][size] for times in rounds], [times[way][size] for times in rounds])
            for way in ratios
        }
        tokens = int(size) * (TOKENS - 1)
        facts = {
            "tokens_per_second": {way: round(tokens / statistics.median(times), 1) for way, times in medians.items()},
            "over_plain": {way: round(statistics.median(values), 3) for way, values in ratios.items()},
            "worst_over_plain": {way: round(min(values), 3) for way, values in ratios.items()},
            "under_0.95": {way: sum(value < 0.95 for value in values) for way, values in ratios.items()},
            "paired_under_0.95": {way: sum(value < 0.95 for value in values) for way, values in paired.items()},
            "groups": len(medians["plain"]),
        }
        lost = [share for times in rounds for share in times.get(LOST, {}).get(size, [])]
        if lost:
            facts["auto_lost"] = {"mean": round(statistics.mean(lost), 4), "worst": round(max(lost), 4)}
        found_at = distances(rounds, size)
        if found_at:
            facts["core_distance"] = found_at
        result |= facts if size == "1" else {f"batch {size}": facts}
    return result


def _paired(plain: list[list[float]], other: list[list[float]]) -> list[float]:
    """By group, the median over rounds of how much longer plain decoding took in the same round."""
    return [
        statistics.median(a / b for a, b in zip(one, two, strict=True))
        for one, two in zip(zip(*plain, strict=True), zip(*other, strict=True), strict=True)
    ]


def distances(rounds: list[Times], size: str) -> dict[str, Any]:
    """Where the cores were, and how the ways compare with plain decoding there: medians over rounds and groups."""
    rows = [
        (distance, {way: times["plain"][size][index] / times[way][size][index] for way in WAYS})
        for times in rounds
        for index, distance in enumerate(times.get(DISTANCE, {}).get(size, []))
    ]
    result: dict[str, Any] = {}
    for name, chosen in (
        ("near", [row for row in rows if row[0] < FAR]),
        ("far", [row for row in rows if row[0] >= FAR]),
    ):
        if chosen:
            over = {way: round(statistics.median(row[1][way] for row in chosen), 3) for way in WAYS if way != "plain"}
            nanoseconds = round(statistics.median(row[0] for row in chosen))
            result[name] = {"share": round(len(chosen) / len(rows), 3), "ns": nanoseconds, "over_plain": over}
    return result


if __name__ == "__main__":
    main()
