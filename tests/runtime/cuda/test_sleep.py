"""Sleep of a model on a GPU, over a driver with the host's memory in which addresses outlive their content."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from qcompile.artifact.layout import ADAPTER_TABLE
from qcompile.errors import ArtifactError, ResourceError, UnsupportedError
from qcompile.runtime.cuda import launching, load
from qcompile.runtime.cuda import sleep as cuda_sleep
from qcompile.runtime.cuda.launching import GRAPH_FROM
from qcompile.runtime.devices import OpenedModel, open_model
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.sleep import Sleep
from qcompile.runtime.options import LoadOptions
from qcompile.runtime.step import Rows
from tests.runtime.cuda.test_adapters import artifact
from tests.support.fake import listed
from tests.support.fake_driver import FakeDriver, FakeLaunch

LOST = 0xEE


class Held(dict[int, int]):
    """The sizes of what is allocated, and as a call, bytes free and in all."""

    free = 2 << 30

    def __call__(self) -> tuple[int, int]:
        return self.free, 4 << 30


class Device(FakeDriver):
    """One that loads kernels, with content in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Any = Held()
        self.contents: dict[int, Any] = {}
        self.released: set[int] = set()

    def allocate(self, size: int, what: str) -> int:
        content = (ctypes.c_ubyte * size)()
        address = ctypes.addressof(content)
        self.memory[address], self.contents[address] = size, content
        return address

    def upload(self, to: int, source: int, size: int, pinned: bool = True) -> None:
        self._check(to)
        ctypes.memmove(to, source, size)

    def download(self, to: int, source: int, size: int, pinned: bool = True) -> None:
        self._check(source)
        ctypes.memmove(to, source, size)

    def _check(self, address: int) -> None:
        """Fail for an address without memory, as a GPU does."""
        assert not any(start <= address < start + self.memory[start] for start in self.released)

    def release(self, address: int) -> None:
        self.released.add(address)
        ctypes.memset(address, LOST, self.memory[address])

    def take_again(self, address: int, what: str) -> None:
        if address in self.released:
            self.released.remove(address)
            ctypes.memset(address, 0, self.memory[address])

    def lacking(self, addresses: Iterable[int]) -> int:
        return sum(self.memory[address] for address in addresses if address in self.released)

    def module(self, cubin: bytes, *_: object) -> str:
        return "module"

    def function(self, module: str, name: str, shared: int) -> str:
        return name


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(load, "driver", lambda: device)
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    return device


def opened(root: Path) -> tuple[OpenedModel, Sleep]:
    """A model with recognizable weights and cache."""
    model = open_model(root, artifact(root), LoadOptions(max_batch=2))
    executor: Any = model.executor
    for place, address in ((3, executor.launcher._weights[ADAPTER_TABLE]), (5, executor.memory.cache)):
        ctypes.memset(address, place, 64)
    sleep = Sleep(BlockPool(4, 64))
    sleep.memory = model.memory
    return model, sleep


@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_cache_are_given_back_and_weights_come_again(tmp_path: Path, device: Device, level: int) -> None:
    """At the same addresses, with what loading has written over them; graphs stay. Level 1 needs no files."""
    model, sleep = opened(tmp_path / "model")
    executor: Any = model.executor
    cache, weight = executor.memory.cache, executor.launcher._weights["w"]
    for _ in range(2):
        executor.decode([Rows([1], 5, [2], 1)], GRAPH_FROM)
    before = bytes(device.contents[weight])
    sleep.begin(level)
    assert device.released == {weight, cache} and device.contents[weight][0] == LOST
    if level == 1:
        (tmp_path / "model" / "weights").unlink()
    sleep.end()
    assert not device.released and bytes(device.contents[weight]) == before
    assert before[64:130] == b"\3" * 64 + b"\0\0"
    assert not any(device.contents[cache])
    device.log.clear()
    executor.decode([Rows([1], 5, [2], 1)], 1)
    assert device.log == ["replay"]
    sleep.begin(level)
    executor.close()
    assert device.memory == {}


def test_what_cannot_wake_sleeps_on(tmp_path: Path, device: Device) -> None:
    root = tmp_path / "model"
    model, sleep = opened(root)
    executor: Any = model.executor
    both = {executor.memory.cache, executor.launcher._weights["w"]}
    content = (root / "weights").read_bytes()
    sleep.begin(2)
    (root / "weights").write_bytes(content[:-1] + b"x")
    with pytest.raises(ArtifactError, match=r"has changed since the model was loaded: weights: SHA-256 differs"):
        sleep.end()
    assert sleep.asleep and device.released == both
    device.memory.free = 4096
    with pytest.raises(ResourceError, match=r"waking takes [\d,]+ bytes of GPU memory, which has 4,096 left"):
        sleep.end()
    assert sleep.asleep and device.released == both
    device.memory.free = 1 << 30
    (root / "weights").write_bytes(content)
    sleep.end()
    assert not sleep.asleep and not device.released


def test_a_copy_without_room_in_the_host_leaves_the_model_awake(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sleep = opened(tmp_path / "model")
    monkeypatch.setattr(cuda_sleep, "available_memory", lambda: 4095)
    with pytest.raises(ResourceError, match=r"copy of the weights takes 4,096 bytes of the host's memory.*level 2"):
        sleep.begin(1)
    assert not sleep.asleep and not device.released
    sleep.begin(2)
    assert sleep.asleep and device.released


def test_a_driver_without_virtual_memory_refuses_sleep(tmp_path: Path, device: Device) -> None:
    device.can_release = False
    _, sleep = opened(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="cannot sleep: this GPU's driver cannot give memory back and keep"):
        sleep.begin(1)


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_gives_its_part_back_and_takes_it_again(
    tmp_path: Path, device: Device, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, as a rank is asked that could not wake. Level 2 verifies the whole file."""
    monkeypatch.setattr(load, "driver", lambda *_: device)
    root = tmp_path / "model"
    manifest = artifact(root)
    content = bytes(range(256)) * 16
    (root / "weights").write_bytes(content)
    manifest["files"] = listed(root)
    weights = manifest["runtime"]["weights"]
    weights.append({"name": "v", "file": "weights", "offset": 1024, "bytes": 100})
    manifest["runtime"]["ranks"] = [[0, 1], [2, 1]]
    rank = load.load_rank(root, manifest, 1, False)
    [executor] = rank.open(pages=4, rows=8, slots=2, copies=0)
    own, table = rank.uploaded.by_name["w"], rank.uploaded.by_name[ADAPTER_TABLE]
    [place] = rank.uploaded.files.values()
    assert own == place and table == place + 256 and rank.uploaded.size("weights") == 256 + 64
    ctypes.memset(table, 3, 64)
    memory: Any = rank.memory(root, manifest, executor)
    memory.restore()  # it is there
    for _ in range(2):
        memory.release(level)
    assert device.released == {place, executor.memory.cache}
    if level == 1:
        (root / "weights").unlink()
    else:
        (root / "weights").write_bytes(content[:-1] + b"x")
        with pytest.raises(ArtifactError, match="has changed since the model was loaded"):
            memory.restore()
        memory.release(2)
        assert device.released == {place, executor.memory.cache}
        (root / "weights").write_bytes(content)
    memory.restore()
    assert not device.released
    assert ctypes.string_at(own, 100) == content[1024:1124] and ctypes.string_at(table, 64) == b"\3" * 64
    executor.close()
    assert device.memory == {}
