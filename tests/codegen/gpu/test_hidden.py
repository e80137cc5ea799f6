"""Final hidden states by GPU kernels, interpreted: what the output head reads, the same in steps of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qcompile import pipeline
from qcompile.codegen.gpu.plan import make_plan
from qcompile.runtime.cuda.hidden import why_not
from qcompile.targets import TARGETS
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted

SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 64, "layers": 1}
TEXTS = [[5, 9, 11], [7], [(7 * i) % 40 for i in range(19)]]


def interpret_hidden(head: str) -> None:
    """Pooled states of an engine, for an output head that reads numbers of each format."""
    from tests.support.gpu_machine import Machine

    graph = decoder(**SMALL | {"hidden": 256 if head == "nested" else 128})  # two groups of 128, or none
    weight = graph.weights["head"].float().numpy()
    engine = Machine(graph, "bf16", pages=9, max_tokens=16, head_dtype=head).engine()
    last, mean = engine.pooled(TEXTS, "last"), engine.pooled(TEXTS, "mean")
    states: Any = engine.executor.hidden
    assert states.width == weight.shape[1] and last.dtype == np.float32
    for place, text in enumerate(TEXTS):
        ((_, _, logits),) = list(engine.forward([text[:16]], 16))
        assert np.array_equal(engine.pooled([text], "last")[0], last[place])
        assert np.array_equal(engine.pooled([text], "mean")[0], mean[place])
        if len(text) <= 16:
            assert np.abs(weight @ last[place] - logits[-1]).max() < 0.02 * np.abs(logits).max()
            assert np.abs(weight @ mean[place] - logits.mean(0)).max() < 0.02 * np.abs(logits).max()
    engine.check()


@pytest.mark.parametrize("head", ["int8", "bf16", pytest.param("nested", marks=pytest.mark.exhaustive)])
def test_hidden_states_are_what_the_head_reads_interpreted(head: str) -> None:
    interpreted(__name__, f"interpret_hidden({head!r})")


def test_plans_without_hidden_states_say_why() -> None:
    program = pipeline.plan(decoder(**SMALL), target="h100", recipe="qserve").program
    plan = {"hidden": make_plan(program, TARGETS["h100"]).hidden}
    assert why_not(plan).startswith("passes have changed them: build it with a recipe without rotate")
    assert why_not({}) == "it was built by an earlier version of qcompile: build it again"
    assert not why_not({"hidden": {"before": "head"}})
