"""Rounds of speculation inside the artifact's library (codegen/cpu/templates/speculate.h), without returning to Python
between tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from qcompile.runtime.cpu.executor import Executor, sampling_array
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.request import Request
from qcompile.runtime.speculation.stages import DraftStage, Speculator, StageResult

_ARRAYS = (
    *("tokens", "first", "length", "limit", "gamma", "sampling", "computed", "block_table"),
    *("rounds_done", "drafted", "accepted", "seconds", "state_slots"),
)
"""The arrays of `qc_speculation`, in its order."""


class _Stage(ctypes.Structure):
    """`qc_stage` of the library: a draft stage, or the target."""

    _fields_ = [
        ("step", ctypes.c_void_p),
        ("model", ctypes.c_void_p),
        ("vocab", ctypes.c_int32),
        ("cache", ctypes.c_int32),
        ("gamma", ctypes.c_int32),
        ("match", ctypes.c_int32),
        ("threshold", ctypes.c_float),
    ]


class QcHead(ctypes.Structure):
    """`qc_head` of the library: what a draft head gets from the target in rounds."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "target", "own", "given", "known")),
        ("room", ctypes.c_int32),
        ("width", ctypes.c_int32),
    ]


class _Speculation(ctypes.Structure):
    """`qc_speculation` of the library."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("stages", "sequences", "rounds", "max_rows", "stride", "block_stride")),
        ("stage", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("head", ctypes.c_void_p),
    ]


class LibrarySpeculator(Speculator):
    """Speculation in the library of `target`; the draft paths were opened on its threads."""

    def __init__(self, target: Executor, stages: Sequence[DraftStage]) -> None:
        super().__init__(target, stages)
        self._executor, self._library = target, target.library
        table = [_stage_entry(index, stage) for index, stage in enumerate([DraftStage(target, 0, True), *stages])]
        self._table = (_Stage * len(table))(*table)
        self._memory = _Memory(len(table), 0, 0, 0)

    def samples_in_rounds(self, requests: Sequence[Request]) -> bool:
        return True

    def _extend(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[list[StageResult], Sequence[float]]:
        return self.extend(requests, gammas, ends, rounds, None)

    def extend(
        self,
        requests: Sequence[Request],
        gammas: Sequence[int],
        ends: Sequence[int],
        rounds: int,
        head: QcHead | None,
    ) -> tuple[list[StageResult], Sequence[float]]:
        """As `_extend`; `head` is None unless the first draft stage is a draft head."""
        memory, before = self._fill(requests, gammas, ends, rounds)
        memory.call.head = ctypes.addressof(head) if head else None
        inputs = [
            request.sampler.inputs(request.sequence.computed, end - len(request.sequence.tokens) if rounds else 0)
            for request, end in zip(requests, ends, strict=True)
        ]
        sampling = sampling_array(inputs)
        memory.call.sampling = ctypes.addressof(sampling) if sampling else None
        self._executor.check_status("qc_speculate", self._library.qc_speculate(ctypes.byref(memory.call)))
        count, columns = len(requests), memory.sizes[1]
        results = []
        for index in range(count):
            row = index * columns
            tokens = memory.tokens[row + before[index] : row + memory.length[index]]
            computed = memory.computed[index : count * (len(self.stages) + 1) : count]
            results.append(StageResult(tokens, computed, *memory.counts_of(index)))
        return results, memory.seconds[:]

    def _fill(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[_Memory, list[int]]:
        """Write a call's arguments. Also returns how many tokens of each text they contain."""
        count = len(requests)
        first, computed = self._text_starts(requests)
        before = [len(request.sequence.tokens) - start for request, start in zip(requests, first, strict=True)]
        limits = [end - start for end, start in zip(ends, first, strict=True)]
        need = count, max(limits) + 1, max(len(request.sequence.pages) for request in requests)
        if not self._memory.fits(*need):
            self._memory = _Memory(len(self.stages) + 1, *(2 * size for size in need))
            self._memory.call.stage = ctypes.addressof(self._table)
        memory = self._memory
        _, columns, pages = memory.sizes
        memory.first[:count], memory.length[:count] = first, before
        memory.limit[:count], memory.gamma[:count] = limits, list(gammas)
        memory.slots[:count] = [request.sequence.slot for request in requests]
        memory.computed[: count * len(computed)] = [place for stage in computed for place in stage]
        for index, request in enumerate(requests):
            row = index * columns
            memory.tokens[row : row + before[index]] = request.sequence.tokens[first[index] :]
            memory.pages[index * pages : index * pages + len(request.sequence.pages)] = request.sequence.pages
        memory.clear()
        memory.call.sequences, memory.call.rounds = count, rounds
        memory.call.max_rows = self.target.limits.max_tokens
        return memory, before


