"""The distribution each option gives, and draws from it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from qcompile.errors import UnsupportedError
from qcompile.runtime.sampling.logprobs import logprobs_of
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.penalties import penalize
from qcompile.runtime.sampling.sampling import Sampler, distribution

LOGITS = np.array([2.0, -1.0, 0.5, 3.0, 3.0, -4.0, 1.0, 0.0], np.float32)


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values.astype(np.float64) - values.max())
    return weights / weights.sum()


def dense(params: SamplingParams, logits: np.ndarray = LOGITS) -> np.ndarray:
    ids, probabilities = distribution(logits, params)
    assert (np.diff(ids) > 0).all() and probabilities.sum() == pytest.approx(1)
    full = np.zeros(len(logits))
    full[ids] = probabilities
    return full


def test_temperature() -> None:
    np.testing.assert_allclose(dense(SamplingParams(temperature=1.0)), softmax(LOGITS))
    np.testing.assert_allclose(dense(SamplingParams(temperature=0.5)), softmax(LOGITS * 2))
    assert np.isfinite(dense(SamplingParams(temperature=1e-6))).all()


def test_the_least_temperatures_draw_the_likeliest() -> None:
    """Dividing by them overflows what the logits' differences do not."""
    single = LOGITS.copy()
    single[3] += 1
    for options in ({}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}):
        for temperature in (5e-324, 1e-320, 1e-300):
            got = dense(SamplingParams(temperature=temperature, **options), single)
            assert np.flatnonzero(got).tolist() == [3]
            assert np.flatnonzero(dense(SamplingParams(temperature=temperature))).tolist() == [3, 4]
    assert np.count_nonzero(dense(SamplingParams(temperature=1e308, min_p=0.1, top_p=0.99))) == 8


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), max_tokens=np.uint8(4), top_k=np.int32(2))
    assert params == SamplingParams(temperature=0.5, seed=3, max_tokens=4, top_k=2)
    assert type(params.temperature) is float and type(params.seed) is int


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad in (np.nan, np.inf):
        for options in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.2}):
            with pytest.raises(UnsupportedError, match="not finite"):
                distribution(np.where(np.arange(8) == 2, np.float32(bad), LOGITS), SamplingParams(**options))


def test_top_k_keeps_ties() -> None:
    expected = softmax(np.where(np.isin(np.arange(8), [3, 4]), LOGITS, -np.inf))
    for k in (1, 2):
        np.testing.assert_allclose(dense(SamplingParams(top_k=k)), expected)
    assert np.count_nonzero(dense(SamplingParams(top_k=3))) == 3
    for k in (0, -1, 8, 100):
        assert np.count_nonzero(dense(SamplingParams(top_k=k))) == 8


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    full = softmax(LOGITS)
    for p in (0.01, 0.3, 0.6, 0.9, 0.999, 1.0):
        got = dense(SamplingParams(top_p=p))
        kept = np.flatnonzero(got)
        assert full[kept].sum() >= p - 1e-12 or len(kept) == 8
        assert full[kept].sum() - full[kept].min() < p
        np.testing.assert_allclose(got[kept], full[kept] / full[kept].sum())


def test_min_p() -> None:
    full = softmax(LOGITS / np.float32(0.7))
    got = dense(SamplingParams(temperature=0.7, min_p=0.1))
    assert set(np.flatnonzero(got)) == set(np.flatnonzero(full >= 0.1 * full.max()))


def test_top_p_counts_what_top_k_left() -> None:
    got = dense(SamplingParams(top_k=3, top_p=0.75))
    left = softmax(LOGITS[[0, 3, 4]])
    assert left[1] + left[2] >= 0.75 > left[1]
    assert set(np.flatnonzero(got)) == {3, 4}


def test_repetition_penalty_is_the_reference_one() -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers").generation.logits_process
    seen = np.array([7, 0, 1], np.int32)
    processor = processors.RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([[0, 1, 7, 0]]), torch.from_numpy(LOGITS)[None])[0]
    np.testing.assert_array_equal(penalize(LOGITS, seen, 0 * seen, 1.3, 0.5, 0.5), expected.numpy())


def test_penalty_sees_prompt_and_output() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=4.0), 0, [3], 8)
    assert [sampler.draw(LOGITS) for _ in range(3)] == [4, 0, 6]


def test_frequency_and_presence_count_the_output_alone() -> None:
    """Each draw lowers what was drawn; the prompt lowers nothing."""
    params = SamplingParams(temperature=0, frequency_penalty=0.75, presence_penalty=0.5)
    sampler = Sampler(params, 0, [3, 3, 3], 8)
    lowered, drawn = LOGITS.copy(), []
    for _ in range(12):
        want = int(lowered.argmax())
        drawn.append(sampler.draw(LOGITS))
        assert drawn[-1] == want
        lowered[want] -= 0.75 if want in drawn[:-1] else 1.25
    assert max(Counter(drawn).values()) > 2  # counted, not only seen
    assert Sampler(SamplingParams(temperature=0, presence_penalty=-1), 0, [], 8).draw(LOGITS) == 3


def test_penalties_count_what_drafts_guessed() -> None:
    """As if the tokens ahead had been drawn already."""
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=1.5, presence_penalty=-0.5)
    noted, guessing = (Sampler(params, 0, [1], 8) for _ in range(2))
    for token in (4, 4, 6):
        noted.note(token)
    for got, want in zip(guessing.distribution(LOGITS, [4, 4, 6]), noted.distribution(LOGITS), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.6, top_k=4),
        SamplingParams(seed=3, top_p=0.8),
        SamplingParams(seed=4, temperature=1.5, min_p=0.05, top_p=0.95, top_k=6),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    draws = 20000
    sampler = Sampler(params, 0, [], 8)
    counts = Counter(sampler.draw(LOGITS) for _ in range(draws))
    expected = dense(params) * draws
    assert set(counts) <= set(np.flatnonzero(expected))
    used = np.flatnonzero(expected)
    chi = sum((counts[int(i)] - expected[i]) ** 2 / expected[i] for i in used)
    # Wilson and Hilferty: the 99.9 % point of chi-square.
    free = len(used) - 1
    assert chi < free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3


def test_seeds_repeat_and_samples_differ() -> None:
    def text(seed: int, index: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed), index, [], 8)
        return [sampler.draw(LOGITS) for _ in range(30)]

    assert text(1, 0) == text(1, 0)
    assert text(1, 0) != text(1, 1) != text(2, 0)


def test_logprobs_are_of_the_plain_model() -> None:
    values = np.log(softmax(LOGITS))
    result = logprobs_of(LOGITS, 5, 2, None)
    assert list(result) == [5, 3, 4]
    assert [result[token].rank for token in (5, 3, 4)] == [8, 1, 2]
    for token, entry in result.items():
        assert entry.logprob == pytest.approx(values[token]) and entry.decoded_token is None
    assert list(logprobs_of(LOGITS, 2, 0, str)) == [2]
    assert len(logprobs_of(LOGITS, 2, 100, str)) == 8
