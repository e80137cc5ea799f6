"""The memory of embeddings that steps read: it is written when no step that is queued reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qcompile.runtime.cuda.embeds import GivenEmbeds
from qcompile.runtime.step import Rows
from tests.support.gpu_machine import HostDriver

WIDTH, FIRST = 3, 1 << 30


class WatchedDriver(HostDriver):
    """Notes what happens to events and to pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.events = 0

    def event(self) -> int:
        self.events += 1
        return self.events

    def record(self, event: Any) -> None:  # type: ignore[override]
        self.seen.append(("record", event))

    def wait_for(self, event: Any) -> None:  # type: ignore[override]
        self.seen.append(("wait", event))

    def drop_event(self, event: Any) -> None:  # type: ignore[override]
        self.events -= 1


def rows(count: int, embedded: int, value: float) -> Rows:
    embeds = np.full((embedded, WIDTH), value, np.float32) if embedded else None
    return Rows([9] * count, 0, [0], 1, embeds=embeds)


@pytest.fixture
def driver() -> WatchedDriver:
    return WatchedDriver()


@pytest.fixture
def given(driver: Any) -> GivenEmbeds:
    return GivenEmbeds(driver, {"width": WIDTH, "first": FIRST})


def test_tokens_and_numbers(given: GivenEmbeds, driver: WatchedDriver) -> None:
    tokens, halves = given.write([rows(2, 0, 0), rows(3, 2, 1.5), rows(1, 1, 2.5)], 0)
    assert tokens == [9, 9, FIRST, FIRST + 1, 9, FIRST + 2]
    address = int(np.array(halves, np.int32).view(np.int64)[0])
    held = driver.at(address, "*fp32")[: 3 * WIDTH].reshape(3, WIDTH)
    assert held[:, 0].tolist() == [1.5, 1.5, 2.5]
    assert all(-(1 << 31) <= half < 1 << 31 for half in halves)


def test_a_copy_is_written_when_its_last_step_has_ended(given: GivenEmbeds, driver: WatchedDriver) -> None:
    for turn in (0, 1, 0, 1):
        given.begin(turn)
        given.write([rows(2, 2, turn)], turn)
    first, second = 1, 2
    waits = [("wait", first), ("record", first), ("wait", second), ("record", second), ("wait", first)]
    assert driver.seen == [*waits, ("record", first), ("wait", second)]


def test_steps_without_cost_nothing_before_the_first(given: GivenEmbeds, driver: WatchedDriver) -> None:
    given.begin(0)
    assert driver.seen == [] and not driver.memory


def test_copies_grow_and_are_freed(given: GivenEmbeds, driver: WatchedDriver) -> None:
    for count in (2, 5, 3, 9):
        given.write([rows(count, count, 1)], 0)
        assert len(driver.memory) == 1
    given.free()
    given.free()
    assert not driver.memory and driver.events == 0
