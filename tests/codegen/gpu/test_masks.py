"""Masks of grammars on a GPU, interpreted: Python's tokens, in steps, in batches with drafts, and with reports."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from qcompile.errors import ResourceError
from qcompile.runtime.sampling.inputs import GREEDY
from qcompile.runtime.sampling.masks import Grammar, GrammarState, Masks, mask_words, one_by_one, unusual
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.step import Rows
from tests.codegen.gpu.test_sample import SMALL
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted


class Remainders:
    """Stands for llguidance's matcher: of a text's token i, the remainder by 3 follows from the token before it."""

    def __init__(self, text: tuple[int, ...] = ()) -> None:
        self.text = list(text)

    def allows(self, token: int) -> bool:
        return token % 3 == (self.text[-1] * 7 + len(self.text)) % 3 if self.text else token % 2 == 1

    def deep_copy(self) -> Remainders:
        return Remainders(tuple(self.text))

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for taken, token in enumerate(tokens):
            if not self.allows(token):
                return taken
            self.text.append(token)
        return len(tokens)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        bits = np.packbits([self.allows(token) for token in range(8 * size)], bitorder="little")
        ctypes.memmove(address, bits.ctypes.data, size)

    def compute_bitmask(self) -> None: ...

    def is_error(self) -> bool:
        return False


GRAMMAR = Grammar(Remainders(), frozenset(), None, Remainders)


def interpret_rows(vocab: int) -> None:
    """Rows with a mask after drafts, rows before the first of a sequence, and sequences without a grammar."""
    from qcompile.codegen.gpu.masks import masking
    from qcompile.runtime.cuda.masks import DeviceMasks
    from tests.support.gpu_machine import HostDriver, run_launches

    driver: Any = HostDriver()
    masks = DeviceMasks(driver, 64, vocab)
    random = np.random.default_rng(vocab)
    draft = [1, (7 + 1) % 3, ((7 + 1) % 3 * 7 + 2) % 3]
    sequences, sampling, wanted = [], [], []
    for index in range(5):
        known, after = index % 3, index % 4
        state = GRAMMAR.start()
        masked = index != 1
        first = 10
        sampling.append(
            GREEDY._replace(first=first, masks=Masks(state, 4, draft[: after * (index % 2)]) if masked else None)
        )
        tokens = [5] * (known + 1) + draft[:after]
        sequences.append(Rows(tokens, first - known, (), known + 1 + after))
        fresh = Remainders()
        for row in range(known + 1 + after):
            place = row - known
            if place > 0:
                assert fresh.try_consume_tokens([draft[place - 1]]) == 1
            allowed = [fresh.allows(token) or not masked or place < 0 for token in range(vocab)]
            wanted.append(np.array(allowed))
    assert masks.want(sequences, sampling) and masks.lacks_room
    masks.grow()
    assert not masks.lacks_room
    masks.send()
    logits = torch.from_numpy(random.standard_normal((len(wanted), vocab)).astype(np.float32))
    logits[0, 0], logits[2, vocab - 1] = math.nan, math.inf
    given = {"logits": logits.clone(), "masks": driver.at(masks.address, "*i32")}
    run_launches(masking("head", vocab), {"masked": len(wanted), "outputs": len(wanted)}, given)
    for row, allowed in enumerate(wanted):
        kept = torch.from_numpy(allowed) | ~(logits[row] < math.inf)
        want = torch.where(kept, logits[row], -math.inf)
        assert torch.equal(given["logits"][row].view(torch.int32), want.view(torch.int32)), row
    assert masks.want(sequences[:1], sampling[:1]) and not masks.want(sequences[1:2], sampling[1:2])
    masks.free()
    assert not driver.memory


@pytest.mark.parametrize("vocab", [5, 33, 4096 + 40])
def test_rows_interpreted(vocab: int) -> None:
    interpreted(__name__, f"interpret_rows({vocab})")


def interpret_engine(how: str) -> None:
    """Requests with and without a grammar in one batch. Those without may have drafts."""
    from tests.support.gpu_machine import PROMPTS, Machine, logits_asked

    torch.manual_seed(0)
    machine = Machine.drafted(decoder(**SMALL), how, pages=9)
    common: dict[str, Any] = {"max_tokens": 4, "structured_outputs": {"regex": "a"}}
    params = [
        SamplingParams(temperature=0, logprobs=1, **common),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.5, top_k=5, seed=1, **common),
        SamplingParams(temperature=0, repetition_penalty=1.4, logprobs=2, **common),
        SamplingParams(temperature=0.8, seed=2, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, prompt_logprobs=1, **common),
    ]
    asked = logits_asked()

    def generate(samples: bool, gamma: int, chosen: Sequence[int] = range(len(params))) -> list[Any]:
        machine.let_kernels_choose(samples)
        engine = machine.engine(gamma)
        requests = [engine.add(PROMPTS[i], params[i], grammar=params[i].structure and GRAMMAR) for i in chosen]
        result = machine.run(engine, requests)
        reports = [(request.output.logprobs, request.prompt_report.logprobs) for request in requests]
        return list(zip(result, reports, strict=True))

    by_host = generate(False, 0)
    for one, (tokens, _) in zip(params, by_host, strict=True):
        fits = Remainders().try_consume_tokens(tokens) == len(tokens)
        assert fits if one.structure else not fits
    asked.clear()
    assert generate(True, 0) == by_host
    assert not any(asked)
    assert generate(True, 0, range(3, 4)) == by_host[3:4]
    late = late_masks(machine)
    assert generate(True, 0, (2, 4)) == [by_host[2], by_host[4]]
    assert any(late)
    begun = masks_beside_the_host(machine)
    assert generate(True, 0, (2, 4)) == [by_host[2], by_host[4]]
    assert any(begun)
    assert generate(True, 3) == by_host
    assert generate(True, 3, range(0, 1)) == by_host[:1]


def late_masks(machine: Any) -> list[bool]:
    """Whether a step lacked its masks, for each time that these are asked for from now on."""
    target, late = machine.target, list[bool]()
    begin = target.begin_masks

    def noted() -> None:
        late.append(target._started.lacks_masks)
        begin()

    target.begin_masks = noted
    return late


def masks_beside_the_host(machine: Any) -> list[bool]:
    """Have another thread compute masks however few there are. Returns whether one did when steps asked for them."""
    from qcompile.runtime.cuda import masks as module

    module._FEWEST, begun = 1, list[bool]()
    GRAMMAR.known._masks.clear()
    device = machine.target._masks
    begin = device.begin

    def noted() -> bool:
        begun.append(begin())
        return begun[-1]

    device.begin = noted
    return begun


@pytest.mark.parametrize("how", first(("lookup",), ["shared", "lookup"]))
def test_an_engine_with_masks_interpreted(how: str) -> None:
    interpreted(__name__, f"interpret_engine('{how}')")


def test_the_kernel_compiles(compiled: Record) -> None:
    from qcompile.codegen.gpu.masks import mask_kernel

    for capability in (80, 90):
        assert compiled(mask_kernel(151936), capability).spill_bytes == 0
    assert mask_words(33) == 2


def test_masks_that_find_no_memory_leave_none_behind() -> None:
    from qcompile.runtime.cuda.masks import DeviceMasks
    from tests.support.fake_driver import FakeDriver

    driver: Any = FakeDriver()
    masks = DeviceMasks(driver, 64, 100)
    sampling = [GREEDY._replace(first=0, masks=Masks(GRAMMAR.start(), 1))]
    assert masks.want([Rows([5], 0, (), 1)], sampling)
    pinned, driver.pinned = driver.pinned, _no_memory
    with pytest.raises(ResourceError):
        masks.grow()
    assert masks.lacks_room and not masks.address and not driver.memory
    driver.pinned = pinned
    masks.grow()
    masks.send()
    assert not masks.lacks_room and len(driver.memory) == 1
    masks.free()
    masks.free()
    assert not driver.memory


def test_masks_of_several_grammars_are_computed_together() -> None:
    """Those of one text one after the other, as drafts of a request need them. An error of any of them is raised."""
    from qcompile.runtime.cuda.masks import DeviceMasks
    from tests.support.gpu_machine import HostDriver

    calls: list[list[Any]] = []

    def together(matchers: Sequence[tuple[Any, int]], address: int, size: int, room: int) -> None:
        calls.append([matcher for matcher, _ in matchers])
        assert len({number for _, number in matchers}) == len(matchers) and room == 34
        one_by_one(matchers, address, size, room)

    driver: Any = HostDriver()
    masks = DeviceMasks(driver, 64, 100)
    grammars = [Grammar(Remainders(), frozenset(), None, Remainders, None, together) for _ in range(5)]
    states = [grammars[i % 5 if i < 15 else 0].start() for i in range(31)]
    for index, state in enumerate(states):
        state.note(2 * index + 1)
    drafts = [next(token for token in range(100) if state._matcher.allows(token)) for state in states]
    sampling = [GREEDY._replace(first=0, masks=Masks(state, 2)) for state in states]
    sequences = [Rows([5, draft][: 1 + (i > 27)], 0, (), 1 + (i > 27)) for i, draft in enumerate(drafts)]
    assert masks.want(sequences, sampling)
    masks.grow()
    masks.send()
    assert [len(set(map(id, call))) for call in calls] == [31, 3]
    assert_sent(masks, driver, states[:29])
    for state, draft in zip(states, drafts, strict=True):
        state.note(draft)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="no mask"):
        patch.setattr(Remainders, "unsafe_compute_mask_ptr", _no_mask)
        masks.send()
    masks.free()
    assert not driver.memory


def assert_sent(masks: Any, driver: Any, states: list[GrammarState]) -> None:
    """What was sent are the masks of these states, computed alone."""
    sent = driver.at(masks.address, "*i32").numpy()
    for row, state in enumerate(states):
        alone = np.zeros(4, np.int32)
        Remainders(tuple(state._text)).unsafe_compute_mask_ptr(alone.ctypes.data, 16)
        assert (sent[sent[row] : sent[row] + 4] == alone).all() and alone.any()


def test_masks_that_need_no_correction_are_told_together() -> None:
    """All that the check of a single mask tells, and few others."""
    random = np.random.default_rng(0)
    masks = random.integers(1 << 32, size=(64, 9), dtype=np.uint32) * (random.random((64, 9)) < 0.3)
    masks[3:5] = 0
    masks[4, 8] = 1 << 31
    masks = masks.astype(np.uint32)
    eos = frozenset({0, 37, 287})
    grammar = Grammar(Remainders(), eos, None, Remainders)
    state = grammar.start()
    alone = [not state._is_usual(mask.ctypes.data, 9) for mask in masks]
    told = unusual(masks, eos)
    assert alone[3] and alone[4] and 10 < sum(alone) < 64
    assert not (np.array(alone) & ~told).any() and (told & ~np.array(alone)).sum() <= 2


class Unending(Remainders):
    """Goes on behind each token."""

    def deep_copy(self) -> Unending:
        return Unending(tuple(self.text))

    def is_accepting(self) -> bool:
        return False

    def consume_token(self, token: int) -> bool:
        return True


@pytest.mark.parametrize("many", [1, 9])
def test_an_end_that_a_grammar_goes_on_behind_is_no_end(many: int) -> None:
    """In masks computed together, too."""
    from qcompile.runtime.cuda.masks import DeviceMasks
    from tests.support.gpu_machine import HostDriver

    driver: Any = HostDriver()
    masks = DeviceMasks(driver, 64, 100)
    states = [Grammar(Unending(), frozenset({37}), None, Unending).start() for _ in range(many)]
    assert masks.want([Rows([5], 0, (), 1)] * many, [GREEDY._replace(masks=Masks(state, 1)) for state in states])
    masks.grow()
    masks.send()
    sent = driver.at(masks.address, "*i32").numpy().view(np.uint32)
    for row in range(many):
        words = sent[sent[row] : sent[row] + 4]
        assert words[0] == 0xAAAAAAAA and words[1] == 0xAAAAAAAA & ~(1 << 37 % 32)
    masks.free()


def test_masks_after_the_same_text_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompile.runtime.cuda.masks import DeviceMasks
    from tests.support.gpu_machine import HostDriver

    driver: Any = HostDriver()
    masks = DeviceMasks(driver, 64, 100)
    grammar = Grammar(Remainders(), frozenset(), None, Remainders)
    states = [grammar.start() for _ in range(21)]
    computed: list[tuple[int, ...]] = []
    compute = Remainders.unsafe_compute_mask_ptr

    def noted(self: Remainders, address: int, size: int) -> None:
        computed.append(tuple(self.text))
        compute(self, address, size)

    monkeypatch.setattr(Remainders, "unsafe_compute_mask_ptr", noted)
    sampling = [GREEDY._replace(first=0, masks=Masks(state, 1)) for state in states]
    for texts in ([()], [(1,), (3,), (5,)]):
        for index, state in enumerate(states):
            for token in texts[index % len(texts)]:
                state.note(token)
        computed.clear()
        assert masks.want([Rows([5], 0, (), 1)] * len(states), sampling)
        masks.grow()
        masks.send()
        assert sorted(computed) == texts
        masks.send()
        assert sorted(computed) == texts
    monkeypatch.undo()
    assert_sent(masks, driver, states)
    masks.free()


def test_a_grammar_of_many_texts_gets_lexers_for_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that moves is followed from its start."""
    from qcompile.runtime.cuda import masks as module
    from tests.support.gpu_machine import HostDriver

    monkeypatch.setattr(module, "_cores", lambda: 3)
    driver: Any = HostDriver()
    masks = module.DeviceMasks(driver, 64, 100)
    grammar = Grammar(Remainders(), frozenset(), None, Remainders)
    states = [grammar.start() for _ in range(31)]
    for index, state in enumerate(states):
        state.note(2 * index + 1)
    sampling = [GREEDY._replace(first=0, masks=Masks(state, 1)) for state in states]
    sizes = []
    for _ in range(4):
        assert masks.want([Rows([5], 0, (), 1)] * 31, sampling)
        masks.grow()
        masks.send()
        assert_sent(masks, driver, states)
        assert all(state._source is state.lexer.matcher for state in states)
        used = Counter(id(state.lexer) for state in states)
        sizes.append(sorted(used.values()))
        assert grammar.lexers._thread is not None
        grammar.lexers._thread.join()
        for state in states:
            state.note(next(token for token in range(100) if state._matcher.allows(token)))
    assert sizes[-1] == [9, 11, 11] and len(grammar.lexers.all) == 3
    masks.free()


