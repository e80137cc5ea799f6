"""The fixture of tests that compile GPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.compiled import RECORDS, Record
from tests.support.interpreted import needs_triton


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> Iterator[Record]:
    """compiled(kernel, capability): facts of the kernel, out of the record where it is unchanged, else compiled now."""
    needs_triton()
    record = Record(RECORDS / f"{request.path.stem}.json", request.node.name)
    failed = request.session.testsfailed
    yield record
    if request.session.testsfailed > failed:
        return  # it may have asked for less than it does
    if request.config.getoption("--update-golden"):
        record.write()
    else:
        record.check()
