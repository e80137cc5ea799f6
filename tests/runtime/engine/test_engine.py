"""Scheduling, multi-step decodes, preemption and cancellation, on a fake model with a known greedy text."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompile.errors import ResourceError
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.scheduler import Scheduler
from qcompile.runtime.engine.timing import StepsPerCall
from qcompile.runtime.request import SequenceState, SpeculationState
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.speculation.stages import DraftStage, Speculator
from qcompile.runtime.step import Limits, Rows
from tests.support.calls import fix_calls
from tests.support.fake import (
    CONTEXT,
    EOS,
    MAX_TOKENS,
    VOCAB,
    LateExecutor,
    fake_llm,
    reference_greedy,
    reference_logits,
)

pytestmark = pytest.mark.usefixtures("executors")

GREEDY = SamplingParams(temperature=0, max_tokens=40)


def prompts_of(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_greedy_is_the_reference() -> None:
    llm = fake_llm()
    prompts = prompts_of(20, 300)
    for prompt, result in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert result.prompt_token_ids == prompt and result.prompt is None and result.finished
        expected = reference_greedy(prompt, 40)
        assert result.outputs[0].token_ids == expected
        assert result.outputs[0].finish_reason == ("stop" if expected[-1] == EOS else "length")
    llm.engine.check()
    assert llm.engine.pool.free == llm.engine.pool.total
    assert max(llm.executor.library.steps) <= MAX_TOKENS
    assert max(llm.executor.library.decodes) > 1


def test_tokens_do_not_depend_on_the_batch() -> None:
    prompts = prompts_of(12, 150, seed=1)
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=5 + 7 * i, logprobs=2) for i in range(12)]
    together = fake_llm(pages=24, max_batch=5).generate(prompts, params)
    for prompt, param, result in zip(prompts, params, together, strict=True):
        alone = fake_llm().generate([prompt], param)[0].outputs[0]
        assert result.outputs[0].token_ids == alone.token_ids
        assert result.outputs[0].logprobs == alone.logprobs


def test_gaps_between_calls_make_calls_longer_within_limits() -> None:
    """An hour in which nobody asked counts no more than the longest call is for, and is soon forgotten."""
    calls = StepsPerCall()
    calls.note_step(1, 1e-3)
    assert calls.count(1) == 16
    calls.note_gap(1, 3600.0)
    assert calls.count(1) == 48
    for _ in range(8):
        calls.note_gap(1, 1e-4)
    assert calls.count(1) == 16
    calls.note_gap(2, 1.2e-3)
    calls.note_step(2, 1e-3)
    assert calls.count(2) == 24


def test_what_a_start_takes_is_part_of_the_gap_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has nothing to do until all is prepared, where a step does not follow the one that runs."""
    llm = fake_llm()
    if not llm.executor.overlaps:
        return
    start, gaps = llm.executor.start, []

    def slow(*given: Any) -> Any:
        time.sleep(2e-3)
        return start(*given)

    monkeypatch.setattr(llm.executor, "start", slow)
    monkeypatch.setattr(llm.engine.runner.timer.steps, "note_gap", lambda batch, seconds: gaps.append(seconds))
    llm.generate([[1, 2, 3]], temperature=0, max_tokens=40, ignore_eos=True)
    assert gaps == []
    llm.generate([[1, 2, 3]], temperature=0, max_tokens=200, ignore_eos=True, logprobs=0)
    assert len(gaps) >= 2 and min(gaps) >= 2e-3


def test_an_executor_may_have_run_when_it_is_to_start() -> None:
    llm = fake_llm()
    llm.engine.overlaps = True
    prompts = prompts_of(9, 150, seed=5)
    for prompt, result in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert result.outputs[0].token_ids == reference_greedy(prompt, 40)


