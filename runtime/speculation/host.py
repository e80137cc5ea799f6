"""Rounds of speculation, step by step from the host: for levels that the GPU's graphs of rounds do not cover.

The algorithm and its results are those of the library's loop (codegen/cpu/templates/speculate.h), with any executor's
steps. The host decides after each step of a level, except that the last model decodes several greedy tokens in one call
where its executor feeds them back.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.sampling.sampling import FloatArray
from qcompile.runtime.speculation.levels import Gained, Level, Speculator
from qcompile.runtime.speculation.reencode import top_probability
from qcompile.runtime.step import Rows

if TYPE_CHECKING:
    from qcompile.runtime.engine.scheduler import Request

SHORTEST_MATCH, SURE_MATCH = 3, 4
"""Tokens that must recur before a lookup proposes what followed them; the second where a model could draft instead."""


@dataclass(slots=True)
class _Text:
    """A sequence in a call: its tokens from position `first` on, and how many positions each level's cache holds.

    want: tokens that each level has yet to append. start: index at which each level's drafts of the round begin.
    """

    tokens: array[int]
    first: int
    gamma: int
    pages: Sequence[int]
    computed: list[int]
    want: list[int]
    start: list[int]
    rounds: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def pending(self, level: int) -> int:
        """Number of tokens that the level's cache lacks."""
        return self.first + len(self.tokens) - self.computed[level]

    def append(self, token: int) -> None:
        """Append a draft. Where the level's logits are not finite (a negative token) it is 0, as any token will do."""
        self.tokens.append(max(token, 0))


