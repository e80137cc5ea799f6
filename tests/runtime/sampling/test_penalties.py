"""Penalties, and the list of tokens that they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qcompile.errors import OverflowedError
from qcompile.runtime.sampling.inputs import GREEDY
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.penalties import Occurrences, penalize
from qcompile.runtime.sampling.sampling import Sampler
from qcompile.runtime.speculation.stages import DraftStage, Speculator
from tests.support.fake import fake_llm
from tests.support.sampled import penalized

pytestmark = pytest.mark.usefixtures("executors")

VOCAB = 300


def dense(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """Logits with penalties, from counts of every token of the vocabulary."""
    seen, counts = np.zeros(len(logits), bool), np.zeros(len(logits), np.int64)
    if params.repetition_penalty != 1:
        seen[prompt + output] = True
    np.add.at(counts, np.array(output, np.int64), 1)
    factor = np.float32(params.repetition_penalty)
    scaled = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
    less = (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
    return np.where((counts > 0) & params.counts, scaled - less, scaled)


@pytest.mark.parametrize("length", [0, 1, 3, 17, 200])
def test_the_list_gives_the_bits_that_counts_of_all_tokens_give(length: int) -> None:
    random = np.random.default_rng(length)
    prompt, output = ([int(t) for t in random.integers(0, VOCAB, length)] for _ in range(2))
    for params in penalized():
        logits = (random.standard_normal(VOCAB) * 5).astype(np.float32)
        logits[::7], logits[1::7], logits[2::7] = -0.0, -np.inf, 1e-42
        noted = Occurrences(prompt if params.repetition_penalty != 1 else ())
        for token in output:
            noted.note(token)
        options = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        before = logits.copy()
        got, want = penalize(logits, *noted.listed(), *options), dense(logits, prompt, output, params)
        assert (got.view(np.int32) == want.view(np.int32)).all()
        assert (logits.view(np.int32) == before.view(np.int32)).all()


def test_tokens_ahead_count_as_if_they_were_noted() -> None:
    guessing, noted = Occurrences([5, 9, 5, 2]), Occurrences([5, 9, 5, 2])
    for token in (9, 7, 7):
        guessing.note(token)
        noted.note(token)
    assert [part.tolist() for part in guessing.listed()] == [[5, 9, 2, 7], [0, 1, 0, 2]]
    for token in (7, 4, 5, 4):
        noted.note(token)
    ahead, after = guessing.listed([7, 4, 5, 4]), noted.listed()
    assert dict(zip(*map(np.ndarray.tolist, ahead), strict=True)) == dict(
        zip(*map(np.ndarray.tolist, after), strict=True)
    )
    assert [part.tolist() for part in guessing.listed()] == [[5, 9, 2, 7], [0, 1, 0, 2]]


def test_an_executor_gets_the_list() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.2)
    sampler = Sampler(params, 0, [3, 4, 3], VOCAB)
    sampler.took([7, 3])
    samples = sampler.inputs(4, 6, [9])
    given = samples.penalties
    assert given and (samples.temperature, samples.first, given.room, given.ahead) == (0, 4, 6, [9])
    assert given.tokens.tolist() == [3, 4, 7] and given.counts.tolist() == [1, 0, 1]
    assert sampler.inputs(4, 0) is GREEDY
    assert Sampler(SamplingParams(temperature=0), 0, [3], VOCAB).inputs(0, 1) is GREEDY


def test_penalties_that_overflow_are_refused() -> None:
    logits = np.full(8, 3e38, np.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, repetition_penalty=0.5)
        with pytest.raises(OverflowedError), np.errstate(over="ignore"):
            Sampler(params, 0, [3], 8).draw(logits)


def test_drafts_have_the_penalties_of_the_target() -> None:
    """Of a model that drafts for itself all drafts are accepted: penalties know the drafts before each."""
    params = [replace(one, min_p=0.0) for one in penalized(max_tokens=40, ignore_eos=True) if one.temperature]
    with fake_llm() as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate([[3, 4]] * len(params), params)]
        llm.engine.speculation.drafter = Speculator(llm.executor, [DraftStage(llm.executor, 4, shares_cache=True)])
        llm.engine.speculation.gamma = 4
        for one, tokens in zip(params, plain, strict=True):
            output = llm.generate([[3, 4]], one)[0]
            assert output.outputs[0].token_ids == tokens
            assert output.speculation and output.speculation.accepted == output.speculation.drafted
            assert output.speculation.drafted[3] > 3


def test_engine_without_logits_gives_the_tokens_of_python() -> None:
    """Requests of all penalties in a batch, in multi-step decodes; a request of many alternatives ends these."""
    prompts = [[1], [2, 3, 2], list(range(4, 40)), [9, 9], [7, 8], [30], [8], [1, 2], [50], [6, 4]]
    for more in ({}, {"logprobs": 2}, {"logprobs": 21}):
        params = [replace(one, min_p=0.0) for one in penalized(max_tokens=40, ignore_eos=True)]
        params[3] = SamplingParams(temperature=0, frequency_penalty=0.3, max_tokens=40, ignore_eos=True, **more)
        result = []
        for samples in (True, False):
            with fake_llm(max_batch=len(params)) as llm:
                llm.executor.samples = samples  # type: ignore[misc]
                llm.engine.scheduler.samples = samples
                outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
                result.append([(output.token_ids, output.logprobs) for output in outputs])
                library = llm.executor.library  # type: ignore[attr-defined]
                assert (max(library.decodes, default=1) > 1) is (samples and more.get("logprobs", 0) < 21)
        assert result[0] == result[1]
