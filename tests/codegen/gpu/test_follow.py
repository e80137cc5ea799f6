"""Steps that are queued behind the one that runs: a kernel puts that one's tokens into their inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcompile.runtime.sampling.params import SamplingParams
from qcompile.targets import TARGETS
from tests.support.calls import fix_calls
from tests.support.cases import first
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted

SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 128, "layers": 1}
OPTIONS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 3, "top_k": 9}, {"temperature": 0}]


def interpret_engine(recipe: str) -> None:
    """Requests of different lengths of prompts and texts, of which one comes later: the tokens of an engine that waits
    for each step; in a process that has TRITON_INTERPRET set."""
    from tests.support.gpu_machine import PROMPTS, HostLaunch, Machine

    torch.manual_seed(0)
    machine = Machine(decoder(**SMALL), recipe, pages=24, fine=recipe == "bf16")
    params = [SamplingParams(max_tokens=3 + 2 * i, ignore_eos=True, **o) for i, o in enumerate(OPTIONS)]
    prompts = [PROMPTS[0], PROMPTS[3], [7] * 70]  # the last in two steps
    seen: list[str] = []
    HostLaunch.watch = staticmethod(lambda label: seen.append(label.split("-")[0]))  # type: ignore[method-assign]

    def generate(overlaps: bool) -> list[list[int]]:
        seen.clear()
        engine = machine.engine()
        engine.overlaps = overlaps
        fix_calls(engine, 2)
        requests = [engine.add(*pair) for pair in zip(prompts[:2], params, strict=False)]
        engine.step()
        engine.step()
        requests.append(engine.add(prompts[2], params[2]))
        return machine.run(engine, requests)

    waiting = generate(False)
    assert "follow" not in seen
    assert generate(True) == waiting and [len(tokens) for tokens in waiting] == [3, 5, 7]
    assert seen.count("follow") >= 4


@pytest.mark.parametrize("recipe", first(("quantspec",), ["bf16", "quantspec"]))
def test_an_engine_that_plans_ahead_interpreted(recipe: str) -> None:
    interpreted(__name__, f"interpret_engine('{recipe}')")


def interpret_kernel() -> None:
    """A token that is none, as its logits are not finite, is read as token 0 by the step that follows."""
    from qcompile import pipeline
    from qcompile.codegen.gpu.plan import make_plan
    from tests.support.gpu_machine import run_launches

    plan = make_plan(
        pipeline.plan(decoder(**SMALL), target="h200", recipe="bf16").program, TARGETS["h200"], 64, inline_asm=False
    )
    tokens = torch.tensor([4, -1, -3, 0, -2, -2, -9], dtype=torch.int32)
    given = torch.tensor([11, -1, 13], dtype=torch.int32)
    run_launches(plan.follow, {"tokens": 6}, {"token_ids": tokens, "argmax": given})
    assert tokens.tolist() == [4, 11, 13, 0, 0, 0, -9] and given.tolist() == [11, -1, 13]


def test_tokens_that_the_step_before_gives_interpreted() -> None:
    interpreted(__name__, "interpret_kernel()")
