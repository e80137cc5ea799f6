"""Some of the damaged files of benchmarks/hostile.py, which does many."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import hostile

TRACES = pytest.param("trace", 4, marks=pytest.mark.exhaustive)
"""Each takes as long as an import of a model."""


@pytest.mark.parametrize(
    "kind, count",
    [("header", 400), ("configuration", 60), ("tokenizer", 60), ("manifest", 60), ("gguf", 60), TRACES],
)
def test_damaged_files_are_refused_or_read(
    kind: str, count: int, tiny_artifact: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))
    if kind == "manifest":
        shutil.copytree(tiny_artifact("w4a8"), tmp_path, dirs_exist_ok=True)
    if kind in hostile.MADE:
        hostile.warm_up(tmp_path)
    verdicts = [hostile.examine(kind, seed, tmp_path) for seed in range(count)]
    assert not [(seed, verdict.wrong) for seed, verdict in enumerate(verdicts) if verdict.wrong]
    assert kind == "trace" or {verdict.code == 0 for verdict in verdicts} == {True, False}  # some damage matters
