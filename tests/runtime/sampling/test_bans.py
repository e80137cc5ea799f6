"""Tokens that a request may not choose (min_tokens, allowed_token_ids, bad_words), priorities, and cut prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qcompile import SamplingParams
from qcompile.errors import UsageError
from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling.biases import NO_BANS, Bans, BiasTable, TokenBiases, word_tokens
from tests.support.fake import CONTEXT, EOS, VOCAB, byte_tokenizer, fake_llm, reference_logits

pytestmark = pytest.mark.usefixtures("executors")
TOKENIZER = byte_tokenizer()
PROMPTS = ["ab", "a longer prompt", "x" * 70]


@pytest.fixture(scope="module")
def llm(executors: None) -> LLM:
    return fake_llm(tokenizer=TOKENIZER, pages=200)


def greedy(prompt: str, count: int, banned: Any, ends: Sequence[int] = (EOS,)) -> list[int]:
    """The most probable tokens, without those that banned(output) gives."""
    tokens = TOKENIZER.encode(prompt).ids
    start = len(tokens)
    while len(tokens) < start + count:
        logits = reference_logits(tokens)[-1].copy()
        logits[sorted(banned(tokens[start:]))] = -np.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] in ends:
            break
    return tokens[start:]


def ends_soon(prompt: str, most: int = 40) -> list[int]:
    """Tokens that the model chooses early, which end its text in these tests."""
    free = greedy(prompt, most, lambda output: (), ends=())
    return sorted({free[1], free[4], free[9]})


@pytest.mark.parametrize("least", [0, 1, 2, 7, 30])
def test_nothing_ends_an_output_before_min_tokens(llm: LLM, least: int) -> None:
    """And all that was chosen after the ends were banned follows from that."""
    params, wanted = [], []
    for prompt in PROMPTS:
        ends = ends_soon(prompt)
        options = {"temperature": 0, "max_tokens": 40, "stop_token_ids": ends, "min_tokens": least}
        params.append(SamplingParams(**options))
        banned = lambda output, ends=ends: {EOS, *ends} if len(output) < least else ()  # noqa: E731
        wanted.append(greedy(prompt, 40, banned, [EOS, *ends]))
    result = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    assert [output.token_ids for output in result] == wanted
    assert all(len(output.token_ids) > least for output in result if output.finish_reason == "stop")
    assert "stop" in {output.finish_reason for output in result}


def test_ends_that_are_ignored_may_come_early(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, min_tokens=40, ignore_eos=True)
    assert llm.generate("ab", params)[0].outputs[0].token_ids == greedy("ab", 40, lambda output: (), ends=())


def test_stop_texts_do_not_count_before_min_tokens(llm: LLM) -> None:
    options = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logit_bias": {66: 100}}
    letter = llm.decode([66])
    for least in (0, 3):
        output = llm.generate("ab", stop=letter, min_tokens=least, **options)[0].outputs[0]
        assert (output.text, len(output.token_ids)) == (letter * least, least + 1)
        output = llm.generate("ab", stop=letter * 2, min_tokens=least, **options)[0].outputs[0]
        assert (output.text, len(output.token_ids)) == (letter * least, least + 2)


def test_only_allowed_tokens_are_chosen(llm: LLM) -> None:
    allowed = [*range(40, 90), EOS]
    result = [out.outputs[0] for out in llm.generate(PROMPTS, temperature=0, max_tokens=30, allowed_token_ids=allowed)]
    banned = set(range(VOCAB)) - set(allowed)
    assert [output.token_ids for output in result] == [greedy(prompt, 30, lambda output: banned) for prompt in PROMPTS]
    options = {"temperature": 5.0, "seed": 3, "max_tokens": 50, "ignore_eos": True, "n": 4}
    outputs = llm.generate("ab", allowed_token_ids=np.array(allowed[:9]), logit_bias={44: 3}, **options)[0].outputs
    assert {token for output in outputs for token in output.token_ids} == set(allowed[:9])
    reported = llm.generate("ab", temperature=0, logprobs=21, max_tokens=2, allowed_token_ids=[9, 8])[0].outputs[0]
    assert set(reported.token_ids) <= {8, 9}  # chosen on the host
    assert llm.generate("ab", temperature=0, max_tokens=3, allowed_token_ids=[9])[0].outputs[0].token_ids == [9] * 3


def test_bad_words(llm: LLM) -> None:
    """Of one token or several: the last is not chosen after the others."""
    words, letters = [[66], [67, 68], [70, 67, 69]], {66, 67, 68, 69, 70}
    texts, others = [TOKENIZER.decode(word) for word in words], set(range(VOCAB)) - letters

    def banned(output: list[int]) -> set[int]:
        return others | {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]}

    asked = SamplingParams(temperature=0, max_tokens=40, bad_words=texts, allowed_token_ids=sorted(letters))
    result = [output.outputs[0] for output in llm.generate(PROMPTS, asked)]
    assert [output.token_ids for output in result] == [greedy(prompt, 40, banned) for prompt in PROMPTS]
    free = llm.generate(PROMPTS, temperature=0, max_tokens=40, allowed_token_ids=sorted(letters))
    assert all(text in "".join(output.outputs[0].text for output in free) for text in texts[:2])
    assert not any(text in output.text for text in texts for output in result)
    for sampled in ({"logprobs": 21}, {"repetition_penalty": 1.2}, {}):  # on the host, and with what else is counted
        asked = SamplingParams(
            temperature=2, seed=1, max_tokens=60, bad_words=texts, allowed_token_ids=[67, 68], **sampled
        )
        text = llm.generate("ab", asked)[0].outputs[0].text
        assert len(set(text)) == 2 and texts[1] not in text


def test_words_as_the_tokenizer_encodes_them() -> None:
    tokens = {"cat": [1], " cat": [2], "dog": [3, 4], " dog": [5, 4], "bird": [6], " bird": [7, 8], " ": [9], "": []}
    encode = lambda text: tokens.get(text, [0])  # noqa: E731
    assert word_tokens(["cat"], encode) == ((1,), (2,))
    assert word_tokens([" cat"], encode) == ((1,), (2,))
    assert word_tokens(["dog", "bird"], encode) == ((3, 4), (5, 4), (6,))
    assert word_tokens([" "], encode) == ((9,),)


def test_biases_change_where_a_call_ends() -> None:
    biases = TokenBiases(
        BiasTable({5: 2.0, 3: 1.0}, Bans(frozenset({1, 2, 5, 6}), frozenset({6}), 2, ((5, 1), (2,))), 8)
    )
    assert biases.until(0) == 1 and biases.after(0, ()) is not None

    def banned(skipped: int = 0, ahead: Sequence[int] = ()) -> set[int]:
        result = biases.after(skipped, ahead)
        assert result and len(set(result.tokens.tolist())) == len(result.tokens)
        assert dict(zip(result.tokens.tolist(), result.values.tolist(), strict=True))[5] == 2
        return {int(token) for token, value in zip(*result, strict=True) if value == -np.inf}

    assert banned() == {0, 2, 3, 4, 6, 7} and banned(2) == {0, 2, 3, 4, 7}
    assert banned(0, [5]) == {0, 1, 2, 3, 4, 6, 7} and banned(0, [5, 1]) == {0, 2, 3, 4, 7}
    biases.note(5)
    assert banned() == {0, 1, 2, 3, 4, 6, 7}
    biases.note(5)
    assert banned() == {0, 1, 2, 3, 4, 7}
    early = TokenBiases(BiasTable(None, Bans(ends=frozenset({6}), least=2), 8))
    assert [early.until(count) for count in (0, 1, 2, 9)] == [2, 2, None, None]
    assert TokenBiases(BiasTable(None, NO_BANS, 8)).after(0, ()) is None


def test_prompts_that_are_cut(llm: LLM) -> None:
    text = "one two three"
    for kept, shown in ((3, "ree"), (100, text), (-1, text)):
        (output,) = llm.generate(text, truncate_prompt_tokens=kept, temperature=0, max_tokens=5)
        assert llm.decode(output.prompt_token_ids) == shown
        assert output.outputs[0].token_ids == greedy(shown, 5, lambda output: ())
    long = [7] * (CONTEXT + 50)
    for most, left in ((30, CONTEXT - 30), (None, CONTEXT - 1), (CONTEXT, 1)):
        params = SamplingParams(truncate_prompt_tokens=-1, temperature=0, max_tokens=most, stop_token_ids=range(1, 260))
        (output,) = llm.generate([long], params)
        assert len(output.prompt_token_ids) == left
    with pytest.raises(UsageError, match="too long"):
        llm.generate([long], truncate_prompt_tokens=CONTEXT)


def test_the_lowest_priority_runs_first() -> None:
    order: list[int] = []
    with fake_llm(tokenizer=TOKENIZER, max_batch=1) as llm:
        priorities = [0, 2, -1, 2, 0, -5]
        params = [SamplingParams(temperature=0, max_tokens=3, priority=priority) for priority in priorities]
        for output in llm.stream(["ab"] * 6, params):
            if output.finished:
                order.append(output.request_id)
    assert order == [5, 2, 0, 4, 1, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 17}, "min_tokens must be a whole number of at least 0 and at most max_tokens, not 17"),
        ({"min_tokens": -1}, "min_tokens must be"),
        ({"min_tokens": 1.5}, "min_tokens must be"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [260]}, "allowed_token_ids has token 260, outside the model's vocabulary of 260"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids has 'a', which is no token number"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "leave no token to choose"),
        ({"allowed_token_ids": [66], "bad_words": [TOKENIZER.decode([66])]}, "leave no token to choose"),
        ({"bad_words": "word"}, "bad_words must be None or a list of at most 1024 texts of 1 to 256 characters"),
        ({"bad_words": [""]}, "bad_words must be"),
        ({"bad_words": ["x" * 257]}, "bad_words must be"),
        ({"min_tokens": 1, "structured_outputs": {"regex": "a"}}, "are not possible with structured_outputs"),
        ({"priority": 0.5}, "priority must be a whole number, not 0.5"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be None, -1, or a whole number of at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be"),
    ],
)
def test_what_is_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate("a", **options)


def test_words_need_a_tokenizer() -> None:
    with fake_llm() as bare, pytest.raises(UsageError, match="no tokenizer: bad_words cannot be encoded"):
        bare.generate([[1, 2]], bad_words=["a"])
