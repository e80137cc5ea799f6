"""Build a GPU artifact and run the smoke tests with the oldest, the pinned and the newest dependencies.

    python benchmarks/dependency_matrix.py [--set NAME ...] [--pip-args ARGS] [--keep DIR] [--json FILE]

For each set this script makes a virtual environment, installs qcompile of this checkout with the set's versions, builds
an artifact of samples/pycode-1m for h100 with the recipe qserve (no GPU is needed), and runs the smoke tests. The sets:

- oldest: the lower bounds of torch, transformers and triton in pyproject.toml
- pinned: constraints.txt
- newest: the newest versions that pyproject.toml permits, of all dependencies

`--pip-args` are further arguments for pip, such as an index with CPU-only torch wheels. An environment takes 2 to 8 GB;
it is deleted unless `--keep` names a folder for it. The exit status is 1 if a step of a set failed.
"""

from __future__ import annotations

import argparse
import json
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

ROOT = Path(__file__).resolve().parents[1]
SETS = ("oldest", "pinned", "newest")
BOUNDED = ("torch", "transformers", "triton")
"""The dependencies with an upper bound: their interfaces change between minor versions."""
SMOKE_TESTS = ("tests/test_tiny.py", "tests/checkpoints/test_own_models.py", "tests/codegen/gpu/test_gluon.py")
TEST_TOOLS = ("hypothesis", "pytest", "pytest-xdist")
MODEL, RECIPE, TARGET = "samples/pycode-1m", "qserve", "h100"
LIMIT_S = 3600
"""The longest time of a step, in seconds."""


@dataclass
class Outcome:
    """What became of one set: versions by package, seconds and state ("ok" or the end of the output) by step."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all steps succeeded."""
        return all(state == "ok" for state in self.states.values())


def requirements(project: Mapping[str, object]) -> dict[str, str]:
    """The requirement of each bounded dependency, such as "triton>=3.6,<3.10", from the `project` of pyproject.toml."""
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *extras["gpu"]]  # type: ignore[misc, index]
    names = {re.split(r"[^A-Za-z0-9_.-]", each, maxsplit=1)[0]: each for each in stated}
    return {name: names[name] for name in BOUNDED}


def lowest(requirement: str) -> str:
    """The requirement of the lower bound alone: "triton>=3.6,<3.10" becomes "triton==3.6.*"."""
    bound = re.search(r">=\s*([0-9.]+)", requirement)
    if bound is None:
        raise ValueError(f"{requirement} has no lower bound")
    name = re.split(r"[<>=!~;\s]", requirement, maxsplit=1)[0]
    return f"{name}=={bound[1]}.*"


def pip_arguments(name: str) -> list[str]:
    """What pip installs for a set, but for qcompile itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    constraints = ["-c", str(ROOT / "constraints.txt")] if name == "pinned" else ["--upgrade"]
    bounds = [lowest(each) for each in requirements(project).values()] if name == "oldest" else []
    return [*constraints, *bounds, *TEST_TOOLS]


def run_step(outcome: Outcome, step: str, command: Sequence[str]) -> None:
    """Run one step of a set in the checkout, unless an earlier step failed; record time and state."""
    if not outcome.passed:
        outcome.states[step] = "not run"
        return
    start = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        state = "ok" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-2000:] or "failed"
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
    """Install, build and test one set in a new environment in `folder`."""
    outcome = Outcome(name)
    venv.create(folder / "venv", with_pip=True, clear=True)
    python = str(folder / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", *pip_args, *pip_arguments(name), "-e", f"{ROOT}[gpu,serve]"]
    run_step(outcome, "install", install)
    if outcome.passed:
        outcome.versions = installed_versions(python)
    build = [python, "-m", "qcompile", "build", MODEL, "-o", str(folder / "artifact")]
    run_step(outcome, "build", [*build, "--target", TARGET, "--recipe", RECIPE])
    run_step(outcome, "test", [python, "-m", "pytest", "-q", "-n", "2", *SMOKE_TESTS])
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table in Markdown, and below it what failed."""
    steps = list(dict.fromkeys(step for outcome in outcomes for step in outcome.states))
    columns = ["set", "python", *BOUNDED, *steps]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for outcome in outcomes:
        versions = [outcome.versions.get(package, "") for package in ("python", *BOUNDED)]
        cells = [_cell(outcome, step) for step in steps]
        lines.append("| " + " | ".join([outcome.name, *versions, *cells]) + " |")
    for outcome in outcomes:
        for step, state in outcome.states.items():
            if state not in ("ok", "not run"):
                lines += ["", f"{outcome.name}, {step}:", state]
    return "\n".join(lines)


def _cell(outcome: Outcome, step: str) -> str:
    state = outcome.states.get(step, "not run")
    if state == "not run":
        return state
    return f"{'ok' if state == 'ok' else 'FAILED'}, {outcome.seconds[step]:.0f} s"


def main() -> None:
    """Try the sets that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, action="append", dest="sets", help="a set; all if not given")
    parser.add_argument("--pip-args", default="", help="further arguments for pip install, as one word")
    parser.add_argument("--keep", type=Path, help="keep the environments in this folder")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    arguments = parser.parse_args()
    outcomes = []
    for name in arguments.sets or SETS:
        print(f"{name} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="qcompile-") as temporary:
            folder = (arguments.keep or Path(temporary)) / name
            outcomes.append(try_set(name, folder, shlex.split(arguments.pip_args)))
    print(table(outcomes))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    main()
