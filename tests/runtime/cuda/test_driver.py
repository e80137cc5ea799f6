"""The driver's calls, over a library that only writes them down."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from qcompile.runtime.cuda import driver as cuda_driver


class FakeLibrary:
    """Every function of libcuda succeeds; its name and last argument are written down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuStreamCreate":
                arguments[0]._obj.value = 77
            self.calls.append((name, getattr(arguments[-1], "value", None)))
            return 0

        return call


def test_memory_is_zeroed_in_the_order_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied to new memory next, on the same stream, must not be zeroed after that."""
    library = FakeLibrary()
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, kind, lambda name: library)
    driver = cuda_driver.Driver()
    driver.allocate(1000, "weights")
    driver.upload(0, 0, 8)
    (zeroed, first), (copied, second) = library.calls[-2:]
    assert zeroed.startswith("cuMemset") and copied.startswith("cuMemcpy")
    assert first == second == driver.stream == 77
