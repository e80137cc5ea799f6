"""Sampling by the CPU's library: on every instruction set the token that the host draws by the same random number."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import qcompile
from qcompile.runtime.cpu.executor import Executor, sampling_array
from qcompile.runtime.sampling.accept import pick
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.sampling import Sampler, distribution
from tests.runtime.engine.test_batches import run
from tests.support.cases import first
from tests.support.harness import TRIED
from tests.support.sampled import OPTIONS, same_outputs


def drawn(library: ctypes.CDLL, logits: np.ndarray, params: SamplingParams, uniform: float) -> int:
    sampling = Sampler(params, 0, [], len(logits)).inputs(0, 1)._replace(uniforms=[uniform])
    array = sampling_array([sampling])
    best = int(logits.argmax())
    token: int = library.harness_draw(ctypes.c_void_p(logits.ctypes.data), len(logits), best, ctypes.byref(array))
    return token


# Random numbers and top-p stay 1e-7 away from 1, as nearer the order of summation decides what is the last token, and
# off 0, which would choose the first of weights as small as 1e-309, where the library has 0.


def rows_of(vocab: int, random: np.random.Generator) -> list[np.ndarray]:
    """Logits: spread out, nearly equal, with ties, with zeros of both signs, and with tokens that are ruled out."""
    rows = [random.standard_normal(vocab) * scale for scale in (2, 0.01, 9, 0.5)]
    rows.append(np.round(rows[0]))
    rows.append(np.round(rows[2] / 4) * 4)
    rows[4][: vocab // 2] *= -0.0
    rows[1][random.random(vocab) < 0.5] = -np.inf
    rows[1][0] = 0.0
    rows.append(np.zeros(vocab))
    rows.append(-40 - np.abs(rows[2]))
    return [row.astype(np.float32) for row in rows]


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("vocab", [1, 3, 17, 65, 4100])
def test_draws_are_the_hosts(harness: Callable[[str], ctypes.CDLL], isa: str, vocab: int) -> None:
    library, random = harness(isa), np.random.default_rng(vocab)
    for options in OPTIONS:
        params = SamplingParams(**options)
        for logits in rows_of(vocab, random):
            for uniform in (1e-9, 1 - 1e-7, float(random.random())):
                wanted = pick(distribution(logits, params), uniform)
                assert drawn(library, logits, params, uniform) == wanted, (options, uniform)


@pytest.mark.parametrize("threads", first((2,), [1, 2]))
def test_an_engine_that_draws_gives_the_hosts_tokens(
    tiny_checkpoint: Path, tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without drafts, alone, together, and in steps of few rows; requests of every kind."""
    qcompile.build(str(tiny_checkpoint), tmp_path / "out", recipe="qspec", drafts=["lookup"])
    params = [SamplingParams(max_tokens=12 + i, seed=i, ignore_eos=True, **o) for i, o in enumerate(OPTIONS)]
    params += [SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=0.7, seed=1, logprobs=2)]
    params += [SamplingParams(temperature=0.7, seed=2, presence_penalty=1.0)]
    work = [([5 + i, 7, 5 + i, 7, 5 + i][: 1 + i % 5], one) for i, one in enumerate(params)]
    with qcompile.load(tmp_path / "out", threads=threads, max_batch=32) as llm:
        for gamma in (0, 3, 6):
            llm.engine.speculation.gamma = gamma
            together = run(llm, work)
            assert [run(llm, [one])[0] for one in work] == together
            if gamma == 0:
                plain = together
            assert together == plain
        llm.engine.scheduler.max_tokens = 5
        assert run(llm, work) == plain
        monkeypatch.setattr(Executor, "samples", False)
        llm.engine.scheduler.samples, llm.engine.speculation.gamma = False, 0
        assert same_outputs(run(llm, work), plain)