@pytest.mark.parametrize("fails", [False, True])
def test_masks_begun_for_a_step_that_never_came_are_forgotten(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompile.runtime.cuda.masks import DeviceMasks
    from tests.support.gpu_machine import HostDriver

    driver: Any = HostDriver()
    masks = DeviceMasks(driver, 64, 100)
    grammar = Grammar(Remainders(), frozenset(), None, Remainders)
    states = [grammar.start() for _ in range(9)]
    for index, state in enumerate(states):
        state.note(2 * index + 1)
    sampling = [GREEDY._replace(first=0, masks=Masks(state, 1)) for state in states]
    assert masks.want([Rows([5], 0, (), 1)] * 9, sampling)
    masks.grow()
    with monkeypatch.context() as patch:
        if fails:
            patch.setattr(Remainders, "unsafe_compute_mask_ptr", _no_mask)
        assert masks.begin() and masks.begin()
        masks._background.wait() if not fails else masks._forget()
    assert masks.want([Rows([5], 0, (), 1)] * 4, sampling[:4])
    masks.send()
    assert_sent(masks, driver, states[:4])
    assert masks.want([Rows([5], 0, (), 1)] * 9, sampling) and masks.begin()
    masks.free()  # while another thread computes
    assert not driver.memory


def _no_mask(self: Remainders, address: int, size: int) -> None:
    raise ValueError("no mask")


def _no_memory(size: int) -> int:
    raise ResourceError(f"no pinned memory of {size} bytes")
