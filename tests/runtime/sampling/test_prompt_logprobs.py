"""Log probabilities of a prompt's tokens: as of the same tokens when generated, in any step and whatever is cached."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pytest

from qcompile.errors import OverflowedError, UsageError
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.logprobs import logprobs_of
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.step import Rows
from tests.runtime.engine.test_prefixes import text
from tests.support.fake import CONTEXT, PAGE_TOKENS, fake_llm, reference_logits
from tests.support.sampled import same_logprobs

pytestmark = pytest.mark.usefixtures("executors")

ALONE = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3)


def wanted(tokens: Sequence[int], alternatives: int) -> list[Any]:
    """What the model's logits give for every token but the first."""
    rows = reference_logits(tokens)
    return [logprobs_of(rows[at - 1], tokens[at], alternatives, None) for at in range(1, len(tokens))]


def right(output: RequestOutput, alternatives: int = 3) -> bool:
    result = output.prompt_logprobs
    assert result is not None and result[0] is None
    return same_logprobs([each for each in result if each], wanted(output.prompt_token_ids, alternatives))


def settled(llm: LLM) -> None:
    llm.engine.check()
    assert not llm.engine.busy and llm.engine.pool.used == 0


@pytest.mark.parametrize("length", [1, 2, 63, 64, 95, 96, 97, 192, 193, 500, CONTEXT])
def test_prompts_alone(length: int) -> None:
    with fake_llm() as llm:
        [output] = llm.generate([text(length)], ALONE)
        assert right(output) and output.finished
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
        settled(llm)


def test_prompts_that_go_on() -> None:
    """Among others; what follows is what follows without, and has as many alternatives as it asks for."""
    with fake_llm() as llm:
        params = [
            SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=1, logprobs=4),
            SamplingParams(seed=3, max_tokens=70, ignore_eos=True, prompt_logprobs=5, logprobs=0),
            SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=20),
            SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=0, logprobs=21),
            SamplingParams(seed=4, max_tokens=20, ignore_eos=True, frequency_penalty=0.5, prompt_logprobs=2),
            SamplingParams(seed=5, max_tokens=20, ignore_eos=True, logprobs=2),
        ]
        prompts = [text(length, length) for length in (130, 40, 96, 7, 300, 200)]
        plain = [SamplingParams(**(vars(one) | {"prompt_logprobs": None})) for one in params]
        alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, plain, strict=True)]
        for most in (96, 8, 33):
            llm.engine.scheduler.max_tokens = most
            for output, one, before in zip(llm.generate(prompts, params), params, alone, strict=True):
                assert output.outputs == before.outputs
                if one.prompt_logprobs is None:
                    assert output.prompt_logprobs is None
                else:
                    assert right(output, one.prompt_logprobs)
        settled(llm)


def test_the_same_bits_as_when_generated() -> None:
    with fake_llm() as llm:
        prompt = text(30)
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=200, ignore_eos=True, logprobs=3)
        generated = llm.generate([prompt], params)[0].outputs[0]
        [output] = llm.generate([prompt + generated.token_ids], ALONE)
        assert output.prompt_logprobs and output.prompt_logprobs[len(prompt) :] == generated.logprobs


@pytest.fixture
def deadline() -> Iterator[None]:
    """Fails a test that waits for rows that are never computed."""

    def late(number: int, frame: Any) -> NoReturn:
        raise TimeoutError("the request is not answered after 20 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("deadline")
def test_cached_pages_are_computed_again_and_left_to_others() -> None:
    with fake_llm() as llm:
        prompt = text(4 * PAGE_TOKENS + 5)
        short = SamplingParams(temperature=0, max_tokens=1)
        assert right(llm.generate([prompt], ALONE)[0])
        assert llm.generate([prompt], short)[0].metrics.cached_tokens == 4 * PAGE_TOKENS
        [again] = llm.generate([prompt], ALONE)
        assert right(again) and again.metrics.cached_tokens == 0
        together = llm.generate([prompt, prompt, prompt], [ALONE, short, ALONE])
        assert right(together[0]) and right(together[2])
        settled(llm)


def test_preempted_prompts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported is not reported again."""
    with fake_llm(pages=12) as llm:
        known: list[int] = []
        step = Executor.step

        def spied(self: Executor, rows: Sequence[Rows], *rest: Any) -> Any:
            known.extend(row.known for row in rows)
            return step(self, rows, *rest)

        monkeypatch.setattr(Executor, "step", spied)
        prompts = [text(250, seed) for seed in range(4)]
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, prompt_logprobs=3)
        outputs = llm.generate(prompts, params)
        assert all(right(output) for output in outputs) and llm.engine.scheduler.preemptions
        assert sum(known) == 4 * 249
        settled(llm)


def test_a_request_preempted_within_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_llm() as llm:
        request = llm.engine.add(text(400), ALONE)
        for _ in range(3):
            llm.engine.step()
        llm.engine._finish_pending()
        assert 0 < request.prompt_report.scored < 399
        llm.engine.scheduler.preempt()
        while llm.engine.busy:
            llm.engine.step()
        result = request.prompt_report.logprobs
        assert result and same_logprobs(result[1:], wanted(text(400), 3))  # type: ignore[arg-type]
        settled(llm)


def test_cancelled_within_its_prompt() -> None:
    with fake_llm() as llm:
        stream = llm.stream([text(600)], SamplingParams(max_tokens=50, ignore_eos=True, prompt_logprobs=1))
        first = next(stream)
        assert right(first, 1) and not first.finished
        stream.close()
        request = llm.engine.add(text(600), ALONE)
        llm.engine.step()
        llm.engine.cancel(request)
        while llm.engine.busy:
            llm.engine.step()
        settled(llm)


def test_samples_share_the_prompts() -> None:
    with fake_llm() as llm:
        [output] = llm.generate([text(100)], n=3, seed=1, max_tokens=4, ignore_eos=True, prompt_logprobs=3)
        assert right(output) and [len(one.token_ids) for one in output.outputs] == [4] * 3
        [output] = llm.generate([text(100)], n=3, seed=1, max_tokens=0, prompt_logprobs=3)
        assert right(output) and [one.finish_reason for one in output.outputs] == ["length"] * 3
        settled(llm)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_logits_that_are_not_finite(max_tokens: int) -> None:
    """In the middle of the prompt; where no logits are wanted they do not matter."""
    with fake_llm() as llm:
        prompt = [5] * 150
        prompt[40] = 9
        llm.executor.library.broken = 9  # type: ignore[attr-defined]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=1)
        with pytest.raises(OverflowedError):
            llm.generate([prompt], params)
        settled(llm)
        llm.generate([prompt], temperature=0, max_tokens=3)
        assert llm.generate([prompt[:41]], temperature=0, max_tokens=0, prompt_logprobs=1)[0].prompt_logprobs


def test_wrong_options() -> None:
    for options in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": True}, {"max_tokens": 0}):
        with pytest.raises(UsageError, match=next(iter(options))):
            SamplingParams(**options)
    with fake_llm() as llm:
        with pytest.raises(UsageError, match="too long"):
            llm.generate([text(CONTEXT)], max_tokens=1, prompt_logprobs=0)
        with pytest.raises(UsageError, match="too long"):
            llm.generate([text(CONTEXT + 1)], ALONE)
