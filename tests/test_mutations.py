"""The seeded mistakes of benchmarks/mutations.py still fit the code: each replaces a text that occurs once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mutations
from benchmarks.mutation_list import MUTATIONS, Mutation
from benchmarks.mutation_list_gpu import GPU_MUTATIONS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutation", [*MUTATIONS, *GPU_MUTATIONS], ids=lambda mutation: mutation.fault)
def test_a_mutation_applies(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1 and mutation.new != mutation.old
    assert all((ROOT / part).exists() for part in mutation.tests.split() if part.startswith("tests/"))


def test_exhaustive_tests_are_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be the only ones that notice a fault."""
    run: list[list[str]] = []

    def record(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        run.append(command)
        return subprocess.CompletedProcess(command, 1, "FAILED test_two")

    monkeypatch.setattr(subprocess, "run", record)
    assert mutations.run_tests(tmp_path, "tests/test_one.py -k two") == (False, "FAILED test_two")
    assert run[0][run[0].index("-m", 2) + 1] == "exhaustive or not exhaustive"
