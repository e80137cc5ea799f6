"""Rounds with a draft head on a GPU: a round is one CUDA graph, which passes features from the target to the head.

The first step of the head in a round computes the rows that the target has verified in the round before, with the
target's features, and drafts from the last accepted one. Rows behind that one have positions of rejected drafts; the
next round computes their cache entries again. Each further step reads the features that the head itself has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcompile.runtime.cuda.counts import AttentionWork, Counts, attention_counts
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.features import DeviceFeatures
from qcompile.runtime.cuda.rounds import CudaRounds, Launches, RoundInput, RoundOutput
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.speculation.heads import ComputedRows, HeadSpeculator, TargetFeatures
from qcompile.runtime.speculation.stages import DraftStage
from qcompile.runtime.step import Rows

_FIRST_ROWS = ("head_tokens", "head_positions", "row_sequence")
"""Arrays of the head's first step in a round, of one number a row."""


class HeadRounds(CudaRounds):
    """The rounds of a head that proposes the target's `tokens`, by their numbers in the head (None: the same).

    `read` is called before rounds with the requests and their gammas, and returns what the head reads first of each:
    features of the last positions computed, at most the largest gamma and one more.
    """

    def __init__(
        self,
        target: CudaExecutor,
        stage: DraftStage,
        tokens: NDArray[np.int32] | None,
        read: Callable[[Sequence[Request], Sequence[int]], list[TargetFeatures]],
    ) -> None:
        assert isinstance(stage.executor, CudaExecutor) and stage.executor.features
        self.draft, self._read = stage.executor, read
        self._first: list[TargetFeatures] = []
        most, vocabulary = target.limits.max_outputs, stage.executor.limits.vocab
        sizes = dict.fromkeys((*_FIRST_ROWS, "head_outputs"), most) | {"query_start": most + 1}
        super().__init__(target, stage, sizes | {"depth": 1, "proposed": vocabulary})
        self.state.write("proposed", range(vocabulary) if tokens is None else tokens.tolist())
        self.state.send("proposed", "proposed", vocabulary)
        width = self.draft.features.shape[1] if self.draft.features else 0
        address = self.draft.memory.allocate(4 * most * width, "features")
        self.known = DeviceFeatures(target.driver, address, most, width)
        """Of each sequence, features of the rows of the last round that it has gained tokens in."""
        self.gained: list[int] = []
        """Tokens that each sequence has gained in that round, or 0 if there was none in the last call."""

    def _catch_up(self, requests: Sequence[Request], gammas: Sequence[int]) -> None:
        self._first = self._read(requests, gammas)

    def run_rounds(
        self, sequences: Sequence[RoundInput], gammas: Sequence[int], rounds: int
    ) -> tuple[list[RoundOutput], int]:
        """As `CudaRounds.run_rounds`; notes what the last round of each sequence has gained."""
        outputs, rounds = super().run_rounds(sequences, gammas, rounds)
        self.gained = [next((taken for taken in reversed(output.gained) if taken), 0) for output in outputs]
        return outputs, rounds

    def send_draft_inputs(self, sequences: Sequence[RoundInput], ahead: int) -> Counts:
        rows, count = max(sequence.gamma for sequence in sequences) + 1, len(sequences)
        features: FloatArray = np.zeros((count * rows, self.known.shape[1]), np.float32)
        tokens, positions, outputs = list[int](), list[int](), list[int]()
        for start, sequence, known in zip(range(0, count * rows, rows), sequences, self._first, strict=True):
            features[start : start + len(known.features)] = known.features
            text = sequence.tokens[known.first + 1 :] or sequence.tokens  # a token that is not computed has no drafts
            tokens += [*text, *[text[-1]] * (rows - len(text))]
            positions += range(known.first, known.first + rows)
            outputs.append(start + len(text) - 1)
        self.known[: count * rows] = features
        owners = [index for index in range(count) for _ in range(rows)]
        for name, items in zip(_FIRST_ROWS, (tokens, positions, owners), strict=True):
            self.state.write(name, items)
        self.state.write("head_outputs", outputs)
        self.state.write("query_start", range(0, count * rows + 1, rows))
        self.state.send(_FIRST_ROWS[0], "query_start", count + 1)
        return self.draft.fill([Rows(s.tokens[-1:], s.computed, s.pages, 1) for s in sequences], ahead)

    def draft_addresses(self) -> dict[str, int]:
        return {"decoded": self.draft.address("decoded"), "known": self.known.address}

    def reallocations(self) -> tuple[int, ...]:
        return (*super().reallocations(), self.draft.launcher.reallocations)

    def draft_launches(self, drafting: Counts, verifying: Counts, others: Mapping[tuple[str, str], int]) -> Launches:
        draft, plan = self.draft, self.draft.plan
        wide = _wide_counts(plan, drafting, verifying["queries"])
        for counts in (wide, drafting):  # before any launch holds an address that growing would change
            draft.launcher.grow(counts)
        arrays = {"token_ids": "head_tokens", "positions": "head_positions", "output_rows": "head_outputs"}
        arrays |= {name: name for name in ("row_sequence", "query_start")}
        inputs = {("input", name): others["state", array] for name, array in arrays.items()}
        inputs["input", "given"] = self.known.address
        own = {("input", "given"): draft.address("features")}
        second = own | {("input", "feature_rows"): others["state", "head_outputs"]}
        first_draft, next_draft = (draft.launcher.prepare([launch], drafting, others) for launch in plan["drafting"])
        launches = draft.launcher.prepare(plan["launches"], wide, inputs) + first_draft
        if verifying["queries"] > 2:
            launches += draft.launcher.prepare(plan["launches"], drafting, second) + next_draft
        later = draft.launcher.prepare(plan["launches"], drafting, own) + next_draft
        return launches + later * max(0, verifying["queries"] - 3)


