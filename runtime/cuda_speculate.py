"""What proposes in rounds on a GPU: a model, in the target's cache or in one of its own, or a lookup.

Where the model shares the target's cache, both are at the same position when a round begins. A cache of its own lacks
one token then, or two where all drafts were kept: its first step always takes both, which gives the one that was there
the same bits again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qcompile.runtime import speculate_host
from qcompile.runtime.cuda import Counts, CudaExecutor, attention_counts
from qcompile.runtime.cuda_rounds import RESULTS, CudaRounds, Launches, Part
from qcompile.runtime.executor import Rows
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.speculate import WINDOW, Level
from qcompile.runtime.speculate_host import HostSpeculator

if TYPE_CHECKING:
    from qcompile.runtime.scheduler import Request

_FEWEST_ROWS = 3
"""Rows of a step that a sequence has in rounds, at least: see `Speculator.most`."""


class CudaSpeculator(CudaRounds):
    """Drafts of one model without a threshold."""

    most_lag = 1

    def __init__(self, target: CudaExecutor, level: Level) -> None:
        assert isinstance(level.executor, CudaExecutor) and not level.threshold
        self.draft, self._shared = level.executor, level.shares_cache
        most = target.limits.max_tokens
        self._pairs = {"row_sequence": [i // 2 for i in range(2 * most)]}
        self._pairs |= {"output_rows": [*range(1, 2 * most, 2)], "query_start": [*range(0, 2 * most + 1, 2)]}
        super().__init__(target, level, {name: len(items) for name, items in self._pairs.items()})
        for name, items in self._pairs.items():
            self.state.write(name, items)
            self.state.send(name, name, len(items))

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """As `CudaRounds.rounds`; where no token precedes a last one yet, the host asks for the steps of a round."""
        if self._shared:
            return super().rounds(requests, gammas, rounds, ends)
        if not all(request.computed for request in requests):
            return HostSpeculator.rounds(self, requests, gammas, 1, ends)
        found = super().rounds(requests, gammas, rounds, ends)
        for request in requests:
            request.drafts.cached[0] = request.computed - 1  # at least
        return found

    def begin(self, parts: Sequence[Part], ahead: int) -> Counts:
        return self.draft.fill([Rows(p.tokens[-1:], p.computed, p.pages, 1) for p in parts], ahead)

    def draft_places(self) -> dict[str, int]:
        return {name: self.draft.place(name) for name in ("token_ids", "positions", "counter", "decoded")}

    def moved(self) -> tuple[int, ...]:
        return (*super().moved(), self.draft.moved)

    def proposing(self, drafting: Counts, verifying: Counts, others: Mapping[tuple[str, str], int]) -> Launches:
        draft = self.draft
        launches, feedback = draft.plan["launches"], draft.plan["feedback"]
        first: Launches = []
        if not self._shared:
            pairs = _of_pairs(draft.plan, drafting)
            for counts in (pairs, drafting):  # before anything points to what grows
                draft.grow(counts)
            inputs = {("input", name): others["state", name] for name in self._pairs}
            inputs["input", "token_ids"] = others["state", "pair_tokens"]
            inputs["input", "positions"] = others["state", "pair_positions"]
            first = draft.prepare(launches, pairs, inputs) + draft.prepare(feedback, drafting)
        each = draft.prepare(launches + feedback, drafting)
        return first + each * (verifying["queries"] - 1 - bool(first))


class CudaLookup(CudaRounds):
    """Drafts of a lookup: texts are on the GPU, and the rounds of a call add to them."""

    tells_drafted = True

    def __init__(self, target: CudaExecutor, level: Level) -> None:
        self._text: int = target.plan["text_tokens"]
        most = target.limits.max_tokens // _FEWEST_ROWS
        sizes = {"match": 2, "length": most, "text": most * self._text, "drafted": RESULTS}
        super().__init__(target, level, sizes | {"decoded": most * MOST_DRAFTS, "elsewhere": most})

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """As `CudaRounds.rounds`, of as many as texts have room for."""
        room = self._text - WINDOW - 1
        return super().rounds(requests, gammas, min(rounds, room // (max(gammas) + 1)), ends)

    def begin(self, parts: Sequence[Part], ahead: int) -> Counts:
        texts = [part.tokens[-WINDOW - 1 :] for part in parts]
        self.state.write("match", (self.levels[0].match, speculate_host.SHORTEST_MATCH))
        self.state.write("length", map(len, texts))
        for index, text in enumerate(texts):
            self.state.write("text", text, index * self._text)
        self.state.send("match", "text", len(texts) * self._text)
        return {}

    def draft_places(self) -> dict[str, int]:
        places = self.state.addresses
        unread = dict.fromkeys(("token_ids", "positions", "counter"), places["elsewhere"])  # no model drafts from there
        return {**unread, "decoded": places["decoded"]}

    def proposing(self, drafting: Counts, verifying: Counts, others: Mapping[tuple[str, str], int]) -> Launches:
        return self.verifier.prepare(self.verifier.plan["lookup"], verifying, others)


def _of_pairs(plan: Mapping[str, Any], counts: Counts) -> Counts:
    """The counts of a step of the last two tokens of each sequence, from those of a step of the last ones."""
    sequences = counts["sequences"]
    own = {"tokens": 2 * sequences, "queries": 2}
    return counts | own | attention_counts(plan, counts["splits"], own["tokens"], sequences, own["queries"])
