"""Processes that qcompile starts take no module from the working directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qcompile.system.python_process import module_command, module_environment

ROOT = Path(__file__).parents[2]
MODULES = (
    *("qcompile.cli.front", "qcompile.cli.replica", "qcompile.report.page"),
    *("qcompile.runtime.cpu.follower", "qcompile.runtime.cuda.follower"),
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with files that have the names of modules."""
    for name in ("json", "struct", "numpy", "typer", "fastapi", "qcompile"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(99)")
    return tmp_path


@pytest.mark.parametrize("module", MODULES)
def test_a_module_runs_without_those_of_the_folder(module: str, hostile: Path) -> None:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    done = subprocess.run(  # type: ignore[call-overload]
        module_command(module), cwd=hostile, env=module_environment(), **pipes, timeout=60, check=False
    )
    assert done.returncode != 99 and b"No module named" not in done.stderr


def test_the_folder_would_be_read_otherwise(hostile: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "qcompile.cli.front"], cwd=hostile, check=False, timeout=60)
    assert done.returncode == 99


def test_the_environment_has_the_path_of_this_process() -> None:
    given = module_environment()
    assert given["PYTHONPATH"].split(os.pathsep) == [place for place in sys.path if place]
    assert {name: value for name, value in given.items() if name != "PYTHONPATH"}.items() <= os.environ.items()


def test_no_other_command_runs_a_module() -> None:
    folders = [ROOT / name for name in ("qcompile", "passes", "codegen", "runtime")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    sources = {path: path.read_text() for path in files}
    commands = {path.name: text for path, text in sources.items() if re.search(r'sys\.executable,\s*"-m"', text)}
    assert len(sources) > 500 and not commands
