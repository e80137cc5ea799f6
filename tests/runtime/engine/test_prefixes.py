"""Pages that requests with the same first tokens share: which are found, when they are forgotten. No bit changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcompile
from qcompile.errors import UsageError
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.prefixes import PrefixTree
from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.step import Rows
from tests.support.cases import first
from tests.support.fake import PAGE_TOKENS, VOCAB, fake_llm, reference_greedy

pytestmark = pytest.mark.usefixtures("executors")

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, VOCAB) for _ in range(length)]


def ask(llm: LLM, *prompts: list[int], params: SamplingParams = SHORT) -> list[int]:
    """Answers that are the reference's; returns how many tokens of each prompt were cached."""
    outputs = llm.generate(list(prompts), params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference_greedy(prompt, params.max_tokens or 0, eos=None)
    llm.engine.check()
    assert llm.engine.pool.used == 0
    return [output.metrics.cached_tokens for output in outputs]


def test_a_tree_finds_the_longest_prefix_and_leaves_a_token() -> None:
    tree = PrefixTree(4)
    tokens = list(range(12))
    tree.add(None, tokens, [7, 3, 5])

    def pages(asked: Sequence[int]) -> list[int]:
        return [one.page for one in tree.find(asked)]

    assert pages(tokens) == [7, 3] and pages([*tokens, 9]) == [7, 3, 5] and pages(tokens[:4]) == []
    assert pages(tokens[:5]) == [7] and pages([0, 1, 2, 9, 4, 5, 6, 7, 8]) == []
    assert pages([*tokens[4:8], 1]) == []  # the same page after another text is another page
    assert sorted(tree.forget(3)) == [5] and len(tree) == 1 and pages([*tokens, 9]) == [7]


def test_a_tree_keeps_the_first_of_two_pages_with_the_same_text() -> None:
    tree = PrefixTree(2)
    tree.add(None, [1, 2, 3, 4], [0, 1])
    other = tree.add(None, [1, 2, 3, 4, 5, 6], [4, 5, 6])
    assert [one.page for one in tree.find([1, 2, 3, 4, 5, 6, 7])] == [0, 1, 6] and 4 not in tree
    assert list(tree.forget(0)) == [1, 6]
    again = tree.add(other, [1, 2, 3, 4, 5, 6], [4, 5, 6])  # its node is gone: it starts anew, with its own pages
    assert again.depth == 3 and [one.page for one in tree.find([1, 2, 3, 4, 5, 6, 7])] == [4, 5, 6]


def test_owners_and_adapters_share_nothing_and_leave_nothing_behind() -> None:
    tree, tokens = PrefixTree(2), [1, 2, 3]
    sharing: list[tuple[str | None, str]] = [(None, ""), (None, "ann"), (None, "bob"), ("style", "ann")]
    for page, each in enumerate(sharing[:3]):
        tree.add(None, tokens[:2], [page], each)
    assert [[one.page for one in tree.find(tokens, each)] for each in sharing] == [[0], [1], [2], []]
    for page in range(3):
        assert list(tree.forget(page)) == []
    assert not tree._roots  # of which anybody who makes up keys could have any number


def test_only_requests_of_one_owner_reuse_a_prompt() -> None:
    """Nor do they wait for each other to compute one: that could be noticed as well."""
    with fake_llm() as llm:
        prompt = text(3 * PAGE_TOKENS)
        cached = []
        for owners in (("", "ann"), ("ann", "bob"), ("", "bob")):
            requests = [llm.engine.add(prompt, SHORT, owner=owner) for owner in owners]
            while llm.engine.busy:
                llm.engine.step()
            assert all(request.output.token_ids == reference_greedy(prompt, 4, eos=None) for request in requests)
            cached.append([request.metrics.cached_tokens > 0 for request in requests])
            assert requests[0].metrics.first_scheduled_time and requests[1].metrics.first_scheduled_time
        assert cached == [[False, False], [True, False], [True, True]]
        llm.engine.check()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 7)), max_size=60), st.integers(1, 12))
