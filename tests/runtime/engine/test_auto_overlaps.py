"""Gamma `auto` on an executor that the host need not wait for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from qcompile.runtime.options import AUTO
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation.controller import GammaController
from qcompile.runtime.speculation.costs import GAMMAS, RoundCosts, SpeculationPrior
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.speculation.stages import DraftStage
from tests.support import fake
from tests.support.calls import fix_calls
from tests.support.fake import LateExecutor, fake_llm, reference_greedy


@pytest.mark.parametrize("pays", [False, True])
def test_the_host_does_not_wait_for_steps_where_nothing_drafts(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is chosen once and measured once, those that nobody waits for too. No token changes."""
    monkeypatch.setattr(fake, "Chosen", LateExecutor)
    llm, draft, counts = fake_llm(), fake_llm(), Counter[str]()
    costs = RoundCosts(1, 64, 1e-3, dict.fromkeys(GAMMAS, 1e-3 if pays else 10.0))
    controller = GammaController(SpeculationPrior((costs,), 0.8))
    speculation = llm.engine.speculation
    speculation.drafter = HostSpeculator(llm.executor, [DraftStage(draft.executor, 3)])
    speculation.gamma, speculation.controller = AUTO, controller
    fix_calls(llm.engine, 4)

    def count(owner: Any, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: counts.update([name]) or method(*given))

    for name in ("choose", "note_steps", "note_rounds"):
        count(controller, name)
    count(llm.executor, "start")
    result = llm.generate([[3, 1, 2]], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0]
    assert result.outputs[0].token_ids == reference_greedy([3, 1, 2], 60, eos=None)
    assert counts["choose"] == counts["note_steps"] + counts["note_rounds"]
    assert (counts["note_rounds"] > 0) is pays
    assert counts["start"] == counts["note_steps"] > (0 if pays else 10)