@pytest.mark.parametrize("drafted", [False, True])
def test_steps_of_a_prompt_follow_each_other_without_the_host(drafted: bool) -> None:
    """Nobody waits for a step that gives no tokens, until one does; a request cancelled meanwhile harms no other."""
    llm = fake_llm()
    if not isinstance(llm.executor, LateExecutor):
        return
    if drafted:
        draft = fake_llm()
        llm.engine.speculation.gamma = 3
        llm.engine.speculation.drafter = HostSpeculator(llm.executor, [DraftStage(draft.executor, 3)])
    prompts = prompts_of(3, 400, seed=11)
    prompts[0] = [1 + i % 250 for i in range(500)]
    requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
    for _ in range(3):
        assert llm.engine.step() == []
    assert llm.executor.most_late == 2 and [len(late.rows) for late in llm.executor._late] == [1]
    llm.engine.cancel(requests[0])
    while llm.engine.busy:
        llm.engine.step()
    for prompt, request in list(zip(prompts, requests, strict=True))[1:]:
        assert request.output.token_ids == reference_greedy(prompt, 40)
    llm.engine.check()
    assert llm.engine.pool.used == 0


def test_steps_are_queued_behind_the_one_that_runs() -> None:
    """Prompts end, requests are drawn, reach their limits or an end of text, and others take their places: the engine
    plans the next step before it knows the tokens of the one that runs."""
    params = [
        SamplingParams(temperature=0.9 * (i % 2), top_p=0.9, seed=i, max_tokens=3 + 7 * (i % 9), ignore_eos=i % 5 > 0)
        for i in range(30)
    ]
    prompts = prompts_of(30, 150, seed=21)
    llm = fake_llm(max_batch=5)
    together = llm.generate(prompts, params)
    if isinstance(llm.executor, LateExecutor):
        assert llm.executor.most_late == 2
    for prompt, param, result in zip(prompts, params, together, strict=True):
        assert result.outputs[0].token_ids == fake_llm().generate([prompt], param)[0].outputs[0].token_ids
        if not param.temperature:
            eos = None if param.ignore_eos else EOS
            assert result.outputs[0].token_ids == reference_greedy(prompt, param.max_tokens or 0, eos)
    llm.engine.check()
    assert llm.engine.pool.used == 0


@pytest.mark.parametrize("options", [{"presence_penalty": 0.5}, {"logprobs": 1}, {"prompt_logprobs": 1}])
def test_a_step_that_needs_the_tokens_before_is_not_queued_behind_them(options: dict[str, Any]) -> None:
    llm = fake_llm()
    prompts, params = prompts_of(3, 90, seed=4), SamplingParams(temperature=0, max_tokens=20, **options)
    requests = [llm.engine.add(prompt, params) for prompt in prompts]
    while llm.engine.busy:
        needed = not all(request.prompt_report.complete and request.sampler.foresees for request in requests)
        llm.engine.step()
        if isinstance(llm.executor, LateExecutor) and needed:
            assert llm.executor.most_late == 1
    alone = [fake_llm().generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert [request.output.token_ids for request in requests] == alone


@pytest.mark.parametrize("in_vain, kept", [(0, 127), (1, 128), (2, 0)])
def test_a_text_is_not_kept_if_a_step_that_runs_will_round_its_end_in_vain(in_vain: int, kept: int) -> None:
    """Over a hierarchical cache: a group of 128 is rounded when the next group is full."""
    pool = BlockPool(30, 64, 384, remember=30)
    scheduler = Scheduler(pool, 512, 4)
    request = fake_llm().engine.add([1 + i for i in range(128)], GREEDY)
    scheduler.add(request)
    assert scheduler.schedule(1)
    request.sequence.computed = 127
    request.sequence.begin_step(in_vain, in_vain, 0)
    scheduler.release(request)
    assert pool.texts is not None and [len(ending.tokens) for ending in pool.texts] == [kept] * (kept > 0)


def test_nobody_is_preempted_for_a_step_that_is_queued_behind_another() -> None:
    """Where pages are short, the step waits until the one that runs has ended."""
    llm = fake_llm(pages=4, max_batch=2)
    if not isinstance(llm.executor, LateExecutor):
        return
    prompts, scheduler = [[3] * 60, [4] * 60], llm.engine.scheduler
    requests = [
        llm.engine.add(prompt, SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)) for prompt in prompts
    ]
    preempt, pending = scheduler.preempt, []

    def spied() -> Any:
        pending.append([request.sequence.pending_rows for request in scheduler.running])
        return preempt()

    scheduler.preempt = spied  # type: ignore[method-assign]
    while llm.engine.busy:
        llm.engine.step()
        llm.engine.check()
    assert pending and not any(map(any, pending))
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output.token_ids == reference_greedy(prompt, 140, eos=None)


