"""The slots of recurrent states."""

from __future__ import annotations

import pytest

from qcompile.runtime.engine.slots import NO_SLOT, SlotPool


def test_slots_are_distinct_and_come_back() -> None:
    pool = SlotPool(3)
    held = [pool.take() for _ in range(3)]
    assert sorted(held) == [0, 1, 2] and pool.free == 0
    pool.check(held)
    with pytest.raises(ValueError, match="all 3 slots are held"):
        pool.take()
    pool.give_back(held[1])
    pool.give_back(NO_SLOT)
    assert pool.listed == [held[1]] and pool.take() == held[1]


def test_what_is_lost_or_held_twice_is_found() -> None:
    pool = SlotPool(2)
    slot = pool.take()
    for held in ([], [slot, slot], [1 - slot]):
        with pytest.raises(RuntimeError, match="slots of states"):
            pool.check(held)
    pool.give_back(slot)
    with pytest.raises(ValueError, match="already free"):
        pool.give_back(slot)
