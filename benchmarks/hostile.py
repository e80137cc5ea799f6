"""Damaged files: headers of weights, configurations, tokenizers, manifests and GGUF files, from random generators.

    python benchmarks/hostile.py [--kind KIND ...] [--scale 1.0] [--out FILE]

tests/support/hostile.py says what a case is, and when it is right. Cases run in worker processes, so that one that
kills its process, or takes minutes, is found as well; an example of each kind of crash is run again by the
command line, as a user would. Exit code 4 if a case is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile.cli import console
from qcompile.errors import QualityError
from tests.support import hostile

COUNTS = {"header": 20_000, "configuration": 5_000, "tokenizer": 5_000, "manifest": 2_000, "gguf": 2_000, "trace": 300}
SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-1m"
STALLED = 300
"""Seconds after which a case is given up."""


def work(kind: str, first: int, end: int, artifact: Path) -> None:
    """Do cases, and print a line of JSON for each."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if kind == "manifest":
            shutil.copytree(artifact, folder, dirs_exist_ok=True)
        os.environ["QCOMPILE_CACHE"] = str(folder / "cache")
        if kind in hostile.MADE:
            hostile.warm_up(folder)
        for seed in range(first, end):
            print(json.dumps(asdict(hostile.examine(kind, seed, folder))), flush=True)


def all_cases(kind: str, count: int, artifact: Path) -> list[dict[str, Any]]:
    """The verdicts of `count` cases. A worker that ends or stalls is replaced by one for the cases after."""
    result: list[dict[str, Any]] = []
    while len(result) < count:
        given = [kind, str(len(result)), str(count), str(artifact)]
        command = [sys.executable, __file__, "--work", *given]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as worker:
            assert worker.stdout
            while len(result) < count:
                ready, _, _ = select.select([worker.stdout], [], [], STALLED)
                line = worker.stdout.readline() if ready else b""
                if not line:
                    break
                result.append(json.loads(line))
            worker.kill()
        if len(result) < count:
            how = f"ends its process with {worker.returncode}" if ready else f"takes over {STALLED} s"
            result.append({"wrong": how, "code": 1, "seconds": 0.0})
    return result


def as_user(kind: str, seed: int, artifact: Path) -> int:
    """The exit code of the command that reads the files of a case."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(artifact if kind == "manifest" else SAMPLE, folder, dirs_exist_ok=True)
        hostile.KINDS[kind](seed, folder)
        given = next(folder.glob("*.gguf")) if kind == "gguf" else folder
        command = ["inspect" if kind == "manifest" else "doctor", str(given)]
        more = os.environ | {"QCOMPILE_CACHE": str(folder / "cache")}
        done = subprocess.run([sys.executable, "-m", "qcompile", *command], capture_output=True, timeout=300, env=more)
        return done.returncode


def summary(kind: str, verdicts: list[dict[str, Any]], artifact: Path) -> dict[str, Any]:
    """What the result file says of a kind."""
    wrong = {seed: verdict["wrong"] for seed, verdict in enumerate(verdicts) if verdict["wrong"]}
    classes: dict[str, int] = {}
    for seed, reason in wrong.items():
        classes.setdefault(reason.partition(": ")[0], seed)
    return {
        "cases": len(verdicts),
        "exit_codes": dict(sorted(Counter(str(verdict["code"]) for verdict in verdicts).items())),
        "slowest_seconds": round(max(verdict["seconds"] for verdict in verdicts), 3),
        "wrong": len(wrong),
        "examples": {name: [seed, as_user(kind, seed, artifact)] for name, seed in classes.items()},
    }


def main() -> int:
    """Do all kinds; the exit code."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--scale", type=float, default=1.0, help="part of the cases")
    parser.add_argument("--out", type=Path, default=RESULTS / "hostile.json")
    options = parser.parse_args()
    started, kinds = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as temporary:
        artifact = Path(temporary) / "artifact"
        if "manifest" in options.kind:
            qcompile.build(str(SAMPLE), artifact, recipe="w4a8")
        for kind in options.kind:
            verdicts = all_cases(kind, max(1, int(COUNTS[kind] * options.scale)), artifact)
            kinds[kind] = summary(kind, verdicts, artifact)
            console.log(f"{kind}: {kinds[kind]}")
    limits = {"seconds": hostile.MOST_SECONDS, "bytes": hostile.MOST_BYTES}
    took = round(time.perf_counter() - started, 1)
    write_result(options.out, {"limits": limits, "kinds": kinds, "seconds": took})
    return QualityError.exit_code if any(kind["wrong"] for kind in kinds.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
