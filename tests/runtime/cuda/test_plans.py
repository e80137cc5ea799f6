"""The plan that rank 0 of a model on several GPUs writes, and how the others repeat it, without GPUs."""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import re
import subprocess
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.errors import ArtifactError, ResourceError
from qcompile.runtime.cuda import follower, ranks
from qcompile.runtime.cuda.follower import follow
from qcompile.runtime.cuda.plans import PlanKind, PlanWriter, SharedPlan
from qcompile.runtime.cuda.ranks import CudaRanks, check_gpus
from qcompile.runtime.cuda.weights import FilePart, upload_rank
from qcompile.runtime.ranks import processes, watching
from qcompile.runtime.ranks.failure import RankFailure
from qcompile.runtime.ranks.processes import SpawnedProcess, ending_of


@pytest.fixture
def memory() -> Any:
    result = SharedPlan(1024)
    yield result
    result.close()


def test_records_are_read_once_in_order_and_the_ring_begins_again(memory: SharedPlan) -> None:
    reader = SharedPlan(1024, os.dup(memory.descriptor))
    seen, written = [], []
    for number in range(200):
        content = bytes([number]) * (number % 97)
        memory.write(1, number % 2, PlanKind.INPUTS, number, -number, [memoryview(content), b"end"])
        written.append((number % 2, PlanKind.INPUTS, number, -number, content + b"end"))
        if number % 3 == 2:
            seen += [(*one[:4], bytes(one.content)) for one in reader.records(1)]
    seen += [(*one[:4], bytes(one.content)) for one in reader.records(1)]
    assert seen == written and not list(reader.records(1))
    reader.close()


def test_a_writer_waits_for_the_slowest_reader_unless_a_rank_has_failed(memory: SharedPlan) -> None:
    for _ in range(3):
        memory.write(2, 0, PlanKind.INPUTS, 0, 0, [b"x" * 240])
    list(memory.records(1))
    late = threading.Thread(target=memory.write, args=(2, 0, PlanKind.END, 0, 0, [b"x" * 400]))
    late.start()
    late.join(0.1)
    assert late.is_alive()
    assert len(list(memory.records(2))) == 3
    late.join(5)
    assert not late.is_alive()
    late = threading.Thread(target=memory.write, args=(2, 0, PlanKind.END, 0, 0, [b"x" * 480]))
    late.start()
    memory.fail()
    late.join(5)
    assert not late.is_alive() and memory.failed
    with pytest.raises(ResourceError, match="more than half of the 1,024 bytes"):
        memory.write(2, 0, PlanKind.INPUTS, 0, 0, [b"x" * 600])


def test_a_rank_has_settled_when_it_has_done_all(memory: SharedPlan) -> None:
    assert memory.settled(1)
    memory.write(1, 0, PlanKind.COUNTER, 0, 0, [])
    reading = memory.records(1)
    next(reading)
    assert not memory.settled(1)
    assert not list(reading) and memory.settled(1)


def test_a_rank_answers_what_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of its input, which is that of rank 0's process."""
    asked, words = list[Any](), list[Any]()
    rank: Any = SimpleNamespace(obey=lambda what: asked.append(what) or {"done": True})
    word: Any = SimpleNamespace(set=lambda: words.append("failed"))
    monkeypatch.setattr(follower.sys, "stdin", io.StringIO('{"memory": "sleep", "level": 2}\n'))
    monkeypatch.setattr(follower, "_say", lambda **what: words.append(what))
    monkeypatch.setattr(follower, "_PATIENCE", 0)
    monkeypatch.setattr(follower.os, "_exit", lambda code: words.append(code))
    follower._watch(word, rank)
    assert asked == [{"memory": "sleep", "level": 2}] and words == [{"done": True}, "failed", 1]


def test_a_rank_says_that_it_runs(memory: SharedPlan) -> None:
    before = memory.beats(3)
    memory.beat(3)
    assert memory.beats(3) == before + 1 and memory.beats(2) == 0


