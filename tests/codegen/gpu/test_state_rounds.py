"""Speculation over recurrent states by GPU kernels, interpreted: tokens are those without drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcompile.codegen.gpu.compile import load
from qcompile.codegen.gpu.rounds import round_launches
from qcompile.runtime.cuda.rounds import CudaRounds
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation import lookup
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.step import EVERYTHING, Rows
from tests.support.calls import fix_calls
from tests.support.cases import first
from tests.support.graphs import decoder, recurrent
from tests.support.interpreted import interpreted

SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "key_heads": 1, "key_dim": 32, "value_dim": 64}
SMALL |= {"layers": 1, "attention": False}
ATTENTION: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 128}
PROMPTS = ([31], [5, 9, 11])


def interpret_rounds(target: str, draft: str, states: str = "f32") -> None:
    """Plain decoding, graphs of rounds and rounds by the host, for two requests of which one ends early."""
    from tests.support.gpu_machine import Machine

    lookup.SHORTEST_MATCH = 1  # so that a lookup finds something
    models = {"states": recurrent(**SMALL), "attention": decoder(**ATTENTION, layers=1), "lookup": "lookup"}
    # 4 bits of the model itself are often right; a draft by another kind of layers is nearly always wrong.
    drafts = [] if draft == "shared" else [models[draft]]
    options = {} if target == "attention" else {"cache.states": states}
    machine = Machine(
        models[target], "nested" if draft == "shared" else "bf16", pages=9, drafts=drafts, options=options
    )
    graphs = machine.speculator
    assert isinstance(graphs, CudaRounds)
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (7, 2)]
    result, kept = [], []
    for gamma, speculator in ((0, None), (2, graphs), (2, HostSpeculator(machine.target, graphs.stages))):
        machine.speculator = speculator
        engine = machine.engine(gamma)
        fix_calls(engine, 3)
        requests = [engine.add(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
        result.append(machine.run(engine, requests))
        kept.append([(r.drafts.metrics.rounds, r.drafts.metrics.drafted, r.drafts.metrics.accepted) for r in requests])
    assert result[1] == result[2] == result[0]
    assert kept[1] == kept[2] and machine.driver.replays > 0
    assert sum(kept[1][0][1]) > 0
    if target == "states" and draft != "attention":
        assert sum(kept[1][0][2]) > 0  # some drafts are right


PAIRS = [(target, draft) for target in ("states", "attention") for draft in ("shared", "states", "lookup", "attention")]


@pytest.mark.parametrize(("target", "draft"), first((*PAIRS[:3], PAIRS[5]), [*PAIRS[:4], PAIRS[5]]))
def test_rounds_over_states_interpreted(target: str, draft: str) -> None:
    interpreted(__name__, f"interpret_rounds({target!r}, {draft!r})")


def test_rounds_over_states_in_fewer_bits_interpreted() -> None:
    interpreted(__name__, "interpret_rounds('states', 'shared', 'bf16')")


def interpret_what_is_certain() -> None:
    """What the kernels of a round let states keep: of a target up to its last token, of a draft one less, and nothing
    of sequences that have ended, nor of a draft for those that do not draft."""
    rows, accept = (launch.variants[0].code for launch in round_launches(states=True, draft_states=True))
    assert rows and accept
    place, left, most = [10, 20, 30, 40], [9, 0, 1, 7], [2, 2, 2, 0]
    count, queries = len(place), 3
    state = {name: torch.zeros(2 * count * queries, dtype=torch.int32) for name in (a.name for a in accept.arguments)}
    state |= {name: torch.full((count * queries,), -9, dtype=torch.int32) for name in ("certain", "draft_certain")}
    state |= {name: torch.zeros(count * queries, dtype=torch.int32) for name in ("token_ids", "positions")}
    for name, items in (("place", place), ("left", left), ("most", most), ("last", [1, 2, 3, 4])):
        state[name][:count] = torch.tensor(items)
    load(rows)[(1,)](*(state[a.name] for a in rows.arguments[:-2]), count, queries)
    assert state["certain"].tolist() == [11, 0, 31, 41, *[-9] * (count * (queries - 1))]
    load(accept)[(1,)](*(state[a.name] for a in accept.arguments[:-2]), count, queries)
    # All drafts are 0, as is what the target chooses; the third sequence reaches its end, the fourth has no drafts.
    assert state["place"][:count].tolist() == [13, 20, 31, 41]
    assert state["draft_certain"].tolist() == [13, 0, 0, 0, *[-9] * (count * (queries - 1))]


def test_what_is_certain_interpreted() -> None:
    interpreted(__name__, "interpret_what_is_certain()")


def interpret_certain_inputs() -> None:
    """A draft with states of its own leaves out the last certain position, which a round computes again."""
    from tests.support.gpu_machine import Machine

    machine = Machine(recurrent(**SMALL), "bf16", pages=9, drafts=[recurrent(**SMALL)])
    parts = [Rows([5, 6, 7], start, [0], 1, slot=start, certain=certain) for start, certain in CERTAIN]
    for executor, wanted in ((machine.target, [EVERYTHING, 4, 0]), (machine.speculator.draft, [2, 3, 0])):
        executor.fill(parts)
        assert machine.driver.at(executor.address("certain"), "*i32")[:3].tolist() == wanted
        assert machine.driver.at(executor.address("state_slots"), "*i32")[:3].tolist() == [0, 3, 6]


CERTAIN = ((0, EVERYTHING), (3, 4), (6, 0))


def test_certain_inputs_interpreted() -> None:
    interpreted(__name__, "interpret_certain_inputs()")
