"""Products of parameters, of which `make test` tries some and `make test-all` all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def first(chosen: Container[Any], every: Iterable[Any]) -> list[Any]:
    """The cases of `every`, values or tuples of values; those that are not `chosen` are marked `exhaustive`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.exhaustive
        )
        for case in every
    ]
