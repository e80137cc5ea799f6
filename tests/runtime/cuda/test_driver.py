"""The driver's calls, over a library that only writes them down."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from qcompile.errors import ResourceError
from qcompile.runtime.cuda import driver as cuda_driver


class FakeLibrary:
    """Every function of libcuda succeeds, unless `codes` has another code for it; its name and last argument are
    written down. Functions that make something return its number in `made`."""

    def __init__(self) -> None:
        self.made = {"cuStreamCreate": 77, "cuMemAddressReserve": 1 << 30, "cuMemCreate": 5, "cuDeviceGetAttribute": 1}
        self.made["cuMemGetAllocationGranularity"] = 4096
        self.calls: list[tuple[str, Any]] = []
        self.codes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self.made:
                arguments[0]._obj.value = self.made[name]
            self.calls.append((name, getattr(arguments[-1], "value", None)))
            return self.codes.get(name, 0)

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    library = FakeLibrary()
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, kind, lambda name: library)
    return library


def test_memory_is_zeroed_in_the_order_of_the_stream(library: FakeLibrary) -> None:
    """What is copied to new memory next, on the same stream, must not be zeroed after that."""
    driver = cuda_driver.Driver()
    driver.allocate(1000, "weights")
    driver.upload(0, 0, 8)
    (zeroed, first), (copied, second) = library.calls[-2:]
    assert zeroed.startswith("cuMemset") and copied.startswith("cuMemcpy")
    assert first == second == driver.stream == 77


def test_memory_that_is_given_back_keeps_its_address(library: FakeLibrary) -> None:
    driver = cuda_driver.Driver()

    def called() -> list[str]:
        names = [name.removeprefix("cuMem") for name, _ in library.calls]
        library.calls.clear()
        return names

    mapping = ["Create", "Map", "Release", "SetAccess", "setD8Async"]
    called()
    address = driver.allocate_releasable(5000, "weights")
    assert address == 1 << 30 and called()[-6:] == ["AddressReserve", *mapping]
    driver.take_again(address, "waking")
    assert called() == [] and driver.lacking([address]) == 0
    driver.release(address)
    driver.release(address)
    assert called() == ["Unmap"] and driver.lacking([address]) == 8192
    driver.take_again(address, "waking")
    assert called() == mapping
    driver.free(address)
    assert called() == ["cuStreamSynchronize", "Unmap", "AddressFree"]
    driver.free(address)
    assert called() == ["Free_v2"]


@pytest.mark.parametrize("short_of", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_taken_leaves_no_addresses(library: FakeLibrary, short_of: str) -> None:
    driver = cuda_driver.Driver()
    library.codes[short_of] = 2
    with pytest.raises(ResourceError, match="the GPU has no memory left for weights"):
        driver.allocate_releasable(5000, "weights")
    names = [name.removeprefix("cuMem") for name, _ in library.calls]
    assert names[-1] == "AddressFree"
    assert names.count("Release") == (short_of != "cuMemCreate") and names.count("Unmap") == names.count("SetAccess")


def test_a_gpu_without_virtual_memory_allocates_as_ever(library: FakeLibrary) -> None:
    driver = cuda_driver.Driver()
    library.made["cuDeviceGetAttribute"] = 0
    assert not driver.can_release
    driver.allocate_releasable(5000, "weights")
    assert [name for name, _ in library.calls[-2:]] == ["cuMemAlloc_v2", "cuMemsetD8Async"]
