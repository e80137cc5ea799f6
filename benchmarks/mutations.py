"""Seeded mistakes: does the test suite notice when the code is wrong?

    python benchmarks/mutations.py [--only TEXT] [--new] [--jobs 2] [--seconds 500] [--out FILE]

Each mutation is one deliberate fault, a small change of source text, put into a copy of the tree; then the tests that
ought to notice are run there. Before that they are run on the unchanged copy: if they do not pass there, their
mutations are not examined. The mutations that took longest before come first, so that all jobs end at about the same
time. FILE is written after each mutation; rows of mutations that are not examined again stay. Exits with 1 if a
mutation was not caught, or if tests do not pass on the unchanged tree.
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
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, write_result
from benchmarks.mutation_list import MUTATIONS, Mutation
from benchmarks.mutation_list_gpu import GPU_MUTATIONS

ROOT = Path(__file__).parents[1]
Result = TypeVar("Result")
ALL = (*MUTATIONS, *GPU_MUTATIONS)
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
    command += ["-m", "exhaustive or not exhaustive"]  # which may be the only ones that notice
    command.append("--update-golden")  # that something changed is no reason why it is wrong
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
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


def examine(mutation: Mutation, folder: Path) -> dict[str, Any]:
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


class Copies:
    """Copies of the tree that threads share. Gives None instead of work that would begin after `seconds`."""

    def __init__(self, folder: Path, count: int, seconds: float) -> None:
        self._free: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            self._free.put(tree(folder / str(number)))
        self._deadline = time.monotonic() + seconds

    def run(self, work: Callable[[Path], Result]) -> Result | None:
        """What `work` gives in the next copy that is free."""
        copy = self._free.get()
        try:
            return work(copy) if time.monotonic() < self._deadline else None
        finally:
            self._free.put(copy)


class Table:
    """The file of results: a row for each mutation, those of earlier runs included."""

    def __init__(self, path: Path) -> None:
        self._path, self._writing = path, threading.Lock()
        faults = {mutation.fault for mutation in ALL}
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["fault"]: row for row in rows if row["fault"] in faults}

    def add(self, row: dict[str, Any]) -> None:
        """Add or replace a row, and write the file."""
        with self._writing:
            self.rows[row["fault"]] = row
            rows = [self.rows[mutation.fault] for mutation in ALL if mutation.fault in self.rows]
            caught = sum(bool(row["caught"]) for row in rows)
            write_result(self._path, {"faults": len(ALL), "examined": len(rows), "caught": caught, "rows": rows})


def unfit_tests(copies: Copies, pool: ThreadPoolExecutor, mutations: Sequence[Mutation]) -> set[str]:
    """The tests of these mutations that do not pass on the unchanged tree."""
    every = list(dict.fromkeys(mutation.tests for mutation in mutations))
    results = pool.map(lambda tests: copies.run(lambda copy: run_tests(copy, tests)), every)
    unfit = {tests: result[1] for tests, result in zip(every, results, strict=True) if result and not result[0]}
    for tests, failed in unfit.items():
        print(f"{tests} does not pass on the unchanged tree: {failed}", flush=True)
    return set(unfit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with TEXT in their name or file")
    parser.add_argument("--new", action="store_true", help="faults that FILE has no row of")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="copies of the tree at work")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no tests after this time")
    parser.add_argument("--out", type=Path, default=RESULTS / "mutations.json")
    arguments = parser.parse_args()
    table = Table(arguments.out)
    chosen = [m for m in ALL if arguments.only in m.fault or arguments.only in m.file]
    chosen = [m for m in chosen if not (arguments.new and m.fault in table.rows)]
    chosen.sort(key=lambda mutation: -table.rows.get(mutation.fault, {"seconds": LIMIT})["seconds"])

    def examined(mutation: Mutation) -> dict[str, Any] | None:
        row = copies.run(lambda copy: examine(mutation, copy))
        if row:
            table.add(row)
        return row

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies = Copies(Path(folder), arguments.jobs, arguments.seconds)
        unfit = unfit_tests(copies, pool, chosen)
        rows = list(filter(None, pool.map(examined, [m for m in chosen if m.tests not in unfit])))
    caught = sum(bool(row["caught"]) for row in rows)
    print(f"{caught} of {len(rows)} caught; {len(chosen) - len(rows)} of {len(chosen)} not examined")
    sys.exit(1 if unfit or caught < len(rows) else 0)


if __name__ == "__main__":
    main()
