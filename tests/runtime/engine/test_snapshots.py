"""Copies of recurrent states that cached pages keep."""

from __future__ import annotations

import pytest

from qcompile.runtime.engine.prefixes import CachedPage
from qcompile.runtime.engine.snapshots import Snapshots
from qcompile.runtime.step import SlotCopies


def test_the_copy_unused_for_longest_goes_and_none_is_lost() -> None:
    copied: list[tuple[int, int]] = []
    snapshots = Snapshots(SlotCopies(4, 2, lambda source, target: copied.append((source, target))))
    pages = [CachedPage(number, (number,), None) for number in range(4)]
    snapshots.keep(pages[0], 0)
    snapshots.keep(pages[0], 1)  # the same states
    snapshots.keep(pages[1], 1)
    assert [source for source, _ in copied] == [0, 1]
    assert snapshots.usable(pages) == pages[:2] and snapshots.usable([pages[2], pages[0], pages[3]])[-1] is pages[0]
    snapshots.restore(pages[0], 3)
    assert copied[-1] == (copied[0][1], 3)
    snapshots.keep(pages[2], 2)
    assert snapshots.usable([pages[1]]) == [] and snapshots.usable([pages[0]]) == [pages[0]]
    pages[2].attached = False  # the page holds another text by now
    snapshots.keep(pages[3], 2)
    assert snapshots.usable([pages[0]]) and snapshots.usable([pages[3]]) and not snapshots.usable([pages[2]])
    snapshots.check()
    snapshots._free.append(4)
    with pytest.raises(RuntimeError, match="copies of states"):
        snapshots.check()