def test_a_pool_never_gives_a_held_page_away(moves: list[tuple[int, int, int]], most: int) -> None:
    """Requests come, with texts that share starts, and go in any order; whoever finds pages must find its own text."""
    pool, held = BlockPool(12, 2, remember=most), []
    assert pool.prefixes is not None
    written: dict[int, tuple[int, ...]] = {}
    for kind, which, size in moves:
        if kind == 2 and held:
            tokens, pages = held.pop(which % len(held))
            pool.prefixes.add(None, tokens, pages)
            pool.give_back(pages)
        else:
            tokens = [size // (at + 1) for at in range(2 * (which % 5) + 2)]
            result = [one.page for one in pool.prefixes.find(tokens)]
            idle = sum(not pool.held(page) for page in result)
            if len(tokens) // 2 - len(result) + idle > pool.free:
                continue
            assert [written[page] for page in result] == [tuple(tokens[: 2 * at]) for at in range(1, len(result) + 1)]
            pool.share(result)
            pages = result + pool.take(len(tokens) // 2 - len(result))
            written |= {page: tuple(tokens[: 2 * at]) for at, page in enumerate(pages, start=1)}
            held.append((tokens, pages))
        pool.check(*(pages for _, pages in held))
        assert pool._remembered <= most
    assert pool.free + len({page for _, pages in held for page in pages}) == pool.total


def test_a_prompt_goes_on_from_the_longest_known_prefix() -> None:
    llm, start = fake_llm(), text(3 * PAGE_TOKENS)
    steps = llm.executor.library.steps
    assert ask(llm, [*start, 5]) == [0] and ask(llm, [*start, 5]) == [192]
    assert steps[-1] < 3  # the last token alone was computed, and a multi-step decode after it
    assert ask(llm, [*start, 6, 7]) == [192] and ask(llm, start) == [128] and ask(llm, start[:64]) == [0]
    assert ask(llm, [*start[:100], 3, *start[100:]]) == [64]
    assert ask(llm, [9, *start]) == [0]


def test_an_answer_is_a_prefix_as_well() -> None:
    """As in a chat: the next prompt has the last one and its answer in front."""
    llm, prompt = fake_llm(), text(40)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert ask(llm, [*prompt, *answer, 8, 9]) == [64]


def test_prompts_that_start_alike_are_computed_once() -> None:
    """They come at once: the others wait until the first has filled the pages that they share."""
    llm, start = fake_llm(), text(200)
    rows = llm.executor.library.steps
    cached = ask(llm, *([*start, index] for index in range(1, 7)))
    assert cached == [0] + 5 * [192] and sum(rows) < 201 + 5 * 9 + 6 * 4
    del rows[:]
    llm.generate([[*start[::-1], 1]], SamplingParams(n=5, seed=1, max_tokens=3, ignore_eos=True))
    assert sum(rows) < 201 + 4 * 9 + 5 * 3


def test_another_prompt_does_not_wait() -> None:
    """Nothing that the running one has yet to compute is in it."""
    llm = fake_llm(max_tokens=96)
    llm.engine.add(text(400), SHORT)
    other = llm.engine.add(text(70, seed=3), SHORT)
    for _ in range(2):
        llm.engine.step()
    assert llm.engine.scheduler.running and other in llm.engine.scheduler.waiting  # as the first fills whole steps
    while llm.engine.busy:
        llm.engine.step()
        llm.engine.check()
    assert other.output.token_ids == reference_greedy(text(70, seed=3), 4, eos=None)


def test_what_was_unused_for_longest_is_forgotten_first() -> None:
    llm = fake_llm(pages=7, max_batch=1)  # context of 448
    a, b, c = (text(129, seed=seed) for seed in range(3))  # three pages each, two of them full
    ask(llm, a)
    ask(llm, b)
    assert ask(llm, a) == [128]
    assert ask(llm, c) == [0]
    assert ask(llm, text(129, seed=9)) == [0]  # takes three: the one without a text, then b's
    assert ask(llm, a) == [128] and ask(llm, c) == [128]
    assert ask(llm, b) == [0]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(5, 20), st.integers(1, 6), st.integers(8, 80))
def test_any_mix_of_prompts_on_any_cache(seed: int, pages: int, max_batch: int, max_tokens: int) -> None:
    """Prompts that share starts, some cancelled, some preempted: each gets the reference's tokens, no page is lost."""
    draw = random.Random(seed)
    llm = fake_llm(pages, max_batch, max_tokens=max_tokens)
    starts = [text(length, seed=length) for length in (64, 128, 150, 200)]
    requests = []
    for index in range(12):
        prompt = (draw.choice(starts) + text(draw.randrange(1, 90), seed=draw.randrange(3)))[: llm.context - 2]
        params = SamplingParams(temperature=0, max_tokens=draw.randrange(1, 90), ignore_eos=True)
        requests.append(llm.engine.add(prompt, params))
        for _ in range(draw.randrange(3)):
            llm.engine.step()
            llm.engine.check()
        if index % 5 == 4:
            llm.engine.cancel(draw.choice(requests))
            llm.engine.check()
    while llm.engine.busy:
        llm.engine.step()
        llm.engine.check()
    assert llm.engine.pool.used == 0
    for request in requests:
        made = request.sequence.tokens[request.spec.prompt_length :]
        assert made == reference_greedy(request.sequence.tokens[: request.spec.prompt_length], len(made), eos=None)
        assert request.output.finish_reason in ("abort", "length")


def test_preempted_requests_find_what_was_not_taken() -> None:
    llm = fake_llm(pages=9, max_batch=8)
    prompts = [text(60, seed=seed) for seed in range(8)]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    assert llm.engine.scheduler.preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.outputs[0].token_ids == reference_greedy(prompt, 150, eos=None)
        assert result.metrics.cached_tokens == 0  # of the prompt when it came, not of what was computed again


def test_what_a_request_has_computed_itself_was_not_cached() -> None:
    """It is preempted in the midst of its prompt, and goes on from its own pages."""
    llm = fake_llm(pages=8, max_batch=2, max_tokens=2)
    prompts = [text(60), text(300, seed=1)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (150, 2)]
    results = llm.generate(prompts, params)
    assert llm.engine.scheduler.preemptions == 1
    assert [result.metrics.cached_tokens for result in results] == [0, 0]
    assert results[1].outputs[0].token_ids == reference_greedy(prompts[1], 2, eos=None)


def test_without_the_option_nothing_is_found(tiny_artifact: Callable[[str], Path]) -> None:
    prompt = text(200)
    with qcompile.load(tiny_artifact("w4a8"), threads=1, prefix_caching=False) as llm:
        without = [llm.generate([prompt], SHORT)[0] for _ in range(2)]
    with qcompile.load(tiny_artifact("w4a8"), threads=1) as llm:
        result = [llm.generate([prompt], SHORT)[0] for _ in range(2)]
    assert [output.metrics.cached_tokens for output in without + result] == [0, 0, 0, 192]
    assert len({tuple(output.outputs[0].token_ids) for output in without + result}) == 1
    with pytest.raises(UsageError, match="prefix_caching must be True or False"):
        qcompile.load(tiny_artifact("w4a8"), prefix_caching=1)  # type: ignore[arg-type]


def test_pages_of_a_cpu_that_were_never_used_stay_so(tiny_artifact: Callable[[str], Path]) -> None:
    """They take no memory, unless the cache's size was given."""
    prompts = [text(200, seed=seed) for seed in range(30)]  # four pages each, three of them full; the context has four
    with qcompile.load(tiny_artifact("w4a8"), threads=1) as llm:
        llm.generate(prompts, SHORT)
        pool, page = llm.engine.pool, llm.manifest["runtime"]["kv"]["page_bytes"]
        assert pool.total == 16 * 4 and pool._remembered == pool.total // 4
    with qcompile.load(tiny_artifact("w4a8"), threads=1, kv_cache_bytes=64 * page) as llm:
        llm.generate(prompts, SHORT)
        assert llm.engine.pool._remembered > 40


def test_a_hierarchical_cache_is_not_shared(tmp_path: Path, tiny_checkpoint: Path) -> None:
    qcompile.build(str(tiny_checkpoint), tmp_path / "out", recipe="quantspec")
    with qcompile.load(tmp_path / "out", threads=1, gamma=0) as llm:
        outputs = [llm.generate([text(200)], SHORT)[0] for _ in range(2)]
        assert [output.metrics.cached_tokens for output in outputs] == [0, 0] and llm.engine.pool.prefixes is None


@pytest.mark.parametrize("own", first((True,), (False, True)))
def test_drafts_go_on_from_their_own_caches(
    own: bool, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft with a cache of its own computes a shared prompt once, too; tokens are those of no sharing."""
    qcompile.build(str(tiny_checkpoint), tmp_path / "out", recipe="ml-specqd", drafts=[str(tiny_checkpoint)] * own)
    start = text(190)
    prompts = [[*start, index] for index in range(1, 6)]
    params = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=24, ignore_eos=True, logprobs=1)
        for index in range(5)
    ]
    with qcompile.load(tmp_path / "out", threads=1, gamma=0, prefix_caching=False) as llm:
        plain = [output.outputs[0] for output in llm.generate(prompts, params)]
    with qcompile.load(tmp_path / "out", threads=1, gamma=3) as llm:
        rows: list[int] = []
        step = Executor.step

        def counted(self: Executor, given: Sequence[Rows], *rest: Any, **more: Any) -> Any:
            if self is not llm.executor:
                rows.extend(len(one.tokens) for one in given)
            return step(self, given, *rest, **more)

        monkeypatch.setattr(Executor, "step", counted)
        llm.engine.speculation.gamma = 0
        assert llm.generate([prompts[0]], params[0])[0].outputs[0] == plain[0]
        assert not rows  # the draft knows nothing of it yet
        llm.engine.speculation.gamma = 3
        for one in range(5):
            output = llm.generate([prompts[one]], params[one])[0]
            assert output.outputs[0] == plain[one] and output.metrics.cached_tokens == 128
        assert llm.generate(prompts, params)[0].outputs[0] == plain[0]
        assert len([count for count in rows if count > 100]) == own
        llm.engine.check()
        assert llm.engine.pool.used == 0
