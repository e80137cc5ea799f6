"""The plan that rank 0 of a model on several GPUs writes, and how the others repeat it, without GPUs."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from qcompile.errors import ResourceError
from qcompile.runtime.cuda.follower import follow
from qcompile.runtime.cuda.plans import PlanKind, PlanWriter, SharedPlan


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


class Repeated:
    """An executor that notes what it is asked for."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.plan = {"follow": ["launch"]}
        self.driver = self.inputs = self.launcher = self

    def use(self) -> None: ...

    def receive(self, content: memoryview, turn: int) -> None:
        self.log.append(("inputs", bytes(content), turn))

    def receive_draws(self, numbers: memoryview, lists: memoryview) -> None:
        self.log.append(("draws", bytes(numbers), bytes(lists)))

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
        ("draws", b"12345678", b"list"),
        ("masks", b"mask"),
        ("counter", 1),
        ("follow", ["launch"], 3),
        ("run", {"tokens": 3, "reported": 0, "kept": 0}, True, "before masks", 5),
    ]
    os.close(bell)
