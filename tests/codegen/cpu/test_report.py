"""Log probabilities by the CPU's library: on every instruction set Python's, in all kinds of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qcompile
from qcompile import SamplingParams
from qcompile.runtime.cpu.executor import Executor, sampling_array
from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling.inputs import GREEDY
from qcompile.runtime.sampling.logprobs import empty_reports, logprobs_of, reported_logprobs
from tests.codegen.cpu.test_sample import rows_of
from tests.runtime.engine.test_batches import Work, run
from tests.support.cases import first
from tests.support.harness import TRIED
from tests.support.sampled import OPTIONS, PENALTIES, same_logprobs, same_outputs


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("vocab", [1, 3, 17, 64, 65, 4100])
def test_reports_are_pythons(harness: Callable[[str], ctypes.CDLL], isa: str, vocab: int) -> None:
    """With no, one, many and all alternatives; of likely and unlikely tokens, of ties and of such ruled out."""
    library, random = harness(isa), np.random.default_rng(vocab)
    rows = rows_of(vocab, random)
    rows[0][random.random(vocab) < 0.3] = rows[0].max()
    for logits in rows:
        ranked = np.argsort(-logits, kind="stable")
        for alternatives in {min(k, vocab) for k in (0, 1, 5, 20)}:
            for token in {int(ranked[0]), int(ranked[-1]), int(ranked[vocab // 2]), 0, vocab - 1}:
                reports = empty_reports(1, alternatives)
                entry = sampling_array([GREEDY._replace(reports=reports)])
                address = ctypes.c_void_p(logits.ctypes.data)
                assert library.harness_report(address, vocab, token, ctypes.byref(entry)) == 0
                told = reported_logprobs(reports, [token], None)
                wanted = logprobs_of(logits, token, alternatives, None)
                assert same_logprobs(told, [wanted]), (alternatives, token)
                assert list(reports[0, 4 + alternatives :]) == list(ranked[:alternatives])


def work_of(vocab: int) -> list[Work]:
    """Requests with log probabilities: greedy, drawn and with penalties, among others that have none."""
    common: dict[str, Any] = {"ignore_eos": True, "max_tokens": 20}
    options = [*OPTIONS[:6], {"temperature": 0}, *({"temperature": 0} | one for one in PENALTIES)]
    params = [SamplingParams(seed=i, logprobs=(0, 1, 5, 20)[i % 4], **common, **o) for i, o in enumerate(options)]
    params[3], params[10] = (replace(params[at], logprobs=None) for at in (3, 10))
    params.append(SamplingParams(temperature=0, **common))
    params.append(SamplingParams(temperature=0, logprobs=21, **common))
    return [([5 + i, 7, 5 + i, 7, 5 + i][: 1 + i % 5], one) for i, one in enumerate(params)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("report") / "out"
    qcompile.build(str(tiny_checkpoint), out, recipe="qspec", drafts=["lookup"])
    return out


def by_python(llm: LLM, work: list[Work], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the requests get from logits, without drafts."""
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "samples", False)
        llm.engine.scheduler.samples, gamma, llm.engine.speculation.gamma = False, llm.engine.speculation.gamma, 0
        result = run(llm, work)
        llm.engine.scheduler.samples, llm.engine.speculation.gamma = True, gamma
    return result


@pytest.mark.parametrize("threads", first((2,), [1, 2]))
def test_an_engine_reports_what_python_finds(artifact: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits alone, together, in small steps, multi-step decodes and rounds; and Python's but for rounding."""
    with qcompile.load(artifact, threads=threads, max_batch=32) as llm:
        work = work_of(llm.vocab_size)
        assert llm.engine.speculation.gamma
        llm.engine.speculation.gamma = 0
        asked: list[bool] = []
        step, decodes, decode = Executor.step, [1], Executor.decode
        monkeypatch.setattr(Executor, "step", lambda self, rows, *a: asked.append(a[0]) or step(self, rows, *a))
        monkeypatch.setattr(Executor, "decode", lambda self, *a: decodes.append(a[1]) or decode(self, *a))
        plain = run(llm, work[:-1])
        assert not any(asked) and max(decodes) > 1
        plain += run(llm, work[-1:])
        assert any(asked)
        for gamma in (0, 3, 6):
            llm.engine.speculation.gamma = gamma
            assert [run(llm, [one])[0] for one in work[::3]] == plain[::3]
            asked.clear()
            assert run(llm, work[:-1]) == plain[:-1]  # in rounds
            assert not any(asked)
            assert run(llm, work) == plain
        llm.engine.scheduler.max_tokens = 5
        assert run(llm, work) == plain
        llm.engine.scheduler.max_tokens = 512
        assert same_outputs(by_python(llm, work, monkeypatch), plain)


def ends_of(llm: LLM, params: list[SamplingParams]) -> list[tuple[Any, ...]]:
    """All samples of a prompt with each of the parameters."""
    outputs = llm.generate([[5, 7, 5]] * len(params), params)
    samples = [sample for output in outputs for sample in output.outputs]
    assert all(len(one.logprobs or ()) == len(one.token_ids) for one in samples)
    return [(s.token_ids, s.logprobs, s.text, s.finish_reason, s.stop_reason) for s in samples] + [
        (None, None, round(s.cumulative_logprob or 0, 9)) for s in samples
    ]


def test_ends_cut_the_reports(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At an end of text, a stop text and a limit, within a multi-step decode or round; for several samples too."""
    with qcompile.load(artifact, threads=1, max_batch=32) as llm:
        llm.engine.speculation.gamma = 0
        options = SamplingParams(temperature=0.9, seed=4, logprobs=2, max_tokens=20)
        free = llm.generate([[5, 7, 5]], replace(options, ignore_eos=True))[0].outputs[0]
        llm.engine.postprocessor.eos = frozenset([free.token_ids[11]])
        assert free.logprobs
        word = next(one.decoded_token for one in free.logprobs[7].values())
        params = [options, replace(options, stop=word), replace(options, n=3), replace(options, max_tokens=6)]
        plain = ends_of(llm, params)
        assert {"stop", "length"} == {end[3] for end in plain[: len(plain) // 2]}
        assert len(plain[0][0]) <= 12 and len(plain[1][0]) <= 8
        for gamma in (3, 6):
            llm.engine.speculation.gamma = gamma
            assert ends_of(llm, params) == plain
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "samples", False)
            llm.engine.scheduler.samples, llm.engine.speculation.gamma = False, 0
            assert same_outputs(ends_of(llm, params), plain)
