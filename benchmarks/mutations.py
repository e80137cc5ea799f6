"""Seeded mistakes: does the test suite notice when the code is wrong?

    python benchmarks/mutations.py [--only TEXT] [--jobs 2] [--out FILE]

Each mutation is one deliberate fault, a small change of source text, put into a copy of the tree; then the tests that
ought to notice are run there. Before that they are run on the unchanged copy, where they must pass. With --only the
other rows of FILE stay.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, write_result
from benchmarks.mutation_list import MUTATIONS, Mutation
from benchmarks.mutation_list_gpu import GPU_MUTATIONS

ROOT = Path(__file__).parents[1]
Result = TypeVar("Result")
WANTED = 28
LIMIT = 600
"""Seconds after which a run of tests counts as having noticed: a fault may make code loop for ever."""


def tree(folder: Path) -> Path:
    """A copy of what git knows of the tree, symlinks as they are."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def run_tests(folder: Path, tests: str) -> tuple[bool, str]:
    """Whether the tests pass in the tree `folder`, and the first one that does not."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *_arguments(tests)]
    command.append("--update-golden")  # that something changed is no reason why it is wrong
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return False, f"not done after {LIMIT} s"
    lines = done.stdout.splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else "")
    return done.returncode == 0, "" if done.returncode == 0 else failed[:160]


def _arguments(tests: str) -> list[str]:
    """`a.py b.py -k text` as arguments; what follows -k is one."""
    files, _, chosen = tests.partition(" -k ")
    return [*files.split(), *(["-k", chosen] if chosen else [])]


def examine(mutation: Mutation, folder: Path) -> dict[str, object]:
    """Put the fault into the tree, run its tests, and take it out again."""
    path = folder / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: {mutation.old!r} occurs {text.count(mutation.old)} times, not once")
    started = time.perf_counter()
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    passed, failed = run_tests(folder, mutation.tests)
    path.write_text(text, encoding="utf-8")
    print(f"{'NOT CAUGHT' if passed else 'caught':11} {mutation.fault} ({mutation.file}) {failed}", flush=True)
    seconds = round(time.perf_counter() - started, 1)
    return {"fault": mutation.fault, "file": mutation.file, "caught": not passed, "by": failed, "seconds": seconds}


def in_a_copy(copies: queue.Queue[Path], work: Callable[[Path], Result]) -> Result:
    """What `work` gives in the next copy of the tree that is free."""
    copy = copies.get()
    try:
        return work(copy)
    finally:
        copies.put(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name or file has TEXT in it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="copies of the tree at work")
    parser.add_argument("--out", type=Path, default=RESULTS / "mutations.json")
    arguments = parser.parse_args()
    chosen = [m for m in (*MUTATIONS, *GPU_MUTATIONS) if arguments.only in m.fault or arguments.only in m.file]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(arguments.jobs):
            copies.put(tree(Path(folder) / str(number)))
        for tests, (passed, failed) in zip(
            every := list(dict.fromkeys(m.tests for m in chosen)),
            pool.map(lambda tests: in_a_copy(copies, lambda copy: run_tests(copy, tests)), every),
            strict=True,
        ):
            if not passed:
                raise SystemExit(f"{tests} does not pass on the unchanged tree: {failed}")
        rows = list(pool.map(lambda m: in_a_copy(copies, lambda copy: examine(m, copy)), chosen))
    known = json.loads(arguments.out.read_text())["rows"] if arguments.only and arguments.out.exists() else []
    fresh = {str(row["fault"]): row for row in rows}
    faults = {m.fault for m in (*MUTATIONS, *GPU_MUTATIONS)}
    rows = list(({row["fault"]: row for row in known if row["fault"] in faults} | fresh).values())
    caught = sum(bool(row["caught"]) for row in rows)
    print(f"{caught} of {len(rows)} caught, {WANTED} wanted")
    write_result(arguments.out, {"faults": len(rows), "caught": caught, "met": caught >= WANTED, "rows": rows})


if __name__ == "__main__":
    main()