class Process:
    """A process that ends with `status` once it is looked at for the last time."""

    rank, name, remedy = 1, "rank 1 (process 7)", "load the model again"

    def __init__(self, status: int | None, looks: int = 0) -> None:
        self.status, self.looks, self.killed = status, looks, False

    def ending(self) -> str | None:
        self.looks -= 1
        return ending_of(-9 if self.killed else self.status if self.looks < 0 else None)

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("process", "beats", "problem"),
    [
        (Process(-9), True, "rank 1 (process 7) was ended by signal 9"),
        (Process(3, 4), True, "rank 1 (process 7) ended with status 3"),
        (Process(None), False, "rank 1 (process 7) does not respond"),
        (Process(0, 300), True, "rank 1 (process 7) ended with status 0"),
    ],
)
def test_a_rank_that_ends_or_does_not_run_is_noticed(
    memory: SharedPlan, process: Process, beats: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []
    result = object.__new__(CudaRanks)
    result._memory, result._closing, result.failure = memory, False, RankFailure()
    result.failed = SimpleNamespace(set=lambda: words.append("set"))  # type: ignore[assignment]
    looks = iter(range(1000))

    def sleep(seconds: float) -> None:
        if beats and next(looks) % 5 == 0:  # it beats five times as seldom as it is looked at
            memory.beat(1)

    monkeypatch.setattr(watching.time, "sleep", sleep)
    result._watch(process)  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match=re.escape(problem)):
        result.check()
    assert memory.failed and words == ["set"] and process.killed == (not beats)


def test_gpus_that_cannot_be_used_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(count: int, unreached: tuple[int, int] | None = None) -> Any:
        return SimpleNamespace(gpus=count, reaches=lambda *pair: pair != unreached)

    place = Path("out")
    check_gpus(gpus(3), 2, place)
    with pytest.raises(ResourceError, match="out was built for 2 GPUs, one GPU is visible"):
        check_gpus(gpus(1), 2, place)
    with pytest.raises(ResourceError, match="GPU 2 cannot write to the memory of GPU 1"):
        check_gpus(gpus(3, (2, 1)), 3, place)
    check_gpus(gpus(3, (2, 1)), 2, place)
    monkeypatch.setattr(ranks.platform, "machine", lambda: "aarch64")
    with pytest.raises(ResourceError, match="aarch64 cores runs one GPU"):
        check_gpus(gpus(3), 2, place)


def test_a_rank_that_hangs_while_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = partial(subprocess.Popen, ["sleep", "60"])
    monkeypatch.setattr(
        processes, "popen", lambda follower, descriptors, given, said, more: sleeping(stdin=given, stdout=said)
    )
    process = SpawnedProcess(2, "cuda", [])
    with pytest.raises(ResourceError, match=rf"rank 2 \(process {process.pid}\) did not answer for 0 s while"):
        process.answer(0.05)
    process.finish(0.05)  # it does not end by itself
    assert process.ending() == "was ended by signal 9"