def _stage_entry(index: int, stage: DraftStage) -> _Stage:
    """A stage as the library reads it. Stages that share the target's cache have cache number 0, others their own."""
    executor = stage.executor
    assert executor is None or isinstance(executor, Executor)
    return _Stage(
        ctypes.cast(executor.library.qc_step, ctypes.c_void_p) if executor else None,
        executor.handle if executor else None,
        executor.limits.vocab if executor else 0,
        0 if stage.shares_cache else index,
        stage.gamma,
        stage.match,
        stage.threshold,
    )


class _Memory:
    """The arrays of a call of qc_speculate, reused by later calls that fit.

    ctypes arrays convert from and to lists faster than numpy's, of which each call would need a dozen.
    """

    def __init__(self, stages: int, sequences: int, columns: int, pages: int) -> None:
        self.sizes = sequences, columns, pages

        def numbers(count: int) -> Any:
            return (ctypes.c_int32 * count)()

        self.tokens, self.pages = numbers(sequences * columns), numbers(sequences * pages)
        self.first, self.length, self.limit, self.gamma, self.slots = (numbers(sequences) for _ in range(5))
        self.computed = numbers(stages * sequences)
        counts = sequences * (1 + 2 * MOST_DRAFTS)
        self._results: Any = (ctypes.c_char * (4 * counts + 8 * stages))()
        self.seconds = (ctypes.c_double * stages).from_buffer(self._results)
        at = 8 * stages
        self.rounds_done = (ctypes.c_int32 * sequences).from_buffer(self._results, at)
        at += 4 * sequences
        self.drafted = (ctypes.c_int32 * (sequences * MOST_DRAFTS)).from_buffer(self._results, at)
        at += 4 * sequences * MOST_DRAFTS
        self.accepted = (ctypes.c_int32 * (sequences * MOST_DRAFTS)).from_buffer(self._results, at)
        arrays = (self.tokens, self.first, self.length, self.limit, self.gamma, self.computed, self.pages)
        results = (self.rounds_done, self.drafted, self.accepted, self.seconds, self.slots)
        self.call = _Speculation(stages=stages, stride=columns, block_stride=pages)
        names = [name for name in _ARRAYS if name != "sampling"]  # set by each call
        for name, array in zip(names, arrays + results, strict=True):
            setattr(self.call, name, ctypes.addressof(array))

    def fits(self, sequences: int, columns: int, pages: int) -> bool:
        """Whether a call of this size (`columns` tokens and `pages` per sequence) has room."""
        return sequences <= self.sizes[0] and columns <= self.sizes[1] and pages <= self.sizes[2]

    def clear(self) -> None:
        """Set the results to zero."""
        ctypes.memset(self._results, 0, len(self._results))

    def counts_of(self, index: int) -> tuple[int, list[int], list[int]]:
        """Number of rounds of a sequence, and its drafted and accepted tokens by position in the round."""
        places = slice(index * MOST_DRAFTS, (index + 1) * MOST_DRAFTS)
        return self.rounds_done[index], self.drafted[places], self.accepted[places]
