"""Requests that continue from copies of recurrent states, also where steps are started before earlier ones end."""

from __future__ import annotations

import ctypes
import json
import random
from typing import Any

import numpy as np
import pytest

from qcompile.runtime.cpu.executor import StateMemory
from qcompile.runtime.llm import LLM
from qcompile.runtime.loader import Arena
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.step import Limits
from tests.support import fake
from tests.support.fake import CONTEXT, EOS, PAGE_BYTES, PAGE_TOKENS, VOCAB, ints, logits_of, mark, reference_greedy

pytestmark = pytest.mark.usefixtures("executors")

SLOT = 16
"""Bytes of a slot: how many positions a state has seen, and the sum of their marks."""


class StatesLibrary(fake.FakeLibrary):
    """Logits follow from states alone. A row at another position than the next one of its slot's state fails."""

    def qc_describe(self) -> bytes:
        return json.dumps(json.loads(super().qc_describe()) | {"slot_bytes": SLOT}).encode()

    def qc_open(self, config: Any) -> int:
        numbers = ctypes.c_int64 * (config._obj.state_slots * 2)
        self.states = np.ctypeslib.as_array(numbers.from_address(config._obj.states)).reshape(-1, 2)
        self.states[:] = -7
        return super().qc_open(config)

    def _run(self, batch: Any) -> None:
        tokens, positions = ints(batch.token_ids, batch.tokens), ints(batch.positions, batch.tokens)
        start, slots = ints(batch.query_start, batch.sequences + 1), ints(batch.state_slots, batch.sequences)
        assert len(set(slots)) == len(slots)
        sums = np.zeros(batch.tokens, np.int64)
        for sequence, slot in enumerate(slots):
            state = self.states[slot]
            if not positions[start[sequence]]:
                state[:] = 0
            for row in range(start[sequence], start[sequence + 1]):
                assert state[0] == positions[row]
                state += 1, mark(int(tokens[row]), int(positions[row]))
                sums[row] = state[1]
        for output, row in enumerate(ints(batch.output_rows, batch.outputs)):
            ints(batch.argmax, batch.outputs)[output] = logits_of(int(sums[row])).argmax()


