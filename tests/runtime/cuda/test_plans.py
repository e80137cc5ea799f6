"""The plan that rank 0 of a model on several GPUs writes, and how the others repeat it, without GPUs."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.errors import ResourceError
from qcompile.runtime.cuda import ranks
from qcompile.runtime.cuda.follower import follow
from qcompile.runtime.cuda.plans import PlanKind, PlanWriter, SharedPlan
from qcompile.runtime.cuda.ranks import CudaRanks, check_gpus


@pytest.fixture
def memory() -> Any:
    found = SharedPlan(1024)
    yield found
    found.close()


def test_records_are_read_once_in_order_and_the_ring_begins_again(memory: SharedPlan) -> None:
    reader = SharedPlan(1024, os.dup(memory.descriptor))
    seen, written = [], []
    for number in range(200):
        content = bytes([number]) * (number % 97)
        memory.write(1, PlanKind.INPUTS, number, -number, [memoryview(content), b"end"])
        written.append((PlanKind.INPUTS, number, -number, content + b"end"))
        if number % 3 == 2:
            seen += [(*one[:3], bytes(one.content)) for one in reader.records(1)]
    seen += [(*one[:3], bytes(one.content)) for one in reader.records(1)]
    assert seen == written and not list(reader.records(1))
    reader.close()


def test_a_writer_waits_for_the_slowest_reader_unless_a_rank_has_failed(memory: SharedPlan) -> None:
    for _ in range(3):
        memory.write(2, PlanKind.INPUTS, 0, 0, [b"x" * 240])
    list(memory.records(1))
    late = threading.Thread(target=memory.write, args=(2, PlanKind.END, 0, 0, [b"x" * 400]))
    late.start()
    late.join(0.1)
    assert late.is_alive()
    assert len(list(memory.records(2))) == 3
    late.join(5)
    assert not late.is_alive()
    late = threading.Thread(target=memory.write, args=(2, PlanKind.END, 0, 0, [b"x" * 480]))
    late.start()
    memory.fail()
    late.join(5)
    assert not late.is_alive() and memory.failed
    with pytest.raises(ResourceError, match="more than half of the 1,024 bytes"):
        memory.write(2, PlanKind.INPUTS, 0, 0, [b"x" * 600])


def test_a_rank_says_that_it_runs(memory: SharedPlan) -> None:
    before = memory.beats(3)
    memory.beat(3)
    assert memory.beats(3) == before + 1 and memory.beats(2) == 0


class Process:
    """A process that ends with `status` once it is looked at for the last time."""

    pid = 7

    def __init__(self, status: int | None, looks: int = 0) -> None:
        self.status, self.looks, self.killed = status, looks, False

    def poll(self) -> int | None:
        self.looks -= 1
        return -9 if self.killed else self.status if self.looks < 0 else None

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
    found = object.__new__(CudaRanks)
    found._memory, found._closing, found._problem = memory, False, ""
    found.failed = SimpleNamespace(set=lambda: words.append("set"))  # type: ignore[assignment]
    looks = iter(range(1000))

    def sleep(seconds: float) -> None:
        if beats and next(looks) % 5 == 0:  # it beats five times as seldom as it is looked at
            memory.beat(1)

    monkeypatch.setattr(ranks.time, "sleep", sleep)
    found._watch(1, process)  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match=re.escape(problem)):
        found.check()
    assert memory.failed and words == ["set"] and process.killed == (not beats)


def test_gpus_that_cannot_be_used_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(count: int, reached: bool) -> Any:
        return SimpleNamespace(gpus=count, reaches=lambda other: reached)

    place = Path("out")
    check_gpus(gpus(2, True), 2, place)
    with pytest.raises(ResourceError, match="out was built for 2 GPUs, one GPU is visible"):
        check_gpus(gpus(1, True), 2, place)
    with pytest.raises(ResourceError, match="GPU 0 cannot write to the memory of GPU 1"):
        check_gpus(gpus(2, False), 2, place)
    monkeypatch.setattr(ranks.platform, "machine", lambda: "aarch64")
    with pytest.raises(ResourceError, match="aarch64 cores runs one GPU"):
        check_gpus(gpus(2, True), 2, place)


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
    plans.end()
    executor = Repeated()
    follow(executor, memory, 1, bell)  # type: ignore[arg-type]
    assert executor.log == [
        ("inputs", b"rows", 1),
        ("sampling", b"12345678", b"list"),
        ("masks", b"mask"),
        ("counter", 1),
        ("follow", ["launch"], 3),
        ("run", {"tokens": 3, "reported": 0, "kept": 0}, True, "before masks", 5),
    ]
    os.close(bell)
