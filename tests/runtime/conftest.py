"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import fake


@pytest.fixture(scope="module", params=(fake.Executor, fake.LateExecutor), ids=("waiting", "overlapping"))
def executors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests twice: with executors that the engine waits for, and with those that run a step while it
    handles the one before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "Chosen", request.param)
        yield
