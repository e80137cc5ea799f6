"""The list of cases that `make test` leaves to `make test-all`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import SLOW_CASES

ROOT = Path(__file__).parents[1]


def test_each_slow_case_is_of_a_test_that_exists() -> None:
    """A case that was renamed would else be run by `make test` again."""
    lines = [line for line in SLOW_CASES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines)) and len(lines) > 100
    for line in lines:
        file, _, case = line.partition("::")
        name = case.partition("[")[0]
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), line