class Memory:
    """A GPU with the host's memory in place of its own."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def allocate(self, size: int, what: str) -> int:
        self.parts.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self.parts[-1])

    allocate_releasable = allocate

    def upload(self, to: int, source: int, size: int, pinned: bool) -> None:
        ctypes.memmove(to, source, size)

    def synchronize(self) -> None: ...


def test_ranks_share_the_verification_of_weights(tmp_path: Path) -> None:
    contents = {name: os.urandom(64) for name in ("a", "b", "c")}
    files = {}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        files[name] = {"bytes": 64, "sha256": hashlib.sha256(content).hexdigest()}
    entries = [
        {"name": f"{name}{part}", "file": name, "offset": 32 * part, "bytes": 32} for name in "abc" for part in (0, 1)
    ]
    manifest: Any = {"files": files, "runtime": {"weights": entries, "ranks": [[0, 2, 4], [1, 3, 5]]}}
    for rank in (0, 1):
        result = upload_rank(Memory(), tmp_path, manifest, rank, gpu_memory := [])  # type: ignore[arg-type]
        assert [*result.by_name] == ["a0", "b0", "c0"] and [*result.by_name.values()] == gpu_memory
        assert [*result.files.values()] == gpu_memory and [*result.parts["b"]] == [FilePart(32 * rank, 32, 0)]
    gpu = Memory()
    upload_rank(gpu, tmp_path, manifest, 1, [])  # type: ignore[arg-type]
    assert [part.raw for part in gpu.parts] == [contents[name][32:] for name in "abc"]
    for name, verifying in (("a", 0), ("b", 1), ("c", 0)):
        (tmp_path / name).write_bytes(bytes(64))
        with pytest.raises(ArtifactError, match=f"{name}: SHA-256 differs"):
            upload_rank(Memory(), tmp_path, manifest, verifying, [])  # type: ignore[arg-type]
        upload_rank(Memory(), tmp_path, manifest, 1 - verifying, [])  # type: ignore[arg-type]
        (tmp_path / name).write_bytes(bytes(63))
        with pytest.raises(ArtifactError, match=f"{name}: 63 bytes instead of 64"):
            upload_rank(Memory(), tmp_path, manifest, 1 - verifying, [])  # type: ignore[arg-type]
        (tmp_path / name).write_bytes(contents[name])


class Repeated:
    """An executor that notes what it is asked for."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.plan = {"follow": ["launch"]}
        self.driver = self.inputs = self.launcher = self

    def use(self) -> None: ...

    def receive(self, content: memoryview, turn: int) -> None:
        self.log.append(("inputs", bytes(content), turn))

    def receive_sampling(self, numbers: memoryview, lists: memoryview) -> None:
        self.log.append(("sampling", bytes(numbers), bytes(lists)))

    def receive_masks(self, content: memoryview) -> None:
        self.log.append(("masks", bytes(content)))

    def reset_counter(self, turn: int) -> None:
        self.log.append(("counter", turn))

    def launch(self, launches: list[str], counts: dict[str, int]) -> None:
        self.log.append(("follow", launches, counts["tokens"]))

    def run_part(self, counts: dict[str, int], feed_back: bool, part: str, times: int) -> None:
        self.log.append(("run", counts, feed_back, part, times))


def test_another_rank_repeats_all_but_what_the_host_reads(memory: SharedPlan) -> None:
    bell = os.eventfd(0)
    plans = PlanWriter(memory, [bell])
    plans.inputs(memoryview(b"rows"), 1)
    plans.numbers(memoryview(b"12345678"), memoryview(b"list"))
    plans.numbers(memoryview(b""), memoryview(b""))  # greedy: nothing to send
    plans.masks(memoryview(b"mask"))
    plans.reset_counter(1)
    plans.follow({"tokens": 3})
    plans.run({"tokens": 3, "reported": 2, "kept": 1}, True, "before masks", 5)
    plans.run({"tokens": 2}, False, "before the head", 1)  # for hidden states, which rank 0 reads
    plans.end()
    executor = Repeated()
    follow([executor], memory, 1, bell)  # type: ignore[list-item]
    assert executor.log == [
        ("inputs", b"rows", 1),
        ("sampling", b"12345678", b"list"),
        ("masks", b"mask"),
        ("counter", 1),
        ("follow", ["launch"], 3),
        ("run", {"tokens": 3, "reported": 0, "kept": 0}, True, "before masks", 5),
        ("run", {"tokens": 2, "reported": 0, "kept": 0}, False, "before the head", 1),
    ]
    os.close(bell)


def test_records_of_paths_are_repeated_in_one_order(memory: SharedPlan) -> None:
    bell = os.eventfd(0)
    target = PlanWriter(memory, [bell])
    draft = target.of(1)
    log: list[tuple[str, int]] = []

    class Counting(Repeated):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def reset_counter(self, turn: int) -> None:
            log.append((self.name, turn))

    for turn, plans in enumerate([target, draft, draft, target]):
        plans.reset_counter(turn)
    target.end()
    follow([Counting("model"), Counting("draft")], memory, 1, bell)  # type: ignore[list-item]
    assert log == [("model", 0), ("draft", 1), ("draft", 2), ("model", 3)]
    os.close(bell)
