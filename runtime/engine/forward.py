"""Logits of every position of given texts, for evaluation, and their pooled hidden states, for embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from qcompile.errors import ResourceError
from qcompile.runtime.embeddings import Pooling, hidden_states
from qcompile.runtime.engine.scheduler import Scheduler
from qcompile.runtime.engine.slots import NO_SLOT
from qcompile.runtime.sampling.arrays import DoubleArray, FloatArray
from qcompile.runtime.step import HiddenStates, Rows, StepExecutor


def sequence_logits(
    executor: StepExecutor,
    scheduler: Scheduler,
    sequences: Sequence[Sequence[int]],
    chunk: int,
    adapter: str | None = None,
) -> Iterator[tuple[int, int, FloatArray]]:
    """Logits of every position of sequences of equal length, `chunk` positions of each sequence per step.

    Yields (sequence index, first position, logits [positions, vocab]); the logits are valid until the next item.
    The sequences take pages and slots of their own. Running requests may be preempted for them and are recomputed
    later. No step may be pending. `adapter` is the one that all sequences have.
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
        with places(executor, scheduler, [length] * len(batch), adapter) as held:
            for start in range(0, length, chunk):
                end = min(start + chunk, length)
                parts = [
                    Rows(sequences[i][start:end], start, pages, end - start, slot=slot)
                    for i, (pages, slot) in zip(batch, held, strict=True)
                ]
                _, logits = executor.step(parts, logits=True)
                assert logits is not None
                for at, index in enumerate(batch):
                    yield index, start, logits[at * (end - start) : (at + 1) * (end - start)]


@contextmanager
def places(
    executor: StepExecutor, scheduler: Scheduler, lengths: Sequence[int], adapter: str | None = None
) -> Iterator[list[tuple[list[int], int]]]:
    """KV pages and a slot of recurrent states for each of some sequences of these lengths, which are given back.

    Running requests may be preempted for them. `adapter` is the one that all have. Raises ResourceError if the cache is
    too small.
    """
    pool, slots = scheduler.pool, scheduler.slots
    needs = [pool.pages_for(length) for length in lengths]
    wanted = len(lengths) if executor.state_slots else 0
    while (pool.free < sum(needs) or slots.free < wanted) and scheduler.running:
        scheduler.preempt()
    if pool.free < sum(needs):
        raise ResourceError(f"{sum(lengths)} tokens need {sum(needs)} KV pages, {pool.free} are free")
    pages = [pool.take(need) for need in needs]
    if scheduler.adapters:
        for taken in pages:
            scheduler.adapters.mark(taken[0], adapter)
    held = [slots.take() for _ in range(wanted)] or [NO_SLOT] * len(lengths)
    try:
        yield list(zip(pages, held, strict=True))
    finally:
        for each in pages:
            pool.give_back(each)
        for slot in held:
            slots.give_back(slot)


def pooled_states(
    executor: StepExecutor,
    scheduler: Scheduler,
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
    adapter: str | None = None,
) -> FloatArray:
    """Pooled hidden states of texts (tokens, at least one each), float32 [texts, width], all with `adapter`.

    A text's bits depend neither on the other texts nor on how it is divided into steps: means add rows in their order.
    The texts take pages and slots of their own, see `places`. No step may be pending. Raises UnsupportedError if the
    model gives no hidden states, ResourceError if the KV cache is too small.
    """
    hidden = hidden_states(executor)
    pooled: FloatArray = np.empty((len(texts), hidden.width), np.float32)
    for group in _groups(executor, scheduler, texts):
        with places(executor, scheduler, [len(texts[index]) for index in group], adapter) as held:
            if len(group) == 1:
                pooled[group[0]] = _long(executor, hidden, texts[group[0]], *held[0], pooling)
                continue
            parts = [
                Rows(texts[index], 0, pages, len(texts[index]) if pooling == "mean" else 1, slot=slot)
                for index, (pages, slot) in zip(group, held, strict=True)
            ]
            rows, at = hidden.step(parts), 0
            for index, part in zip(group, parts, strict=True):
                pooled[index] = _sum(np.zeros(hidden.width), rows[at : at + part.outputs]) / part.outputs
                at += part.outputs
    return pooled


def _long(
    executor: StepExecutor, hidden: HiddenStates, text: Sequence[int], pages: list[int], slot: int, pooling: Pooling
) -> DoubleArray:
    """The pooled hidden states [width] of one text, in as many steps as it needs."""
    limits = executor.limits
    chunk = min(limits.max_tokens, limits.max_outputs) if pooling == "mean" else limits.max_tokens
    total = np.zeros(hidden.width)
    for start in range(0, len(text), chunk):
        tokens = text[start : start + chunk]
        last = start + len(tokens) == len(text)
        outputs = len(tokens) if pooling == "mean" else int(last)
        total = _sum(total, hidden.step([Rows(tokens, start, pages, outputs, slot=slot)]))
    return total / (len(text) if pooling == "mean" else 1)


def _sum(total: DoubleArray, rows: FloatArray) -> DoubleArray:
    """A sum [width] and rows [rows, width], added one after the other."""
    for row in rows:
        total = total + row
    return total


def _groups(executor: StepExecutor, scheduler: Scheduler, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The numbers of texts that fit into one step together, in order; each text that fits into none is alone."""
    limits, pool = executor.limits, scheduler.pool
    most = scheduler.slots.total if executor.state_slots else limits.max_outputs
    group: list[int] = []
    rows = pages = 0  # of the group
    for index, text in enumerate(texts):
        need = pool.pages_for(len(text))
        fits = rows + len(text) <= min(limits.max_tokens, limits.max_outputs) and pages + need <= pool.free
        if group and (not fits or len(group) == most):
            yield group
            group, rows, pages = [], 0, 0
        group.append(index)
        rows, pages = rows + len(text), pages + need
    if group:
        yield group