def test_a_new_request_is_in_the_step_behind_the_one_that_runs() -> None:
    """It does not wait for a multi-step decode of those that run already."""
    llm = fake_llm()
    if not isinstance(llm.executor, LateExecutor):
        return
    endless = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    llm.engine.add([5, 6, 7], endless)
    for _ in range(4):
        llm.engine.step()
    late = llm.engine.add([8, 9], endless)
    llm.engine.step()
    assert [len(rows.tokens) for rows in llm.executor._late[-1].rows] == [1, 2] and late.sequence.pending_tokens == 1
    while llm.engine.busy:
        llm.engine.step()
    assert late.output.token_ids == reference_greedy([8, 9], 300, eos=None)


def test_preempted_requests_come_out_the_same() -> None:
    llm = fake_llm(pages=9, max_batch=8)
    prompts = prompts_of(8, 60, seed=2)
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    assert llm.engine.scheduler.preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.outputs[0].token_ids == reference_greedy(prompt, 150, eos=None)
    llm.engine.check()
    assert llm.engine.pool.used == 0


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 250), st.integers(1, 120)), min_size=1, max_size=10),
    pages=st.integers(6, 20),
    max_batch=st.integers(1, 8),
    max_tokens=st.integers(8, 80),
    steps=st.integers(1, 40),
)
def test_any_mix_of_requests_on_any_cache(
    requests: list[tuple[int, int]], pages: int, max_batch: int, max_tokens: int, steps: int
) -> None:
    llm = fake_llm(pages, max_batch, max_tokens=max_tokens)
    fix_calls(llm.engine, steps)
    prompts = [[length % 250 + 1] * length for length, _ in requests]
    params = [SamplingParams(temperature=0, max_tokens=count) for _, count in requests]
    for prompt, param, result in zip(prompts, params, llm.generate(prompts, params), strict=True):
        room = llm.context - len(prompt)
        assert result.outputs[0].token_ids == reference_greedy(prompt, min(param.max_tokens or 0, room))
    llm.engine.check()
    assert llm.engine.pool.used == 0


def test_few_rows_of_a_step_give_logits() -> None:
    """Whatever prompts report; large steps have the rows of prompts that report nothing. Nor do logits of texts."""
    llm = fake_llm(max_tokens=96, max_batch=6, most_outputs=7)
    steps: list[tuple[int, int]] = []
    start, step = llm.executor.start, llm.executor.step

    def noted(rows: Sequence[Rows]) -> Sequence[Rows]:
        steps.append((sum(len(row.tokens) for row in rows), sum(row.outputs for row in rows)))
        return rows

    llm.executor.start = lambda rows, *more: start(noted(rows), *more)  # type: ignore[method-assign]
    llm.executor.step = lambda rows, *more, **how: step(noted(rows), *more, **how)  # type: ignore[method-assign]
    prompts = prompts_of(9, 90, seed=5)
    params = [SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1 if i % 3 else None) for i in range(9)]
    result = llm.generate(prompts, params)
    alone = fake_llm()
    for prompt, each, output in zip(prompts, params, result, strict=True):
        [want] = alone.generate([prompt], each)
        assert output.outputs[0].token_ids == want.outputs[0].token_ids == reference_greedy(prompt, 9)
        assert output.prompt_logprobs == want.prompt_logprobs
    logits = llm.logits([prompts[0], prompts[0]])
    assert torch.equal(logits, alone.logits([prompts[0], prompts[0]]))
    assert max(outputs for _, outputs in steps) == 7 and max(rows for rows, _ in steps) > 40


