"""The first seeds of the graph fuzzer; benchmarks/fuzz.py runs 500."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import first
from tests.support.fuzzing import examine


@pytest.mark.parametrize("seed", first(range(2), range(10)))
def test_random_decoder(seed: int, tmp_path: Path) -> None:
    result = examine(seed, tmp_path / "out")
    assert result.verdict != "wrong", result
