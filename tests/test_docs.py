"""The pass that docs/writing_a_pass.md teaches is run as it stands there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from qcompile.cli.inspect import passes

PAGE = Path(__file__).parents[1] / "docs" / "writing_a_pass.md"
BLOCK = re.compile(r"^```python\n# (?P<path>\S+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
TAUGHT = "qcompile.passes.fold_scales"


@pytest.fixture
def taught() -> Iterator[dict[str, str]]:
    """Code of the page by path; its pass can be imported while a test runs."""
    code = {result["path"]: result["code"] for result in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}
    module = ModuleType(TAUGHT)
    sys.modules[TAUGHT] = sys.modules[TAUGHT.rpartition(".")[2]] = module  # in qcompile, and beside the script
    exec(compile(code["passes/fold_scales.py"], str(PAGE), "exec"), module.__dict__)
    yield code
    del sys.modules[TAUGHT], sys.modules[TAUGHT.rpartition(".")[2]]


def test_the_page_is_complete(taught: dict[str, str]) -> None:
    assert list(taught) == ["passes/fold_scales.py", "tests/passes/test_fold_scales.py", "try_fold_scales.py"]
    assert 35 <= len(taught["passes/fold_scales.py"].splitlines()) <= 60


def test_the_pass_can_be_tried(
    taught: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").symlink_to(PAGE.parents[1] / "samples")
    monkeypatch.chdir(tmp_path)
    exec(compile(taught["try_fold_scales.py"], str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines()[1:4] == ["  43", "fold_scales", "  0"]
    entry = next(entry for entry in passes(tmp_path / "out" / "tried") if entry["name"] == "fold_scales")
    assert entry["fired"] == 0 and entry["options"] == {"enabled": True}


def test_the_tests_of_the_page_pass(taught: dict[str, str]) -> None:
    space: dict[str, object] = {}
    exec(compile(taught["tests/passes/test_fold_scales.py"], str(PAGE), "exec"), space)
    tests = [value for name, value in space.items() if name.startswith("test_") and callable(value)]
    assert len(tests) == 4
    for test in tests:
        test()