def test_cache_smaller_than_the_context_ends_a_request_at_its_size() -> None:
    llm = fake_llm(pages=2)
    assert llm.context == 128
    output = llm.generate([[5] * 100], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == 28 and output.finish_reason == "length"


def test_output_ends_at_the_context() -> None:
    llm = fake_llm()
    prompt = [3] * (CONTEXT - 10)
    for max_tokens in (None, 500):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        output = llm.generate([prompt], params)[0].outputs[0]
        assert len(output.token_ids) == 10 and output.finish_reason == "length"


def test_random_cancellation_loses_no_page() -> None:
    llm = fake_llm(pages=16, max_batch=6)
    rng = random.Random(3)
    prompts = prompts_of(60, 200, seed=3)
    requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
    while llm.engine.busy:
        llm.engine.step()
        if rng.random() < 0.3:
            llm.engine.cancel(rng.choice(requests))
        llm.engine.check()
    assert llm.engine.pool.used == 0
    reasons = [request.output.finish_reason for request in requests]
    assert reasons.count("abort") > 5 and None not in reasons
    for prompt, request in zip(prompts, requests, strict=True):
        expected = reference_greedy(prompt, 40)
        got = request.output.token_ids
        assert got == (expected[: len(got)] if request.output.finish_reason == "abort" else expected)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_request_may_be_cancelled_while_a_step_runs(steps: int) -> None:
    llm = fake_llm()
    fix_calls(llm.engine, steps)
    prompts = prompts_of(4, 30, seed=4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [llm.engine.add(prompt, params) for prompt in prompts]
    for _ in range(3):
        llm.engine.step()
    for at in (2, 0):
        llm.engine.cancel(requests[at])
        llm.engine.check()
        llm.engine.step()
    gained = [list(requests[at].sequence.tokens) for at in (2, 0)]
    while llm.engine.busy:
        llm.engine.step()
        llm.engine.check()
    assert [requests[at].sequence.tokens for at in (2, 0)] == gained
    for at in (1, 3):
        assert requests[at].output.token_ids == reference_greedy(prompts[at], 20, eos=None)
    assert llm.engine.pool.used == 0


def test_closed_stream_cancels_its_requests() -> None:
    llm = fake_llm()
    stream = llm.stream(prompts_of(4, 50), temperature=0, max_tokens=500, ignore_eos=True)
    next(stream)
    stream.close()
    assert not llm.engine.busy and llm.engine.pool.used == 0


def test_two_streams_share_the_engine() -> None:
    llm = fake_llm()
    first = llm.stream([[7, 8]], temperature=0, max_tokens=300, ignore_eos=True)
    next(first)
    other = llm.generate([[9]], GREEDY)[0].outputs[0].token_ids
    assert other == reference_greedy([9], 40)
    *_, last = first
    assert last.outputs[0].token_ids == reference_greedy([7, 8], 300, eos=None)


def test_what_ends_in_steps_of_another_stream_is_given() -> None:
    """Two loops, one within the other: the outer one's prompts end while the inner one steps."""
    llm = fake_llm()
    outer = llm.stream([[7, 8], [5], [6]], temperature=0, max_tokens=30, ignore_eos=True)
    got = {}
    for output in outer:
        got[output.request_id] = output
        inner = llm.generate([[9]], temperature=0, max_tokens=100, ignore_eos=True)[0].outputs[0].token_ids
        assert inner == reference_greedy([9], 100, eos=None)
    for number, prompt in enumerate([[7, 8], [5], [6]]):
        assert got[number].finished and got[number].outputs[0].token_ids == reference_greedy(prompt, 30, eos=None)
    first, second = (llm.stream([[at]], temperature=0, max_tokens=200, ignore_eos=True) for at in (3, 4))
    pairs = list(zip_longest(first, second))
    for at in (0, 1):
        last = [pair[at] for pair in pairs if pair[at]][-1]
        assert last.finished and last.outputs[0].token_ids == reference_greedy([3 + at], 200, eos=None)
    assert not llm.engine.busy and llm.engine.pool.used == 0 and llm._shared.idle


def test_a_stream_may_be_collected_in_the_midst_of_a_step() -> None:
    """Garbage is collected in any thread at any time: the request must not vanish from the step it is in."""
    llm = fake_llm()
    forgotten: list[Any] = [llm.stream([[7, 8]], temperature=0, max_tokens=2, ignore_eos=True)]
    next(forgotten[0])
    forgotten.append(forgotten)  # nobody else holds the list
    step, free = llm.executor.step, []

    def collecting(*given: Any) -> Any:
        gc.collect()
        free.append(llm.engine.pool.free)
        return step(*given)

    llm.executor.step = collecting  # type: ignore[method-assign]
    del forgotten
    output = llm.generate([[9]], temperature=0, max_tokens=9, ignore_eos=True)[0].outputs[0]
    assert output.token_ids == reference_greedy([9], 9, eos=None)
    assert free[0] < llm.engine.pool.total and llm.engine.pool.used == 0 and llm._shared.idle
    lasting = llm.stream([[7, 8]], temperature=0, max_tokens=50, ignore_eos=True)
    next(lasting)
    lasting = iter(())
    assert not llm.engine.busy and llm._shared.idle  # at once where no step is under way


def test_pure_greedy_decoding_runs_in_multi_step_decodes() -> None:
    llm = fake_llm(max_batch=2)
    fix_calls(llm.engine, 16)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=33, ignore_eos=True))
    assert llm.executor.library.decodes == [16, 16]
    assert llm.executor.library.steps == [3]


