"""Biases and penalties in the CPU's library: on every instruction set Python's bits, in all kinds of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import qcompile
from qcompile import SamplingParams
from qcompile.runtime.cpu.executor import Executor, sampling_array
from qcompile.runtime.sampling.inputs import GREEDY
from qcompile.runtime.sampling.penalties import Bias, Occurrences, Penalties, penalize
from tests.codegen.cpu.test_sample import rows_of
from tests.runtime.engine.test_batches import run
from tests.support.cases import first
from tests.support.harness import TRIED
from tests.support.sampled import OPTIONS, PENALTIES, penalized, same_outputs

FIRST = 11


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("vocab", [1, 3, 17, 65, 4100])
def test_penalties_are_pythons(harness: Callable[[str], ctypes.CDLL], isa: str, vocab: int) -> None:
    """Lists of no, one and many tokens, followed by none and by several, some of which are listed or recur."""
    library, random = harness(isa), np.random.default_rng(vocab)
    for params in penalized():
        options = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        for logits in [*rows_of(vocab, random), np.full(vocab, -3e38, np.float32), np.full(vocab, 3e38, np.float32)]:
            for listed, after in ((0, 0), (0, 3), (1, 0), (3, 1), (17, 40), (2000, 5)):
                noted = Occurrences(random.integers(0, vocab, listed).tolist())
                for token in random.integers(0, vocab, listed // 2).tolist():
                    noted.note(token)
                tokens = random.integers(0, vocab, after).tolist()
                room = after + int(random.integers(1, 3))
                some = random.permutation(vocab)[: listed % 19].astype(np.int32)
                bias = Bias(some, (100 * random.uniform(-1, 1, len(some))).astype(np.float32)) if len(some) else None
                penalties = Penalties(*options, *noted.listed(), room, tokens)
                sampling = GREEDY._replace(first=FIRST, penalties=penalties, bias=bias)
                with np.errstate(over="ignore"):
                    biased, got = bias.added(logits) if bias else logits, logits.copy()
                    want = penalize(biased, *noted.listed(tokens), *options)
                entry = ctypes.byref(sampling_array([sampling]))
                best = library.harness_penalize(ctypes.c_void_p(got.ctypes.data), vocab, entry, FIRST + after)
                assert (got.view(np.int32) == want.view(np.int32)).all(), (options, listed, after)
                assert best == (want.argmax() if np.isfinite(want.max()) else -1)


@pytest.mark.parametrize("threads", first((2,), [1, 2]))
def test_an_engine_with_penalties_gives_pythons_tokens(
    tiny_checkpoint: Path, tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without drafts, alone, together, and in steps of few rows; among requests without penalties."""
    qcompile.build(str(tiny_checkpoint), tmp_path / "out", recipe="qspec", drafts=["lookup"])
    common = {"ignore_eos": True, "max_tokens": 24}
    params = penalized(**common)
    params += [SamplingParams(seed=9, **common, **one, **OPTIONS[4]) for one in PENALTIES[::4]]
    params += [SamplingParams(temperature=0, **common), SamplingParams(seed=5, **common)]
    params += [SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=1, **common)]
    work = [([5 + i, 7, 5 + i, 7, 5 + i][: 1 + i % 5], one) for i, one in enumerate(params)]
    with qcompile.load(tmp_path / "out", threads=threads, max_batch=32) as llm:
        asked: list[bool] = []
        step = Executor.step
        monkeypatch.setattr(Executor, "step", lambda self, rows, *a: asked.append(a[0]) or step(self, rows, *a))
        plain = run(llm, work)
        assert not any(asked)  # no logits are returned
        for gamma in (0, 3, 6):
            llm.engine.speculation.gamma = gamma
            assert [run(llm, [one])[0] for one in work] == plain
            assert run(llm, work) == plain
        llm.engine.scheduler.max_tokens = 5
        assert run(llm, work) == plain
        assert sum(len(set(tokens)) < 16 for tokens, *_ in plain) >= 3  # tokens recur
        monkeypatch.setattr(Executor, "samples", False)
        llm.engine.scheduler.samples, llm.engine.speculation.gamma = False, 0
        assert same_outputs(run(llm, work), plain)
