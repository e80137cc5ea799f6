"""Rounds of speculation, step by step from the host: for draft stages that the GPU's graphs of rounds do not cover.

The algorithm and its results are those of the library's loop (codegen/cpu/templates/speculate.h), with the steps of any
executor. The host decides after each step of a stage. Only the last model decodes several greedy tokens in one call.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.speculation import lookup
from qcompile.runtime.speculation.stages import DraftStage, Speculator, StageResult, top_probability
from qcompile.runtime.step import Rows


@dataclass(slots=True)
class _RoundText:
    """A sequence in a call: its tokens from position `first` on.

    computed: positions that each stage's cache holds. want: tokens that each stage has yet to append. start: index at
    which each stage's drafts of the round begin. slot: of its recurrent states. settled: positions without drafts.
    """

    tokens: array[int]
    first: int
    gamma: int
    pages: Sequence[int]
    computed: list[int]
    want: list[int]
    start: list[int]
    slot: int
    settled: int
    rounds: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def uncomputed(self, stage: int) -> int:
        """Number of tokens that the stage's cache lacks."""
        return self.first + len(self.tokens) - self.computed[stage]

    def new(self, request: Request) -> list[int]:
        """The tokens that the call has appended to the request's."""
        return self.tokens[len(request.sequence.tokens) - self.first :].tolist()

    def append(self, token: int) -> None:
        """Append a draft. A negative token (the stage's logits are not finite) becomes 0, as any token will do."""
        self.tokens.append(max(token, 0))


