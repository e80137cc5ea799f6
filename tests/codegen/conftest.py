"""Fixtures of the kernel tests."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from functools import cache

import pytest

from qcompile.targets import cpu_flags
from tests.conftest import MadeOnce
from tests.support.harness import ISAS, compile_harness, open_harness


@pytest.fixture(scope="session")
def harness(made_once: MadeOnce) -> Callable[[str], ctypes.CDLL]:
    """Compiles the harness for an instruction set; skips where compiler or CPU lack it."""

    @cache
    def build(isa: str) -> ctypes.CDLL:
        needs = ISAS[isa][1]
        if shutil.which("g++") is None:
            pytest.skip("g++ is not on the PATH")
        if not needs <= cpu_flags():
            pytest.skip(f"this CPU lacks {sorted(needs - cpu_flags())}")
        return open_harness(made_once(f"gemm-{isa}.so", lambda library: compile_harness(isa, library)))

    return build
