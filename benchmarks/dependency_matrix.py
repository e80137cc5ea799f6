"""Build a GPU artifact and run the smoke tests with the oldest, the pinned and the newest dependencies.

    python benchmarks/dependency_matrix.py [--set NAME ...] [--pip-args=ARGS] [--keep DIR] [--json]

For each set this script makes a virtual environment, installs qcompile of this checkout with the set's versions, builds
an artifact of samples/pycode-1m for h100 with the recipe qserve (no GPU is needed), and runs the smoke tests. The sets:

- oldest: the lower bounds of torch, transformers and triton in pyproject.toml
- pinned: constraints.txt
- newest: the newest versions that pyproject.toml permits, of all dependencies

`--pip-args` are further arguments for pip, such as an index with CPU-only torch wheels. A torch wheel for CUDA requires
one version of triton, so only CPU-only wheels leave `newest` the newest triton. An environment takes 2 to 8 GB; it is
deleted unless `--keep` names a folder for it. The exit status is 1 if a step of a set failed.

This script needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SETS = ("oldest", "pinned", "newest")
BOUNDED = ("torch", "transformers", "triton")
"""The dependencies with an upper bound: their interfaces change between minor versions."""
SMOKE_TESTS = ("tests/test_tiny.py", "tests/checkpoints/test_own_models.py", "tests/codegen/gpu/test_gluon.py")
TEST_TOOLS = ("hypothesis", "pytest", "pytest-xdist")
MODEL, RECIPE, TARGET = "samples/pycode-1m", "qserve", "h100"
LIMIT_S = 3600
"""The longest time of a step, in seconds."""
KEPT_OUTPUT = 2000
"""Characters of a failed step's output that are reported."""


@dataclass
class Outcome:
    """The outcome of one set: versions by package; seconds and state by step, "ok" or the end of the output."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no step failed so far."""
        return all(state == "ok" for state in self.states.values())


def requirements(project: Mapping[str, Any]) -> dict[str, str]:
    """The requirement of each bounded dependency, such as "triton>=3.6,<3.10", from the `project` of pyproject.toml."""
    stated = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    by_name = {re.split(r"[^A-Za-z0-9_.-]", each, maxsplit=1)[0]: each for each in stated}
    return {name: by_name[name] for name in BOUNDED}


def lowest(requirement: str) -> str:
    """The requirement of the lower bound alone: "triton>=3.6,<3.10" becomes "triton==3.6.*"."""
    parts = re.match(r"([A-Za-z0-9_.-]+).*>=\s*([0-9.]+)", requirement)
    if parts is None:
        raise ValueError(f"{requirement} has no lower bound")
    return f"{parts[1]}=={parts[2]}.*"


def versions_of(name: str) -> list[str]:
    """The arguments for pip that choose the versions of a set."""
    if name == "pinned":
        return ["-c", str(ROOT / "constraints.txt")]
    if name == "newest":
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [lowest(each) for each in requirements(project).values()]


def steps(name: str, python: str, folder: Path, pip_args: Sequence[str]) -> dict[str, list[str]]:
    """The commands of a set by step, for the environment of `python`; the artifact is written below `folder`."""
    install = ["pip", "install", "--quiet", *pip_args, *versions_of(name), *TEST_TOOLS, "-e", f"{ROOT}[gpu]"]
    build = ["qcompile", "build", MODEL, "-o", str(folder / "artifact"), "--target", TARGET, "--recipe", RECIPE]
    test = ["pytest", "-q", "-n", "2", *SMOKE_TESTS]
    return {step: [python, "-m", *words] for step, words in (("install", install), ("build", build), ("test", test))}


def run_step(outcome: Outcome, step: str, command: Sequence[str], cache: Path) -> None:
    """Run a step in the checkout, unless an earlier step failed, with its own cache; record time and state."""
    if not outcome.passed:
        outcome.states[step] = "not run"
        return
    environment = {**os.environ, "QCOMPILE_CACHE": str(cache)}
    environment.pop("PYTHONPATH", None)  # which could bring in packages that are not of the set
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        output = (done.stdout + done.stderr).strip()[-KEPT_OUTPUT:]
        state = "ok" if done.returncode == 0 else output or f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        state = f"not done after {LIMIT_S} s"
    outcome.seconds[step] = round(time.perf_counter() - start, 1)
    outcome.states[step] = state


def installed_versions(python: str) -> dict[str, str]:
    """The versions of Python and of the bounded dependencies in the environment of `python`."""
    code = (
        "import json, platform, sys; from importlib.metadata import version;"
        "print(json.dumps({'python': platform.python_version(), **{n: version(n) for n in sys.argv[1:]}}))"
    )
    done = subprocess.run([python, "-c", code, *BOUNDED], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def try_set(name: str, folder: Path, pip_args: Sequence[str]) -> Outcome:
    """Install, build and test one set in a new environment below `folder`."""
    outcome = Outcome(name)
    venv.create(folder / "venv", with_pip=True, clear=True)
    python = str(folder / "venv" / "bin" / "python")
    for step, command in steps(name, python, folder, pip_args).items():
        run_step(outcome, step, command, folder / "cache")
        if step == "install" and outcome.passed:
            outcome.versions = installed_versions(python)
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table in Markdown, followed by the output of the steps that failed."""
    names = list(dict.fromkeys(step for outcome in outcomes for step in outcome.states))
    columns = ["set", "python", *BOUNDED, *names]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for outcome in outcomes:
        versions = [outcome.versions.get(package, "") for package in ("python", *BOUNDED)]
        lines.append("| " + " | ".join([outcome.name, *versions, *(_cell(outcome, step) for step in names)]) + " |")
    for outcome in outcomes:
        for step in outcome.seconds:
            if outcome.states[step] != "ok":
                lines += ["", f"{outcome.name}, {step}:", outcome.states[step]]
    return "\n".join(lines)


def _cell(outcome: Outcome, step: str) -> str:
    if step not in outcome.seconds:
        return "not run"
    return f"{'ok' if outcome.states[step] == 'ok' else 'FAILED'}, {outcome.seconds[step]:.0f} s"


def main() -> None:
    """Try the sets that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, action="append", dest="sets", help="a set; all if not given")
    parser.add_argument("--pip-args", default="", help="further arguments for pip install, as one word")
    parser.add_argument("--keep", type=Path, help="keep the environments in this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    outcomes = []
    for name in arguments.sets or SETS:
        print(f"{name} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="qcompile-") as temporary:
            folder = (arguments.keep or Path(temporary)) / name
            outcomes.append(try_set(name, folder.resolve(), shlex.split(arguments.pip_args)))
    print(json.dumps([asdict(each) for each in outcomes], indent=1) if arguments.json else table(outcomes))
    sys.exit(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    main()