def test_logits_of_every_position_whatever_the_chunk() -> None:
    llm = fake_llm(pages=16)
    rows = [prompts_of(1, 1, seed)[0] * 170 for seed in range(4)]
    expected = [reference_logits(row) for row in rows]
    for chunk in (None, 1, 2, 17, 96):
        got = llm.logits(rows, chunk=chunk)
        assert got.shape == (4, 170, VOCAB)
        for row in range(4):
            assert (got[row].numpy() == expected[row]).all()
    assert llm.engine.pool.used == 0


def test_logits_leave_running_requests_alone() -> None:
    llm = fake_llm(pages=4)
    stream = llm.stream([[7] * 100], temperature=0, max_tokens=60, ignore_eos=True)
    next(stream)
    assert llm.logits([[1] * 200]).shape == (1, 200, VOCAB)
    *_, last = stream
    assert last.outputs[0].token_ids == reference_greedy([7] * 100, 60, eos=None)
    assert llm.engine.pool.used == 0


def test_forward_without_pages_says_so() -> None:
    llm = fake_llm(pages=2)
    held = llm.engine.pool.take(1)
    with pytest.raises(ResourceError, match="KV pages"):
        llm.logits([[1] * 100])
    llm.engine.pool.give_back(held)
    llm.engine.check()


def test_block_pool_notices_lost_and_doubled_pages() -> None:
    pool = BlockPool(4, 64)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 64, 65)] == [0, 1, 1, 2]
    pages = pool.take(3)
    pool.check(pages)
    with pytest.raises(RuntimeError, match="held"):
        pool.check(pages[:2])
    with pytest.raises(RuntimeError, match="listed by 3"):
        pool.check([pages[0]] * 3)
    with pytest.raises(ValueError, match="free"):
        pool.take(2)
    twice = pages[:1] * 2
    with pytest.raises(ValueError, match="already free"):
        pool.give_back(twice)
    pool._empty.append(pool._empty[-1])
    with pytest.raises(RuntimeError, match="of 4"):
        pool.check()


def test_rounds_take_what_those_that_were_made_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends when all have what they want: that it took less time must not make its rounds seem short."""
    llm = fake_llm()
    speculator = Speculator(llm.executor, [])
    speculator.rounds = lambda requests, gammas, rounds, ends: ([[5] for _ in requests], 2)  # type: ignore[method-assign]
    llm.engine.speculation.drafter, llm.engine.speculation.gamma = speculator, 3
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    llm.engine.add([1], SamplingParams(temperature=0, max_tokens=9))
    llm.engine.step()
    assert llm.engine.runner.timer.rounds.step_seconds == {1: 0.5}


def test_caches_of_drafts_that_lag_are_filled_together() -> None:
    """In steps of at most `max_tokens` rows, with rows of all requests side by side."""
    steps: list[list[Rows]] = []
    limits = Limits(max_tokens=10, vocab=9, page_tokens=64, max_position=64)
    draft: Any = SimpleNamespace(limits=limits, step=lambda rows, logits: steps.append(rows))
    target: Any = SimpleNamespace(limits=limits._replace(max_tokens=64))
    every: list[Any] = [
        SimpleNamespace(
            sequence=SequenceState([*range(count)], computed=count - 1), drafts=SpeculationState(cached=[held])
        )
        for count, held in ((15, 0), (4, 1), (13, 4))
    ]
    speculator = Speculator(target, [DraftStage(draft, 4)])
    speculator.most_lag = 3
    speculator._catch_up(every, [2, 2, 2])
    assert [[(rows.start, len(rows.tokens)) for rows in step] for step in steps] == [[(0, 10)], [(10, 4), (4, 6)]]
    assert [request.drafts.cached[0] for request in every] == [14, 1, 10]
