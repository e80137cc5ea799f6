"""Speculation over recurrent states by GPU kernels, interpreted: tokens are those without drafts."""

from __future__ import annotations

from typing import Any

import pytest

from qcompile.runtime.cuda.rounds import CudaRounds
from qcompile.runtime.sampling.sampling import SamplingParams
from qcompile.runtime.speculation import lookup
from qcompile.runtime.speculation.host import HostSpeculator
from tests.support.calls import fix_calls
from tests.support.graphs import decoder, recurrent
from tests.support.interpreted import interpreted

SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "key_heads": 1, "key_dim": 32, "value_dim": 64}
SMALL |= {"layers": 1, "attention": False}
ATTENTION: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 128}
PROMPTS = ([31], [5, 9, 11])


def interpret_rounds(target: str, draft: str) -> None:
    """Plain decoding, graphs of rounds and rounds by the host, for two requests of which one ends early."""
    from tests.support.gpu_machine import Machine

    lookup.SHORTEST_MATCH = 1  # so that a lookup finds something
    models = {"states": recurrent(**SMALL), "attention": decoder(**ATTENTION, layers=1), "lookup": "lookup"}
    # 4 bits of the model itself are often right; a draft by another kind of layers is nearly always wrong.
    drafts = [] if draft == "shared" else [models[draft]]
    machine = Machine(models[target], "nested" if draft == "shared" else "bf16", pages=9, drafts=drafts)
    graphs = machine.speculator
    assert isinstance(graphs, CudaRounds)
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (9, 3)]
    found, kept = [], []
    for gamma, speculator in ((0, None), (2, graphs), (2, HostSpeculator(machine.target, graphs.stages))):
        machine.speculator = speculator
        engine = machine.engine(gamma)
        fix_calls(engine, 3)
        requests = [engine.add(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
        found.append(machine.run(engine, requests))
        kept.append([(r.drafts.metrics.rounds, r.drafts.metrics.drafted, r.drafts.metrics.accepted) for r in requests])
    assert found[1] == found[2] == found[0]
    assert kept[1] == kept[2] and machine.driver.replays > 0
    assert sum(kept[1][0][1]) > 0
    if target == "states" and draft != "attention":
        assert sum(kept[1][0][2]) > 0  # some drafts are right


PAIRS = [(target, draft) for target in ("states", "attention") for draft in ("shared", "states", "lookup", "attention")]


@pytest.mark.parametrize(("target", "draft"), [*PAIRS[:4], PAIRS[5]])
def test_rounds_over_states_interpreted(target: str, draft: str) -> None:
    interpreted(__name__, f"interpret_rounds({target!r}, {draft!r})")
