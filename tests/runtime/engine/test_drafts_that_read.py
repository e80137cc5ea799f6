"""Steps that the host does not wait for, where drafts read what the executor returns beside tokens, as heads do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from qcompile.runtime.request import Request
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation.stages import Speculator
from qcompile.runtime.step import Rows
from tests.support import fake
from tests.support.calls import fix_calls
from tests.support.fake import VOCAB, LateExecutor, fake_llm, reference_greedy


class ReadingDrafts(Speculator):
    """Needs what each step returns that has rows of a prompt, and what `needs(i)` of those that decode.

    Checks that it is told of a call that it reads when that has run, and before the next one starts.
    """

    def __init__(self, executor: LateExecutor, needs: Callable[[int], bool]) -> None:
        super().__init__(executor, [])
        self.started = self.read = self.noted = 0
        self._unread = False
        self._needs, self._calls, self._reads, self._start = needs, itertools.count(), False, executor.start
        executor.start = self._started  # type: ignore[method-assign]

    def _started(self, rows: Sequence[Rows], *rest: Any) -> Callable[[], list[int]]:
        assert not self._unread
        self._unread = self._reads
        self.started += 1
        return self._start(rows, *rest)

    def rest(self, steps: int) -> bool:
        self._reads = not steps or self._needs(next(self._calls))
        return self._reads

    def note(self, requests: Sequence[Request], rows: Sequence[Rows], steps: int) -> None:
        self.noted += 1
        assert isinstance(self.target, LateExecutor)
        if not self._reads:
            return
        self.read += self._unread
        self._unread = False
        assert not self.target._late
        for request, row in zip(requests, rows, strict=True):
            assert not request.sequence.pages or request.sequence.computed == row.start + len(row.tokens) + steps - 1


@pytest.mark.parametrize("steps", [1, 3])
def test_what_drafts_read_is_read_before_the_next_step(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other steps are queued behind the one that runs, also those that are read. No token changes."""
    monkeypatch.setattr(fake, "Chosen", LateExecutor)
    llm, rng = fake_llm(max_batch=3), random.Random(7)
    drafts = llm.engine.speculation.drafter = ReadingDrafts(llm.executor, lambda call: call % 5 < 2)
    fix_calls(llm.engine, steps)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 150))] for _ in range(8)]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.outputs[0].token_ids == reference_greedy(prompt, 24)
    assert llm.executor.most_late == 2
    assert 5 < drafts.read < drafts.started <= drafts.noted
    llm.engine.check()
