"""Logits of every position of given texts, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qcompile.errors import ResourceError
from qcompile.runtime.engine.scheduler import Scheduler
from qcompile.runtime.engine.slots import NO_SLOT
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.step import Rows, StepExecutor


def sequence_logits(
    executor: StepExecutor, scheduler: Scheduler, sequences: Sequence[Sequence[int]], chunk: int
) -> Iterator[tuple[int, int, FloatArray]]:
    """Logits of every position of sequences of equal length, `chunk` positions of each sequence per step.

    Yields (sequence index, first position, logits [positions, vocab]); the logits are valid until the next item.
    The sequences take pages and slots of their own. Running requests may be preempted for them and are recomputed
    later. No step may be pending.
    """
    pool, slots = scheduler.pool, scheduler.slots
    length, rows = len(sequences[0]), executor.limits.max_outputs
    chunk = min(chunk, length, rows)
    need = pool.pages_for(length)
    together = max(1, min(rows // chunk, pool.total // need, len(sequences)))
    if executor.state_slots:
        together = min(together, slots.total)
    for first in range(0, len(sequences), together):
        batch = range(first, min(first + together, len(sequences)))
        wanted = len(batch) if executor.state_slots else 0
        while (pool.free < need * len(batch) or slots.free < wanted) and scheduler.running:
            scheduler.preempt()
        if pool.free < need * len(batch):
            raise ResourceError(f"{length} tokens need {need} KV pages, {pool.free} are free")
        pages = {index: pool.take(need) for index in batch}
        held = [slots.take() for _ in range(wanted)] or [NO_SLOT] * len(batch)
        try:
            for start in range(0, length, chunk):
                end = min(start + chunk, length)
                parts = [
                    Rows(sequences[i][start:end], start, pages[i], end - start, slot=slot)
                    for i, slot in zip(batch, held, strict=True)
                ]
                _, logits = executor.step(parts, logits=True)
                assert logits is not None
                for at, index in enumerate(batch):
                    yield index, start, logits[at * (end - start) : (at + 1) * (end - start)]
        finally:
            for each in pages.values():
                pool.give_back(each)
            for slot in held:
                slots.give_back(slot)
