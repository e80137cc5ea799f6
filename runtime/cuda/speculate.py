"""Drafts for rounds on a GPU: by a model, in the target's cache or in one of its own, or by n-gram lookup.

Where the draft model shares the target's cache, both are at the same position when a round begins. A draft cache of its
own then lacks the last token, or the last two if all drafts were accepted. The first draft step therefore always
computes the last two tokens; recomputing a position that was in the cache already gives the same bits. For the same
reason, recurrent states of the draft's own keep the last certain position in their log, from which it can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qcompile.runtime.cuda.counts import AttentionWork, Counts, attention_counts
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.rounds import RESULTS, CudaRounds, Launches, RoundInput
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.request import Request
from qcompile.runtime.speculation import lookup
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.speculation.stages import DraftStage
from qcompile.runtime.step import Rows

_MIN_ROWS = 3
"""Fewest rows of a step for each sequence that drafts: see `Speculator.most`."""


class CudaSpeculator(CudaRounds):
    """Drafts by one model without a threshold."""

    most_lag = 1

    def __init__(self, target: CudaExecutor, stage: DraftStage) -> None:
        assert isinstance(stage.executor, CudaExecutor) and not stage.threshold
        self.draft, self._shared = stage.executor, stage.shares_cache
        most = target.limits.max_outputs
        self._pairs = {"row_sequence": [i // 2 for i in range(2 * most)]}
        self._pairs |= {"output_rows": [*range(1, 2 * most, 2)], "query_start": [*range(0, 2 * most + 1, 2)]}
        super().__init__(target, stage, {name: len(items) for name, items in self._pairs.items()} | {"unread": most})
        for name, items in self._pairs.items():
            self.state.write(name, items)
            self.state.send(name, name, len(items))

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """As `CudaRounds.rounds`. With a draft cache of its own, a request of a single token has no pair of last
        tokens: the host then runs one round step by step."""
        if self._shared:
            return super().rounds(requests, gammas, rounds, ends)
        if not all(request.sequence.computed for request in requests):
            return HostSpeculator.rounds(self, requests, gammas, 1, ends)
        result = super().rounds(requests, gammas, rounds, ends)
        for request, gamma in zip(requests, gammas, strict=True):
            if gamma:
                request.drafts.cached[0] = request.sequence.computed - 1  # a lower bound
        return result

    def samples_in_rounds(self, requests: Sequence[Request]) -> bool:
        return self._shared or all(request.sequence.computed for request in requests)

    def send_draft_inputs(self, sequences: Sequence[RoundInput], ahead: int) -> Counts:
        # 0: the base stays, of shared states and of those of sequences that do not draft.
        certain = [0 if self._shared or not s.gamma else s.certain for s in sequences]
        rows = [
            Rows(s.tokens[-1:], s.computed, s.pages, 1, slot=s.slot, certain=final)
            for s, final in zip(sequences, certain, strict=True)
        ]
        return self.draft.fill(rows, ahead, [s.sampling.unreported for s in sequences])

    def draft_addresses(self) -> dict[str, int]:
        addresses = {name: self.draft.address(name) for name in ("token_ids", "positions", "counter", "decoded")}
        own_states = self.draft.state_slots and not self._shared
        return addresses | {"certain": self.draft.address("certain") if own_states else self.state.addresses["unread"]}

    def reallocations(self) -> tuple[int, ...]:
        return (*super().reallocations(), self.draft.launcher.reallocations)

    def draft_launches(self, drafting: Counts, verifying: Counts, others: Mapping[tuple[str, str], int]) -> Launches:
        draft = self.draft
        # Recent tokens are the verifier's: its steps have the last draft of a round, which is no row of the draft's.
        seen = {("input", "seen"): self.verifier.address("seen")}
        launches, feedback = draft.plan["launches"], draft.plan["feedback"]
        first: Launches = []
        if not self._shared:
            pairs = _pair_counts(draft.plan, drafting)
            for counts in (pairs, drafting):  # before any launch holds an address that growing would change
                draft.launcher.grow(counts)
            inputs = seen | {("input", name): others["state", name] for name in self._pairs}
            inputs["input", "token_ids"] = others["state", "pair_tokens"]
            inputs["input", "positions"] = others["state", "pair_positions"]
            first = draft.launcher.prepare(launches, pairs, inputs) + draft.launcher.prepare(feedback, drafting)
        step = draft.launcher.prepare(launches + feedback, drafting, seen)
        return first + step * (verifying["queries"] - 1 - bool(first))


class CudaLookup(CudaRounds):
    """Drafts by n-gram lookup. The texts are on the GPU, where rounds append the accepted tokens."""

    reports_drafted = True

    def __init__(self, target: CudaExecutor, stage: DraftStage) -> None:
        self._text: int = target.plan["text_tokens"]
        most = target.limits.max_outputs // _MIN_ROWS
        sizes = {"match": 2, "length": most, "text": most * self._text, "drafted": RESULTS}
        super().__init__(target, stage, sizes | {"decoded": most * MOST_DRAFTS, "elsewhere": most})

    def rounds(
        self, requests: Sequence[Request], gammas: Sequence[int], rounds: int, ends: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """As `CudaRounds.rounds`, with no more rounds than the text buffers have room for."""
        room = self._text - lookup.WINDOW - 1
        return super().rounds(requests, gammas, min(rounds, room // (max(gammas) + 1)), ends)

    def samples_in_rounds(self, requests: Sequence[Request]) -> bool:
        return True

    def send_draft_inputs(self, sequences: Sequence[RoundInput], ahead: int) -> Counts:
        texts = [sequence.tokens[-lookup.WINDOW - 1 :] for sequence in sequences]
        self.state.write("match", (self.stages[0].match, lookup.SHORTEST_MATCH))
        self.state.write("length", map(len, texts))
        for index, text in enumerate(texts):
            self.state.write("text", text, index * self._text)
        self.state.send("match", "text", len(texts) * self._text)
        return {}

    def draft_addresses(self) -> dict[str, int]:
        addresses = self.state.addresses
        # The kernel that accepts also writes a draft model's inputs; here nothing reads them.
        unread = dict.fromkeys(("token_ids", "positions", "counter", "certain"), addresses["elsewhere"])
        return {**unread, "decoded": addresses["decoded"]}

    def draft_launches(self, drafting: Counts, verifying: Counts, others: Mapping[tuple[str, str], int]) -> Launches:
        return self.verifier.launcher.prepare(self.verifier.plan["lookup"], verifying, others)


def _pair_counts(plan: Mapping[str, Any], counts: Counts) -> Counts:
    """The counts of a step over the last two tokens of each sequence, from those of a step over the last one."""
    sequences = counts["sequences"]
    own = {"tokens": 2 * sequences, "queries": 2}
    work = AttentionWork(counts["splits"], own["tokens"], sequences, own["queries"])
    return counts | own | attention_counts(plan, work, AttentionWork())