class HostSpeculator(Speculator):
    """Speculation in which the host starts each step."""

    def _extend(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[list[StageResult], Sequence[float]]:
        first, computed = self._text_starts(requests)
        stage = 0 if rounds else 1
        texts = []
        for index, request in enumerate(requests):
            room = ends[index] - len(request.sequence.tokens)
            want, start = [0] * len(computed), [0] * len(computed)
            want[stage] = min(gammas[index], room) if stage else room
            held = [column[index] for column in computed]
            tokens = array("i", request.sequence.tokens[first[index] :])
            state, settled = request.sequence, len(request.sequence.tokens)
            places = first[index], gammas[index], state.pages
            texts.append(_RoundText(tokens, *places, held, want, start, state.slot, settled))
        call = _Call([DraftStage(self.target, 0, True), *self.stages], texts, rounds)
        call.extend(stage)
        results = [
            StageResult(
                t.tokens[len(r.sequence.tokens) - t.first :].tolist(), t.computed, t.rounds, t.drafted, t.accepted
            )
            for r, t in zip(requests, texts, strict=True)
        ]
        return results, call.seconds


class _Call:
    """One call: the stages extend texts by up to `rounds` rounds. Stage k is `stages[k]`, the target is stage 0."""

    def __init__(self, stages: list[DraftStage], texts: list[_RoundText], rounds: int) -> None:
        self.stages, self.texts, self.rounds = stages, texts, rounds
        self.seconds = [0.0] * len(stages)
        target = stages[0].executor
        assert target
        self._rows = target.limits.max_outputs // len(texts) - 2
        last = stages[-1]
        self._shortcut = last if len(stages) > 2 and last.executor is None else None

    def extend(self, k: int) -> None:
        """Append the tokens wanted of stage k; fewer where a lookup or a threshold ends the draft."""
        if self.stages[k].executor is None:
            shortest = lookup.SURE_MATCH if k > 1 else lookup.SHORTEST_MATCH
            for text in self.texts:
                lookup.look_up(text.tokens, self.stages[k].match, text.want[k], shortest)
        elif k + 1 < len(self.stages):
            self._by_rounds(k)
        else:
            self._by_steps(k)

    def _by_steps(self, k: int) -> None:
        stage = self.stages[k]
        while active := [text for text in self.texts if text.want[k] > 0]:
            steps = min(text.want[k] for text in active)
            if stage.threshold or any(text.uncomputed(k) > 1 for text in active):
                tokens, logits = self._step(k, [(text, 1) for text in active], stage.threshold > 0)
                steps = 1
            else:
                tokens, logits = self._decode(k, active, steps), None
            for index, text in enumerate(active):
                for token in tokens[index :: len(active)]:
                    text.append(token)
                text.want[k] -= steps
                if logits is not None and top_probability(logits[index]) < stage.threshold:
                    text.want[k] = 0

    def _by_rounds(self, k: int) -> None:
        turn = 0
        while any(text.want[k] > 0 for text in self.texts) and (k or turn < self.rounds):
            turn += 1
            for text in self.texts:
                left, gamma = text.want[k], self.stages[k + 1].gamma if k else text.gamma
                text.start[k] = len(text.tokens)
                if k == 0:
                    text.settled = text.first + len(text.tokens)
                text.want[k + 1] = 0 if left <= 0 else min(gamma, left - 1)
                if k == 0 and text.want[1] > 0 and self._propose_by_lookup(text, left - 1):
                    text.want[1] = 0
            if any(text.want[k + 1] > 0 for text in self.texts):
                self.extend(k + 1)
            verified = [(text, len(text.tokens) - text.start[k] + 1) for text in self.texts if text.want[k] > 0]
            chosen, _ = self._step(k, verified, False)
            at = 0
            for text, outputs in verified:
                text.want[k] -= self._accept(k, text, chosen[at : at + outputs])
                at += outputs

    def _rows_of(self, k: int, text: _RoundText, tokens: list[int], outputs: int) -> Rows:
        """Rows of stage k. A draft over the target's states leaves their base where it is."""
        certain = 0 if k and self.stages[k].shares_cache else text.settled
        return Rows(tokens, text.computed[k], text.pages, outputs, slot=text.slot, certain=certain)

    def _step(self, k: int, outputs: list[tuple[_RoundText, int]], logits: bool) -> tuple[list[int], FloatArray | None]:
        """One step of stage k over what its cache lacks. outputs: texts, and how many last rows of each give argmax."""
        executor = self.stages[k].executor
        assert executor
        rows = [self._rows_of(k, text, text.tokens[-text.uncomputed(k) :].tolist(), count) for text, count in outputs]
        started = time.perf_counter()
        result = executor.step(rows, logits)
        self.seconds[k] += time.perf_counter() - started
        for text, _ in outputs:
            text.computed[k] = text.first + len(text.tokens)
        return result

    def _decode(self, k: int, texts: list[_RoundText], steps: int) -> list[int]:
        """`steps` greedy tokens of stage k. Its cache must lack only the last token of each text."""
        executor = self.stages[k].executor
        assert executor
        rows = [self._rows_of(k, text, [text.tokens[-1]], 1) for text in texts]
        started = time.perf_counter()
        tokens = executor.decode(rows, steps)
        self.seconds[k] += time.perf_counter() - started
        for text in texts:
            text.computed[k] += steps
        return tokens

    def _accept(self, k: int, text: _RoundText, chosen: list[int]) -> int:
        """Keep drafts that match `chosen`, plus its first token that differs or follows. Returns how many tokens."""
        start = text.start[k]
        drafts = text.tokens[start:]
        kept = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
        del text.tokens[start + kept :]
        text.tokens.append(max(chosen[kept], 0) if k else chosen[kept])
        valid = text.first + start + kept  # the last token is not in any cache yet
        text.computed[k] = valid
        for below in range(k + 1, len(self.stages)):
            shared = self.stages[below].shares_cache and self.stages[k].shares_cache
            text.computed[below] = valid if shared else min(text.computed[below], valid)
        if k == 0:
            text.rounds += 1
            for place in range(min(len(drafts), MOST_DRAFTS)):
                text.drafted[place] += 1
                text.accepted[place] += place < kept
        return kept + 1

    def _propose_by_lookup(self, text: _RoundText, room: int) -> bool:
        """Let a lookup in the last stage propose to the target, bypassing the stages between. Returns whether it did.

        The tokens that those stages then lack in their own caches must still fit into one step.
        """
        if self._shortcut is None:
            return False
        for k, stage in enumerate(self.stages[:-1]):
            if not stage.shares_cache and text.uncomputed(k) > self._rows - 2 * MOST_DRAFTS:
                return False
        most = min(self._shortcut.gamma, self._rows, room)
        return lookup.look_up(text.tokens, self._shortcut.match, most, lookup.SURE_MATCH) > 0
