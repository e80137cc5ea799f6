"""Rounds with a draft head inside the artifact's library (codegen/cpu/templates/draft_head.h)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.cpu.speculate import LibrarySpeculator, QcHead
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.speculation.heads import HeadSpeculator, TargetFeatures
from qcompile.runtime.speculation.stages import DraftStage, StageResult

_ROOM = 4 * MOST_DRAFTS
"""Positions of a text of which a call keeps the target's features for the head."""


class LibraryHeadSpeculator(HeadSpeculator):
    """As HeadSpeculator, with rounds in the library of `target`; `head` was opened on its threads.

    stages: that of the head, and a lookup if one follows; where the text repeats itself, it proposes to the target.

    The host still draws the drafts of requests with penalties, biases or a grammar: these are for the target's tokens.
    """

    def __init__(
        self, target: Executor, head: Executor, stages: Sequence[DraftStage], tokens: NDArray[np.int32] | None
    ) -> None:
        super().__init__(target, head, stages[0].gamma, tokens)
        self.stages = tuple(stages)
        self._rounds = LibrarySpeculator(target, stages)
        self._executors = target, head
        self._features: FloatArray = np.empty((0, _ROOM, target.features.shape[1]), np.float32)

    def samples_in_rounds(self, requests: Sequence[Request]) -> bool:
        return all(request.params.unchanged for request in requests)

    def _extend(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[list[StageResult], Sequence[float]]:
        if len(requests) > len(self._features):
            self._features = np.empty((2 * len(requests), *self._features.shape[1:]), np.float32)
        for features, request in zip(self._features, requests, strict=False):
            known = self._read(request, request.sequence.computed)
            request.drafts.cached[0] = known.first
            features[: len(known.features)] = known.features
        results, seconds = self._rounds.extend(requests, gammas, ends, rounds, self._call())
        for features, request, result in zip(self._features, requests, results, strict=False):
            computed, cached = result.computed[:2]
            self._known[request.id] = TargetFeatures(cached, features[: computed - cached].copy())
        return results, seconds

    def _call(self) -> QcHead:
        """The memory of a call."""
        target, head = self._executors
        arrays = self._tokens, target.features, head.features, head.given, self._features
        addresses = (None if array is None else array.ctypes.data for array in arrays)
        return QcHead(*addresses, *self._features.shape[1:])
