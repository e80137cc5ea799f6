"""benchmarks/dependency_matrix.py reads bounds from pyproject.toml, stops a set at a failure, and reports it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.dependency_matrix import BOUNDED, ROOT, Outcome, lowest, requirements, run_step, steps, table


def test_bounded_dependencies_have_both_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = requirements(project)
    assert tuple(stated) == BOUNDED
    for requirement in stated.values():
        assert ">=" in requirement and "<" in requirement
    tools = [each.partition(";")[0] for each in project["optional-dependencies"]["dev"]]
    assert stated["triton"] in tools


def test_the_oldest_versions_are_those_of_the_lower_bounds() -> None:
    assert lowest("triton>=3.6,<3.10") == "triton==3.6.*"
    assert lowest("torch<2.14, >=2.11") == "torch==2.11.*"
    with pytest.raises(ValueError, match="typer has no lower bound"):
        lowest("typer")


def test_a_set_chooses_versions(tmp_path: Path) -> None:
    oldest, pinned, newest = (
        steps(name, "python", tmp_path, ["--no-cache-dir"])["install"] for name in ("oldest", "pinned", "newest")
    )
    assert [word.partition("==")[0] for word in oldest if word.endswith(".*")] == list(BOUNDED)
    assert pinned[pinned.index("-c") + 1] == str(ROOT / "constraints.txt")
    assert not {"-c", "triton==3.6.*"} & set(newest) and "--no-cache-dir" in newest


def test_steps_after_a_failure_are_not_run(tmp_path: Path) -> None:
    outcome = Outcome("oldest", {"python": "3.11.7", "torch": "2.11.0"})
    run_step(outcome, "install", [sys.executable, "-c", ""], tmp_path)
    assert outcome.passed
    run_step(outcome, "build", [sys.executable, "-c", "import sys; sys.exit('no such name')"], tmp_path)
    run_step(outcome, "test", [sys.executable, "-c", ""], tmp_path)
    assert not outcome.passed and outcome.states == {"install": "ok", "build": "no such name", "test": "not run"}
    text = table([outcome])
    assert "| oldest | 3.11.7 | 2.11.0 |  |  | ok, 0 s | FAILED, 0 s | not run |" in text
    assert text.endswith("oldest, build:\nno such name")
