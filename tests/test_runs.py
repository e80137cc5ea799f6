"""How the tests are run."""

from __future__ import annotations

import pytest

from tests.support.cases import first


def test_a_worker_that_dies_is_not_replaced(request: pytest.FixtureRequest) -> None:
    """With one file left for each worker, xdist waits for ever for what replaces it."""
    pytest.importorskip("xdist")
    assert request.config.option.maxworkerrestart == 0


def test_the_first_cases_are_always_tried() -> None:
    cases = first(("a", ("b", 1)), ["a", ("b", 1), ("b", 2)])
    assert [case.values for case in cases] == [("a",), ("b", 1), ("b", 2)]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], [], ["exhaustive"]]