class CudaHeadSpeculator(HeadSpeculator):
    """As HeadSpeculator, with rounds in graphs on the GPU. In these, drafts are what the head finds most probable.

    The host still runs the head where it chooses tokens itself, as for acceptance by rejection.
    """

    def __init__(self, target: CudaExecutor, head: CudaExecutor, gamma: int, tokens: NDArray[np.int32] | None) -> None:
        returning: Any = target  # their features are slices of arrays, if not arrays
        reading: Any = head
        super().__init__(returning, reading, gamma, tokens)
        self._executors = target, head
        self._rounds = HeadRounds(target, self.stages[0], tokens, self._first)

    def close(self) -> None:
        self._rounds.close()

    def samples_in_rounds(self, requests: Sequence[Request]) -> bool:
        return True

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """As `Speculator.rounds`. A request of which no position is computed has no drafts."""
        gammas = [gamma * (request.sequence.computed > 0) for request, gamma in zip(requests, gammas, strict=True)]
        tokens, rounds = self._rounds.rounds(requests, gammas, rounds, ends)
        self.catch_up_seconds = self._rounds.catch_up_seconds
        rows = max(gammas) + 1
        known = self._rounds.known[: len(requests) * rows]
        for start, request, taken in zip(range(0, len(known), rows), requests, self._rounds.gained, strict=True):
            if taken:
                request.drafts.cached[0] = first = request.sequence.computed - taken
                self._known[request.id] = TargetFeatures(first, known[start : start + taken])
        return tokens, rounds

    def _take(self, computed: Sequence[ComputedRows]) -> None:
        """As `HeadSpeculator._take`. The features of prompts stay on the GPU.

        The head computes all rows of a prompt but the last, of which it may lack the next token.
        """
        target, head = self._executors
        assert target.features and head.given
        prompts = [each for each in computed if each.many > self.most_lag]
        if prompts:
            self._fill_prompts(prompts)
        kept = [each if each.many <= self.most_lag else each.last for each in computed]
        if not kept:
            return
        features = head.given.gather(target.features, [(each.at, each.many) for each in kept])
        end = 0
        for each in kept:
            end += each.many
            self._keep(each.request, each.start, features[end - each.many : end])

    def _fill_prompts(self, prompts: Sequence[ComputedRows]) -> None:
        """Have the head compute the rows of `prompts` but the last of each, in steps of as many rows as it takes."""
        target, head = self._executors
        assert target.features and head.given
        for request, start, _, _ in prompts:
            self._keep(request, start, np.empty((0, target.features.shape[1]), np.float32))
        self._fill([each.request for each in prompts], 1)
        rows, at, most = list[Rows](), 0, head.limits.max_tokens
        for request, start, row, count in prompts:
            before = self._of(request).features  # of one position or none
            place, last = start - len(before), start + count - 1
            while place < last:
                end, own = min(last, place + most - at), max(place, start)
                if place < own:
                    head.given[at : at + 1] = before
                head.given.copy(at + own - place, target.features, row + own - start, end - own)
                rows.append(Rows(request.sequence.tokens[place + 1 : end + 1], place, request.sequence.pages, 0))
                request.drafts.cached[0], at, place = end, at + end - place, end
                if at == most:
                    head.step(rows, False)
                    rows, at = [], 0
        if rows:
            head.step(rows, False)

    def _first(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[TargetFeatures]:
        """What the head reads first of each request, in rounds of as many rows as the largest gamma and one more."""
        self._wake(requests)
        self._fill(requests, max(gammas) + 1)
        none = np.zeros((1, self._rounds.known.shape[1]), np.float32)
        computed = [request.sequence.computed for request in requests]
        known = [self._read(request, many) for request, many in zip(requests, computed, strict=True)]
        return [each if many else TargetFeatures(0, none) for each, many in zip(known, computed, strict=True)]


def _wide_counts(plan: Mapping[str, Any], counts: Counts, rows: int) -> Counts:
    """The counts of a step over `rows` rows of each sequence, from those of a step over one."""
    tokens = rows * counts["sequences"]
    work = AttentionWork(counts["splits"], tokens, counts["sequences"], rows)
    own = {"tokens": tokens, "queries": rows, "featured": tokens}
    return counts | own | attention_counts(plan, work, AttentionWork())
