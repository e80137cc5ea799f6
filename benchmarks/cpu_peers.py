"""Our recipes against llama.cpp on the same weights, in the same interleaved rounds.

    python benchmarks/cpu_peers.py CHECKPOINT --runner RUN.SH [--recipes w4a8,mxfp4,bf16,w8a8] [--rounds 5]

RUN.SH measures llama.cpp and the machine's ceilings; it is called as

    OUT=RESULT.json RUN.SH CHECKPOINT --threads 1,2 --rounds N --types BF16,Q8_0 --tg 64 --pp 128,512 --verify 1,2
        --peer-cmd 'NAME=COMMAND with {threads} {tg} {pp} {verify}'

and runs every COMMAND inside each round; ours is `qcompile bench ARTIFACT --jsonl`. RESULT.json holds `runs`
({type, threads, test, tok_s, ...}, where a step of N tokens is called ppN, as llama.cpp calls it), `ceilings`
(dram_read_GBps.t1_median, .t2_median) and `models`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, build, streamed_bytes, write_result

ROOT = Path(__file__).parents[1]
Key = tuple[str, int, str]
"""Recipe or llama.cpp type, threads, test."""


def measure(arguments: argparse.Namespace, artifacts: dict[str, Path]) -> dict[str, Any]:
    """Run RUN.SH with our commands; what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "peers.json"
        command = [arguments.runner, str(arguments.checkpoint)]
        for option in ("rounds", "threads", "types", "tg", "pp", "verify"):
            command += [f"--{option}", str(getattr(arguments, option))]
        command += ["--hugepages"] if arguments.hugepages else []
        for recipe, artifact in artifacts.items():
            bench = f"{shlex.quote(sys.executable)} -m qcompile bench {shlex.quote(str(artifact))} --jsonl --repeats 1"
            sizes = "--threads {threads} --tg {tg} --pp {pp} --verify {verify}"
            renamed = shlex.quote(f"set -o pipefail; {bench} {sizes} | sed s/verify/pp/")  # RUN.SH knows no other name
            command += ["--peer-cmd", f"qcompile {recipe}=bash -c {renamed}"]
        environment = {**os.environ, "OUT": str(result), "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment)
        outcome: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return outcome


def medians(runs: list[dict[str, Any]], steps: set[int]) -> dict[Key, float]:
    """Median tokens/s by type, threads and test; steps of N tokens are verifyN, whoever ran them."""
    samples: dict[Key, list[float]] = {}
    for run in runs:
        test = re.sub(
            r"^pp(\d+)$", lambda result: ("verify" if int(result[1]) in steps else "pp") + result[1], run["test"]
        )
        samples.setdefault((run["type"], run["threads"], test), []).append(run["tok_s"])
    return {key: statistics.median(values) for key, values in samples.items()}


def bandwidth(ceilings: list[dict[str, Any]], threads: int) -> float:
    """Median read bandwidth over the rounds, bytes per second."""
    return 1e9 * statistics.median(c["dram_read_GBps"][f"t{threads}_median"] for c in ceilings)


def judge(
    result: dict[str, Any], artifacts: dict[str, Path], threads: list[int], tg: int, steps: set[int]
) -> list[dict[str, Any]]:
    """For each recipe and thread count: share of bandwidth, ratio to each peer, cost of a step by its tokens."""
    speed = medians(result["runs"], steps)
    ours = {f"qcompile {recipe}": streamed_bytes(path) for recipe, path in artifacts.items()}
    peers = sorted({kind for kind, _, _ in speed} - set(ours))
    rows = []
    for name, size in ours.items():
        for count in threads:
            tests = {test: value for (kind, n, test), value in speed.items() if (kind, n) == (name, count)}
            if not tests:
                continue
            decode = tests[f"tg{tg}"]
            timed = {m: tests[f"verify{m}"] for m in sorted(steps) if f"verify{m}" in tests}
            cost = {m: m / tok_s * timed[1] for m, tok_s in timed.items() if m <= 16 and 1 in timed}
            ratios = {
                peer: {
                    test: value / speed[peer, count, test]
                    for test, value in tests.items()
                    if (peer, count, test) in speed
                }
                for peer in peers
            }
            rows.append(
                {
                    "recipe": name,
                    "threads": count,
                    "tokens_per_second": tests,
                    "bytes_per_token": size,
                    "share_of_read_bandwidth": decode * size / bandwidth(result["ceilings"], count),
                    "step_cost_over_one_token": cost,
                    "times_peer": ratios,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runner", required=True, help="the script that measures llama.cpp")
    parser.add_argument("--recipes", default="w4a8,mxfp4,bf16,w8a8")
    parser.add_argument("--target", default="cpu", help="e.g. cpu-avx2, with a RUN.SH that builds llama.cpp for it")
    parser.add_argument("--types", default="BF16,Q8_0,Q4_0,MXFP4")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tg", type=int, default=64)
    parser.add_argument("--pp", default="128,512")
    parser.add_argument("--verify", default="1,2,4,8")
    parser.add_argument("--hugepages", action="store_true", help="measure llama.cpp with huge pages too")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "peers", help="where artifacts go")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    artifacts = build(arguments.checkpoint, arguments.recipes.split(","), arguments.work, arguments.target)
    result = measure(arguments, artifacts)
    threads = [int(count) for count in arguments.threads.split(",")]
    prompts, steps = ({int(size) for size in text.split(",")} for text in (arguments.pp, arguments.verify))
    rows = judge(result, artifacts, threads, arguments.tg, steps - prompts)
    for row in rows:
        costs = ", ".join(f"{m}: {cost:.2f}" for m, cost in row["step_cost_over_one_token"].items())
        ratios = ", ".join(
            f"{peer} {tests.get(f'tg{arguments.tg}', 0):.2f}x" for peer, tests in row["times_peer"].items()
        )
        print(
            f"{row['recipe']}, {row['threads']} threads: {row['tokens_per_second'][f'tg{arguments.tg}']:.1f} tokens/s, "
            f"{row['share_of_read_bandwidth']:.0%} of read bandwidth; steps {costs}; {ratios}"
        )
    document = {
        "model": arguments.checkpoint.name,
        "target": arguments.target,
        "rounds": arguments.rounds,
        "llama_cpp": result.get("llama_cpp_version"),
        "results": rows,
        "read_bytes_per_second": {count: bandwidth(result["ceilings"], count) for count in threads},
        "models": result["models"],
        "runs": result["runs"],
    }
    name = f"cpu_peers_{arguments.checkpoint.name}{arguments.target.removeprefix('cpu').replace('-', '_')}.json"
    write_result(arguments.out or RESULTS / name, document)


if __name__ == "__main__":
    main()