def states_llm(
    pages: int = 64, max_batch: int = 8, copies: int = 32, max_tokens: int = fake.MAX_TOKENS, apart: int = 0
) -> LLM:
    limits, weights = Limits(max_tokens, VOCAB, PAGE_TOKENS, CONTEXT), (ctypes.c_void_p * 1)()
    states = StateMemory(Arena(SLOT * (max_batch + copies)), copies)
    arena = Arena(pages * PAGE_BYTES)
    executor = fake.Chosen(StatesLibrary(), weights, arena, pages, 1, limits, states=states)
    assert executor.copies
    executor.copies = executor.copies._replace(apart=apart)
    model: Any = {"model": {"bos_token_id": EOS, "eos_token_ids": [EOS]}}
    return LLM(executor, model, None, max_batch)


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("max_tokens", [96, 1000])
def test_each_turn_of_a_conversation_continues_where_the_last_prompt_ended(max_tokens: int) -> None:
    """Also where a prompt takes several steps, each started before the one before it has ended."""
    llm, history = states_llm(max_tokens=max_tokens), text(300)
    ends = [0]
    for turn in range(4):
        [output] = llm.generate([history], params(40))
        assert output.outputs[0].token_ids == reference_greedy(history, 40, eos=None)
        assert output.metrics.cached_tokens == ends[-1]
        ends.append((len(history) - 1) // PAGE_TOKENS * PAGE_TOKENS)
        history = [*history, *output.outputs[0].token_ids, *text(50, turn + 1)]
        llm.engine.check()


def test_the_second_of_two_texts_keeps_what_they_share_for_the_third() -> None:
    llm, shared = states_llm(), text(200)
    cached = []
    for seed in range(3):
        prompt = [*shared, *text(150, seed + 1)]
        [output] = llm.generate([prompt], params(5))
        assert output.outputs[0].token_ids == reference_greedy(prompt, 5, eos=None)
        cached.append(output.metrics.cached_tokens)
    assert cached == [0, 0, 192]


def steps_of(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """Rows of each step of a prompt, and how many of its tokens were reused."""
    library: Any = llm.executor.library  # type: ignore[attr-defined]
    library.steps.clear()
    [output] = llm.generate([prompt], params(1))
    assert output.outputs[0].token_ids == reference_greedy(prompt, 1, eos=None)
    return [*library.steps], output.metrics.cached_tokens


def test_steps_end_only_where_a_copy_pays(executors: None) -> None:
    """At the end of whole pages far behind the last copy, where a prompt parts from another one, and where another one
    has had all of its pages."""
    llm, history = states_llm(max_tokens=1000, apart=256), text(300)
    assert steps_of(llm, history) == ([256, 44], 0)
    assert steps_of(llm, [*history, *text(120, 1)]) == ([164], 256)  # 384 are only 128 behind
    assert steps_of(llm, [*history, *text(120, 1), *text(150, 2)]) == ([256, 58], 256)
    assert steps_of(llm, [*history, *text(120, 1), *text(30, 3)]) == ([128, 66], 256)  # two part at 384
    assert steps_of(llm, [*history, *text(120, 1), *text(30, 4)]) == ([66], 384)
    short = states_llm(max_tokens=1000, apart=256)
    shared = text(200)
    assert [steps_of(short, [*shared, *text(20, seed)]) for seed in range(1, 4)] == [
        ([220], 0),
        ([192, 28], 0),
        ([28], 192),
    ]


def test_requests_of_other_owners_continue_from_no_copy(executors: None) -> None:
    llm, prompt = states_llm(), text(150)
    cached = []
    for owner in ("ann", "ann", "bob", ""):
        request = llm.engine.add(prompt, params(3), owner=owner)
        while llm.engine.busy:
            llm.engine.step()
        assert list(request.output.token_ids) == reference_greedy(prompt, 3, eos=None)
        cached.append(request.metrics.cached_tokens)
    assert cached == [0, 128, 0, 0]


def test_prompts_asked_at_once_continue_from_one(executors: None) -> None:
    """One computes what all share; as soon as the step that ends there is started, the others may begin."""
    llm, shared = states_llm(), text(256)
    llm.generate([[*shared, 5]], params(1))
    prompts = [[*shared, *text(20, seed + 1)] for seed in range(8)]
    outputs = llm.generate(prompts, params(12))
    assert [output.metrics.cached_tokens for output in outputs] == [256] * 8
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference_greedy(prompt, 12, eos=None)


@pytest.mark.parametrize(("copies", "pages"), [(32, 64), (3, 16), (1, 12)])
def test_no_state_is_mistaken_under_preemption_and_cancellation(copies: int, pages: int) -> None:
    """Few copies are used again and again; those of free slots are spoiled, and some requests end early."""
    llm, draw = states_llm(pages, 8, copies), random.Random(copies)
    library: Any = llm.executor.library  # type: ignore[attr-defined]
    engine, scheduler = llm.engine, llm.engine.scheduler
    beginnings = [text(length, seed) for seed, length in enumerate((70, 130, 200))]
    prompts = [[*draw.choice(beginnings), *text(draw.randrange(1, 90), seed + 9)] for seed in range(60)]
    requests = [engine.add(prompt, params(draw.randrange(1, 260))) for prompt in prompts]
    while engine.busy:
        engine.step()
        if draw.random() < 0.1:
            engine.cancel(draw.choice(requests))
        engine.check()
        if not engine._pending and not getattr(llm.executor, "_late", None):
            library.states[scheduler.slots.listed] = -9
    for prompt, request in zip(prompts, requests, strict=True):
        got = list(request.output.token_ids)
        assert got == reference_greedy(prompt, len(got), eos=None)
        assert request.output.finish_reason == "abort" or len(got) == request.params.max_tokens
    assert sum(request.metrics.cached_tokens for request in requests) > 64 * (20 if copies > 3 else 3)
    assert scheduler.preemptions > 0 or pages == 64
