"""The slots of recurrent states of a path on a GPU: those of requests, and behind them those for copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.memory import DeviceMemory
from qcompile.runtime.cuda.plans import PlanWriter
from qcompile.runtime.step import Limits, SlotCopies

_APART = 256
"""Fewest positions that a prompt computes before a copy that no other prompt is known to need: fewer take less time
than the step that a copy needs. On an H200, each step more of a hybrid of 11 million parameters took 1.2 ms, as long as
350 rows (benchmarks/results/prefixes_h200_hybrid_bf16.json, before this bound). By its data sheet, the GPU computes 200
rows while it reads bf16 weights."""


class DeviceSlots:
    """Slots in `memory`, one after the other, each with all states that the path keeps of a sequence.

    total: how many there are; 0 if the path has no states. copies: those for copies; None if there are none.
    """

    def __init__(self, driver: Driver, plan: Mapping[str, Any], limits: Limits, memory: DeviceMemory) -> None:
        self._driver, self._memory, self._bytes = driver, memory, plan["slot_bytes"]
        self.total = limits.slots + limits.copies if self._bytes else 0
        copied = limits.copies if self._bytes else 0
        self.copies = SlotCopies(limits.slots, copied, self.copy, _APART) if copied else None
        self.plans: PlanWriter | None = None
        """What the other processes of a divided model repeat, for its rank 0."""

    def copy(self, source: int, target: int) -> None:
        """Queue a copy of a slot to another, behind the steps that were started.

        One of these may still lack the launches that read masks, which come after all that change states.
        """
        self._driver.use()
        if self.plans:
            self.plans.copy_state(source, target)
        states = self._memory.states
        self._driver.copy(states + target * self._bytes, states + source * self._bytes, self._bytes)