class HostSpeculator(Speculator):
    """Speculation whose steps are started from the host one by one."""

    def _extend(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[list[Gained], Sequence[float]]:
        first, computed = self._text_starts(requests)
        level = 0 if rounds else 1
        texts = []
        for index, request in enumerate(requests):
            room = ends[index] - len(request.tokens)
            want, start = [0] * len(computed), [0] * len(computed)
            want[level] = min(gammas[index], room) if level else room
            held = [column[index] for column in computed]
            tokens = array("i", request.tokens[first[index] :])
            texts.append(_Text(tokens, first[index], gammas[index], request.pages, held, want, start))
        call = _Call([Level(self.target, 0, True), *self.levels], texts, rounds)
        call.extend(level)
        results = [
            Gained(t.tokens[len(r.tokens) - t.first :].tolist(), t.computed, t.rounds, t.drafted, t.accepted)
            for r, t in zip(requests, texts, strict=True)
        ]
        return results, call.seconds


class _Call:
    """One call: the levels extend some texts by up to `rounds` rounds."""

    def __init__(self, levels: list[Level], texts: list[_Text], rounds: int) -> None:
        self.levels, self.texts, self.rounds = levels, texts, rounds
        self.seconds = [0.0] * len(levels)
        target = levels[0].executor
        assert target
        self._rows = target.limits.max_tokens // len(texts) - 2
        last = levels[-1]
        self._shortcut = last if len(levels) > 2 and last.executor is None else None

    def extend(self, k: int) -> None:
        """Append the tokens wanted of level k; fewer where a lookup or a threshold ends the draft."""
        if self.levels[k].executor is None:
            shortest = SURE_MATCH if k > 1 else SHORTEST_MATCH
            for text in self.texts:
                look_up(text.tokens, self.levels[k].match, text.want[k], shortest)
        elif k + 1 < len(self.levels):
            self._by_rounds(k)
        else:
            self._by_steps(k)

    def _by_steps(self, k: int) -> None:
        level = self.levels[k]
        while active := [text for text in self.texts if text.want[k] > 0]:
            steps = min(text.want[k] for text in active)
            if level.threshold or any(text.pending(k) > 1 for text in active):
                tokens, logits = self._step(k, [(text, 1) for text in active], level.threshold > 0)
                steps = 1
            else:
                tokens, logits = self._decode(k, active, steps), None
            for index, text in enumerate(active):
                for token in tokens[index :: len(active)]:
                    text.append(token)
                text.want[k] -= steps
                if logits is not None and top_probability(logits[index]) < level.threshold:
                    text.want[k] = 0

    def _by_rounds(self, k: int) -> None:
        turn = 0
        while any(text.want[k] > 0 for text in self.texts) and (k or turn < self.rounds):
            turn += 1
            for text in self.texts:
                left, gamma = text.want[k], self.levels[k + 1].gamma if k else text.gamma
                text.start[k] = len(text.tokens)
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

    def _step(self, k: int, outputs: list[tuple[_Text, int]], logits: bool) -> tuple[list[int], FloatArray | None]:
        """One step of level k over what its cache lacks. outputs: texts, and how many last rows of each give argmax."""
        executor = self.levels[k].executor
        assert executor
        rows = [
            Rows(text.tokens[-text.pending(k) :].tolist(), text.computed[k], text.pages, count)
            for text, count in outputs
        ]
        started = time.perf_counter()
        found = executor.step(rows, logits)
        self.seconds[k] += time.perf_counter() - started
        for text, _ in outputs:
            text.computed[k] = text.first + len(text.tokens)
        return found

    def _decode(self, k: int, texts: list[_Text], steps: int) -> list[int]:
        """`steps` greedy tokens of level k, whose cache lacks only the last token of each text."""
        executor = self.levels[k].executor
        assert executor
        rows = [Rows([text.tokens[-1]], text.computed[k], text.pages, 1) for text in texts]
        started = time.perf_counter()
        tokens = executor.decode(rows, steps)
        self.seconds[k] += time.perf_counter() - started
        for text in texts:
            text.computed[k] += steps
        return tokens

    def _accept(self, k: int, text: _Text, chosen: list[int]) -> int:
        """Keep drafts that match `chosen`, plus its first token that differs or follows. Returns how many tokens."""
        start = text.start[k]
        drafts = text.tokens[start:]
        kept = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
        del text.tokens[start + kept :]
        text.tokens.append(max(chosen[kept], 0) if k else chosen[kept])
        valid = text.first + start + kept  # the last token is not in any cache yet
        text.computed[k] = valid
        for below in range(k + 1, len(self.levels)):
            shared = self.levels[below].shares_cache and self.levels[k].shares_cache
            text.computed[below] = valid if shared else min(text.computed[below], valid)
        if k == 0:
            text.rounds += 1
            for place in range(min(len(drafts), MOST_DRAFTS)):
                text.drafted[place] += 1
                text.accepted[place] += place < kept
        return kept + 1

    def _propose_by_lookup(self, text: _Text, room: int) -> bool:
        """Let a lookup in the last level propose to the target, bypassing the levels between; whether it did.

        The tokens that those levels then lack in their own caches must still fit into one step.
        """
        if self._shortcut is None:
            return False
        for k, level in enumerate(self.levels[:-1]):
            if not level.shares_cache and text.pending(k) > self._rows - 2 * MOST_DRAFTS:
                return False
        most = min(self._shortcut.gamma, self._rows, room)
        return look_up(text.tokens, self._shortcut.match, most, SURE_MATCH) > 0


def look_up(tokens: array[int], match: int, most: int, shortest: int) -> int:
    """Prompt lookup (Saxena 2023): find the longest suffix of `shortest` to `match` tokens that occurred before, in its
    latest occurrence, and append the `most` tokens that followed it. Returns how many were appended, 0 without a match.
    """
    if most <= 0:
        return 0
    end, size = len(tokens), tokens.itemsize
    before = tokens[:-1].tobytes()
    for length in range(min(match, end - 1), shortest - 1, -1):
        wanted = tokens[end - length :].tobytes()
        at = before.rfind(wanted)
        while at > 0 and at % size:  # not at a token boundary
            at = before.rfind(wanted, 0, at + len(wanted) - 1)
        if at >= 0 and at % size == 0:
            for place in range(at // size + length, at // size + length + most):
                tokens.append(tokens[place])
            return most
    return 0
