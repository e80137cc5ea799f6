"""Sampling by GPU kernels, interpreted: the tokens that the host draws from the same logits and random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu.launches import LaunchPlan
from qcompile.runtime.sampling.accept import pick
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.sampling import distribution
from qcompile.targets import TARGETS
from tests.support.cases import first
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted
from tests.support.sampled import OPTIONS


def host(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """The token that the host draws."""
    values = logits.numpy()
    return int(values.argmax()) if params.temperature == 0 else pick(distribution(values, params), uniform)


def drawn(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    """The token of each row by the kernels: one sequence a row, at position 7 of a text that is drawn from 5 on."""
    from qcompile.codegen.gpu.rows import ARGMAX_PART, argmax_kernel
    from qcompile.codegen.gpu.sample import sampling
    from qcompile.runtime.sampling.sampling import Sampler
    from tests.support.gpu_machine import run_launches, send_sampling

    rows, vocab = logits.shape
    inputs = [replace_last(Sampler(p, 0, [], vocab).inputs(5, 3), u) for p, u in zip(params, uniforms, strict=True)]
    _, counts, sent = send_sampling(inputs, rows)
    kv: Any = None
    plan, parts = LaunchPlan(TARGETS["a100"], (kv,), 128, tuple(sampling("head", vocab, 80))), -(-vocab // ARGMAX_PART)
    every = torch.arange(rows, dtype=torch.int32)
    given: dict[str, Tensor] = {"logits": logits, "output_rows": every, "row_sequence": every.clone()}
    given |= {"positions": torch.full((rows,), 7, dtype=torch.int32), "argmax": torch.zeros(rows, dtype=torch.int32)}
    given |= sent
    work = {name: torch.full((size * rows // 4,), -1, dtype=torch.int32) for name, (size, _) in plan.scratch.items()}
    for name in ("k_totals", "p_totals"):  # zero when made, and again after each step
        work[name][:] = 0
    given["part_value"] = work["part_value"] = torch.zeros(rows * parts)
    given["part_index"] = torch.zeros(rows * parts, dtype=torch.int32)
    for final in (False, True):
        kernel = argmax_kernel(vocab, parts, final, 80)
        gpu_compile.load(kernel)[rows, 1 if final else parts](*(given[a.name] for a in kernel.arguments))
    run_launches(plan.launches, counts, {**given, **work})
    assert not work["k_totals"].any() and not work["p_totals"].any()
    return [int(token) for token in given["argmax"]]


def replace_last(sampling: Any, uniform: float) -> Any:
    """The inputs with another random number for their last token."""
    return sampling._replace(uniforms=[*sampling.uniforms[:-1], uniform]) if sampling.uniforms else sampling


def interpret_choices(vocab: int) -> None:
    """Rows with each option, with ties, zeros of both signs and tokens that are ruled out; then some rows alone."""
    torch.manual_seed(0)
    random = np.random.default_rng(3)
    params = [SamplingParams(**options) for options in ({"temperature": 0.0}, *OPTIONS)]
    logits = 2 * torch.randn(len(params), vocab)
    logits[2:8:2] = (4 * logits[2:8:2]).round() / 4
    logits[3:7:3] = logits[3:7:3].round()
    logits[:, 7], logits[:, 9] = -0.0, 0.0
    logits[4, 5] = logits[0, vocab - 1] = -math.inf
    logits[9:12, 5:30] = logits[12:14, 2:] = logits[3, 12:] = -math.inf  # most may not be chosen
    for turn in range(4 if vocab == 40 else 2):
        uniforms = [float(u) for u in random.random(len(params))]
        if turn == 0:
            uniforms = [1e-9] * len(params)
        if turn == 1:
            uniforms = [1 - 1e-7] * len(params)
        got = drawn(logits, params, uniforms)
        wanted = [host(row, p, u) for row, p, u in zip(logits, params, uniforms, strict=True)]
        assert got == wanted, (turn, got, wanted)
        if turn == 1:
            some = range(0, len(got), 3)
            alone = [drawn(logits[i : i + 1].clone(), params[i : i + 1], uniforms[i : i + 1]) for i in some]
            assert [token for [token] in alone] == got[::3]


@pytest.mark.parametrize("vocab", first((4096 + 300,), [40, 4096 + 300]))
def test_choices_interpreted(vocab: int) -> None:
    interpreted(__name__, f"interpret_choices({vocab})")


def interpret_no_number() -> None:
    """A row gives -1 if its largest logit is not finite, whatever its options."""
    logits = torch.randn(4, 50)
    logits[1, 3], logits[2, 4], logits[3] = math.nan, math.inf, -math.inf
    params = [SamplingParams(temperature=0.7, top_p=0.9, top_k=5)] * 4
    got = drawn(logits, params, [0.3] * 4)
    assert got == [host(logits[0], params[0], 0.3), -1, -1, -1]


def test_logits_that_are_no_numbers_interpreted() -> None:
    interpreted(__name__, "interpret_no_number()")


SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 128, "layers": 1}
PROMPTS = [[5, 9, 11], [7], list(range(20, 37)), [1, 2]]


def interpret_engine(how: str) -> None:
    """Requests of all kinds in one batch: the tokens that the host draws, in multi-step decodes and rounds."""
    from tests.support.gpu_machine import Machine

    torch.manual_seed(0)
    graph = decoder(**SMALL)
    machine = Machine.drafted(graph, how, pages=9)
    options: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.2, "seed": 4, "top_k": 30, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 5, "logprobs": 1} if how == "decodes" else {"temperature": 0.7, "seed": 5},
    ]
    params = [SamplingParams(max_tokens=6 - i, ignore_eos=True, **o) for i, o in enumerate(options)]

    def generate(samples: bool, gamma: int, chosen: tuple[int, ...] = (0, 1, 2, 3)) -> list[list[int]]:
        machine.let_kernels_choose(samples)
        engine = machine.engine(gamma)
        return machine.run(engine, [engine.add(PROMPTS[i], params[i]) for i in chosen])

    by_host = generate(False, 0)
    if how == "decodes":
        assert generate(True, 0) == by_host
        assert generate(True, 0, (1,)) == [by_host[1]]
    else:
        before = machine.driver.replays
        assert generate(True, 2) == by_host
        assert machine.driver.replays > before  # rounds are graphs
    if how in ("shared", "own"):
        assert generate(False, 2) == by_host


@pytest.mark.parametrize("how", first(("decodes", "lookup"), ["decodes", "shared", "own", "lookup"]))
def test_an_engine_that_draws_interpreted(how: str) -> None:
    interpreted(__name__, f"interpret_engine('{how}')")
