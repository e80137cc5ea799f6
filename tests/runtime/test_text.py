"""Text in and out: detokenization, stop texts, streams, and every malformed request."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from qcompile.errors import UsageError
from qcompile.runtime.detokenizer import BROKEN, Detokenizer, spelled
from qcompile.runtime.engine import stops
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.tokenizer import encode
from qcompile.texts import encoded
from tests.support.calls import fix_calls
from tests.support.fake import CONTEXT, VOCAB, byte_tokenizer, fake_llm, reference_greedy

pytestmark = pytest.mark.usefixtures("executors")

TOKENIZER = byte_tokenizer()
TEXT = "naïve café — 你好, мир 🙂👩‍👩‍👧 x = [1, 2]\n\tend"


@pytest.fixture
def llm() -> LLM:
    return fake_llm(tokenizer=TOKENIZER)


def scripted(llm: LLM, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fake model answer `text`, token by token, whatever the prompt."""
    assert llm.tokenizer
    answer = llm.tokenizer.encode(text).ids

    def run(self: Any, batch: Any) -> None:
        from tests.support.fake import ints

        for at, row in enumerate(ints(batch.output_rows, batch.outputs)):
            position = int(ints(batch.positions, batch.tokens)[row])
            ints(batch.argmax, batch.outputs)[at] = answer[position] if position < len(answer) else 0

    monkeypatch.setattr(type(llm.executor.library), "_run", run)


def test_pieces_of_text_join_to_the_whole_and_are_never_broken() -> None:
    ids = TOKENIZER.encode(TEXT).ids
    rng = random.Random(0)
    for _ in range(50):
        detokenizer, pieces, at = Detokenizer(TOKENIZER, [5, 6, 7]), [], 0
        while at < len(ids):
            step = rng.randint(1, 5)
            pieces.append(detokenizer.push(ids[at : at + step]))
            at += step
        pieces.append(detokenizer.push([], last=True))
        assert "".join(pieces) == TEXT
        assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_are_no_character_come_out_as_the_tokenizer_decodes_them() -> None:
    ids = list(range(1, 257)) * 2
    detokenizer = Detokenizer(TOKENIZER, [])
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.push([], last=True)
    assert text == TOKENIZER.decode(ids)


def test_bytes_without_end_are_given_out_in_time() -> None:
    lonely = TOKENIZER.encode("é").ids[1]  # a continuation byte
    detokenizer = Detokenizer(TOKENIZER, [])
    given = "".join(detokenizer.push([lonely]) for _ in range(200))
    assert len(given) >= 150 and len(detokenizer._ids) < 80


def test_character_behind_bytes_that_are_none_survives_however_it_comes() -> None:
    lonely = TOKENIZER.encode("é").ids[1]
    for broken in (31, 32, 33, 70):
        ids = [lonely] * broken + TOKENIZER.encode("🙂 é").ids
        for step in (1, 2, 3, 9):
            detokenizer = Detokenizer(TOKENIZER, [5, 6, 7])
            pieces = [detokenizer.push(ids[at : at + step]) for at in range(0, len(ids), step)]
            assert "".join(pieces) + detokenizer.push([], last=True) == "\ufffd" * broken + "🙂 é"


def test_character_begun_in_the_prompt_is_completed() -> None:
    first, *rest = TOKENIZER.encode("你").ids
    detokenizer = Detokenizer(TOKENIZER, [first])
    assert detokenizer.push(rest[:1]) == "" and detokenizer.push(rest[1:]) == "你"


def test_spaces_between_words_survive_a_decoder_that_strips_them() -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "▁one": 1, "▁two": 2, "▁three": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([2]) == "two"
    detokenizer = Detokenizer(tokenizer, [1])
    assert [detokenizer.push([2]), detokenizer.push([3, 1]), detokenizer.push([2])] == [" two", " three one", " two"]


def test_tokens_are_spelled_as_they_are_in_the_text() -> None:
    """A space at the start of a word is a part of it also where the decoder strips it from a text."""
    for tokenizer in (byte_fallback(), leading_space(), TOKENIZER):
        tokens = [token for token in range(tokenizer.get_vocab_size()) if "\ufffd" not in tokenizer.decode([token])]
        letter = next(token for token in tokens if tokenizer.decode([token]) == "b")
        text = "".join(spelled(tokenizer, token) for token in tokens)
        assert "b" + text == tokenizer.decode([letter, *tokens], skip_special_tokens=False)


def byte_fallback() -> Tokenizer:
    """As SentencePiece models': what has no token is spelled in bytes, and a newline is one of these."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "b", "\u2581the", "é"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    space, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def leading_space() -> Tokenizer:
    """One that strips the space at the start of a text, which what comes after a special token is not."""
    words = ["<unk>", "\u2581", "\u2581a", "a", "b", "\u2581the"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_fallback(), leading_space()], ids=["bytes", "space"])
def test_a_text_is_the_same_in_whatever_pieces_its_tokens_come(tokenizer: Tokenizer) -> None:
    """How many tokens a step gives depends on what shares it: the text must not."""
    draw = random.Random(1)
    size = tokenizer.get_vocab_size()
    for _ in range(300):
        prompt, tokens = ([draw.randrange(size) for _ in range(draw.randrange(most))] for most in (9, 50))
        result = set()
        for most in (1, 7, 50):
            detokenizer, text, at = Detokenizer(tokenizer, prompt), "", 0
            while at < len(tokens):
                count = draw.randint(1, most)
                text += detokenizer.push(tokens[at : at + count])
                at += count
            result.add(text + detokenizer.push([], last=True))
        assert len(result) == 1, (prompt, tokens, result)
    newline, cut = tokenizer.token_to_id("<0x0A>"), tokenizer.token_to_id("<0xF0>")
    if newline:
        detokenizer = Detokenizer(tokenizer, [newline])
        assert detokenizer.push([newline, cut]) + detokenizer.push([], last=True) == "\n\ufffd"
    else:
        whole = tokenizer.decode([3, 2, 7, 6, 2, 7, 5])
        detokenizer = Detokenizer(tokenizer, [3])
        assert "a" + "".join(detokenizer.push([token]) for token in [2, 7, 6, 2, 7, 5]) == whole == "a a a the"


def test_a_decode_stream_gives_other_text() -> None:
    """Why the detokenizer is not `tokenizers.decoders.DecodeStream`; if this fails, that may have become as good."""

    def streamed(tokenizer: Tokenizer, tokens: list[int]) -> str:
        stream = decoders.DecodeStream(skip_special_tokens=True)
        return "".join(stream.step(tokenizer, token) or "" for token in tokens)

    def detokenized(tokenizer: Tokenizer, tokens: list[int]) -> str:
        detokenizer = Detokenizer(tokenizer, [])
        return "".join(detokenizer.push([token]) for token in tokens) + detokenizer.push([], last=True)

    draw, size, other = random.Random(2), TOKENIZER.get_vocab_size(), 0
    for _ in range(300):
        tokens = [draw.randrange(size) for _ in range(draw.randrange(1, 30))]
        assert detokenized(TOKENIZER, tokens) == TOKENIZER.decode(tokens)
        other += streamed(TOKENIZER, tokens) != TOKENIZER.decode(tokens)
    assert other > 0
    cut = TOKENIZER.encode("é").ids[:1]
    assert detokenized(TOKENIZER, cut) == "\ufffd" and streamed(TOKENIZER, cut) == ""
    lonely = TOKENIZER.encode("é").ids[1:] * 200
    assert len(detokenized(TOKENIZER, lonely)) == 200 and streamed(TOKENIZER, lonely) == ""
    fallback, draw = byte_fallback(), random.Random(1)
    with pytest.raises(Exception, match="Invalid prefix encountered"):
        for _ in range(300):
            streamed(fallback, [draw.randrange(fallback.get_vocab_size()) for _ in range(20)])


def test_text_and_stream_agree(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(llm, TEXT, monkeypatch)
    result = llm.generate("?", temperature=0, max_tokens=500)[0]
    assert result.prompt == "?" and result.outputs[0].text == TEXT
    assert result.outputs[0].finish_reason == "stop" and result.outputs[0].stop_reason is None
    assert result.outputs[0].token_ids[-1] == 0
    fix_calls(llm.engine, 3)
    pieces = [(out.outputs[0].new_text, out.finished) for out in llm.stream("?", temperature=0, max_tokens=500)]
    assert "".join(text for text, _ in pieces) == TEXT
    assert len(pieces) > 10 and [finished for _, finished in pieces].index(True) == len(pieces) - 1


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("x = [", TEXT[: TEXT.index("x = [")], "x = ["),
        (["never", "мир"], TEXT[: TEXT.index("мир")], "мир"),
        (["ïve", "naï"], "", "naï"),
        ("n", "", "n"),
        ("endless", TEXT, None),
        ("🙂", TEXT[: TEXT.index("🙂")], "🙂"),
    ],
)
@pytest.mark.parametrize("steps", [1, 4, 50])
def test_stop_texts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: Any, text: str, reason: str | None, steps: int
) -> None:
    scripted(llm, TEXT, monkeypatch)
    fix_calls(llm.engine, steps)
    stream = list(llm.stream("?", temperature=0, max_tokens=500, stop=stop))
    output = stream[-1].outputs[0]
    assert "".join(out.outputs[0].new_text for out in stream) == output.text == text
    assert output.stop_reason == reason and output.finish_reason == "stop"
    if reason:
        assert TOKENIZER.decode(output.token_ids).endswith(reason)


@pytest.mark.parametrize("steps", [1, 4])
def test_special_tokens_have_text_where_they_are_asked_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The token that ends the text has none."""
    scripted(llm, "a<eos>é<eos>", monkeypatch)
    fix_calls(llm.engine, steps)
    for options, text in (({"max_tokens": 5}, "a<eos>é<eos>"), ({"max_tokens": 5, "stop": "<eos>"}, "a")):
        result = list(llm.stream("?", temperature=0, ignore_eos=True, skip_special_tokens=False, **options))
        assert result[-1].outputs[0].text == text == "".join(out.outputs[0].new_text for out in result)
    for options in ({}, {"stop": "<eos>"}, {"stop": "z"}):
        output = llm.generate("?", temperature=0, skip_special_tokens=False, **options)[0].outputs[0]
        assert output.text == "a" and output.token_ids[-1] == 0 and output.stop_reason is None
    assert llm.generate("?", temperature=0, max_tokens=5, ignore_eos=True)[0].outputs[0].text == "aé"
    with pytest.raises(UsageError, match="skip_special_tokens must be True or False"):
        llm.generate("?", skip_special_tokens=1)


@pytest.mark.parametrize("steps", [1, 4])
def test_nothing_is_added_after_a_stop_text(llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Another request goes on; the next step may have run already when the text is found."""
    scripted(llm, TEXT, monkeypatch)
    fix_calls(llm.engine, steps)
    params = [SamplingParams(temperature=0, max_tokens=40, stop=stop) for stop in ("ï", None)]
    ended, other = (llm.engine.add(TOKENIZER.encode("?").ids, one) for one in params)
    while llm.engine.busy:
        llm.engine.step()
    assert ended.output.text == "na" and TOKENIZER.decode(ended.output.token_ids) == "naï"
    assert ended.sequence.tokens == [*TOKENIZER.encode("?").ids, *ended.output.token_ids]
    assert len(other.output.token_ids) == 40 and llm.engine.pool.used == 0


@pytest.mark.parametrize("stop", [None, "endless"])
def test_text_is_decoded_when_it_is_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: str | None) -> None:
    """The search for stop texts asks after each step; else some tokens wait until anybody asks."""
    scripted(llm, TEXT, monkeypatch)
    fix_calls(llm.engine, 1)
    decoded = []
    push = Detokenizer.push

    def noted(self: Detokenizer, tokens: Sequence[int], last: bool = False) -> str:
        decoded.append(len(tokens))
        return push(self, tokens, last)

    monkeypatch.setattr(Detokenizer, "push", noted)
    prompt = TOKENIZER.encode("?").ids
    request = llm.engine.add(prompt, SamplingParams(temperature=0, max_tokens=80, stop=stop))
    samples = PromptSamples(0, None, prompt, [request], request.params)
    while len(request.output.token_ids) < 40:
        llm.engine.step()
    assert decoded == ([1] * len(decoded) if stop else [stops._MOST_UNREAD])
    read = sum(decoded) + len(request.stream.unread)  # the tokens of a step that was just waited for come later
    assert 38 < read <= len(request.output.token_ids) and (len(request.stream.unread) == 0) == (stop is not None)
    assert samples.output().outputs[0].text == TOKENIZER.decode(request.output.token_ids[:read]).rstrip(BROKEN)
    assert not request.stream.unread and sum(decoded) == read
    llm.engine.cancel(request)


def test_a_stop_text_that_ends_in_half_a_character(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of the tokens makes certain that no character comes of them."""
    scripted(llm, "ab🙂", monkeypatch)
    for stop, text, reason in (("b\ufffd", "a", "stop"), ("\ufffd", "ab", "stop"), ("b ", "ab\ufffd", "length")):
        output = llm.generate("?", temperature=0, max_tokens=4, stop=stop)[0].outputs[0]
        assert (output.text, output.finish_reason, len(output.token_ids)) == (text, reason, 4)
        assert output.stop_reason == (stop if reason == "stop" else None)
    stream = llm.stream("?", temperature=0, max_tokens=4, stop="b\ufffd")
    assert "".join(output.outputs[0].new_text for output in stream) == "a"


def test_samples_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12)
    first, second = (llm.generate(["a", "b"], params) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert [out.token_ids for out in a.outputs] == [out.token_ids for out in b.outputs]
        assert [out.index for out in a.outputs] == [0, 1, 2]
        assert a.outputs[0].token_ids != a.outputs[1].token_ids
    unseeded = [llm.generate("a", max_tokens=12)[0].outputs[0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_logprobs(llm: LLM) -> None:
    output = llm.generate("a", temperature=0, max_tokens=6, logprobs=3)[0].outputs[0]
    assert output.logprobs is not None and output.cumulative_logprob is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, result in zip(output.token_ids, output.logprobs, strict=True):
        assert len(result) == 3 and result[token].rank == 1
        assert sorted(entry.rank for entry in result.values()) == [1, 2, 3]
        assert isinstance(result[token].decoded_token, str)
    total = sum(result[token].logprob for token, result in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
    plain = llm.generate("a", temperature=0, max_tokens=6)[0].outputs[0]
    assert plain.token_ids == output.token_ids and plain.logprobs is None
    assert plain.token_ids == reference_greedy(TOKENIZER.encode("a").ids, 6)


def test_samples_that_still_wait_for_their_turn() -> None:
    """What was given stays as it was, and moments are those of the samples that run."""
    llm = fake_llm(max_batch=1)
    for output in list(llm.stream([[5, 6]], n=3, seed=1, max_tokens=4, logprobs=0)):
        assert all(len(sample.logprobs or ()) == len(sample.token_ids) for sample in output.outputs)
        times = output.metrics
        assert 0 < times.arrival_time <= times.first_scheduled_time <= times.first_token_time


def test_prompts_may_be_one_or_many_texts_or_tokens(llm: LLM) -> None:
    ids = TOKENIZER.encode("ab").ids
    results = [llm.generate(prompts, temperature=0)[0].outputs[0].token_ids for prompts in ("ab", ["ab"], ids, [ids])]
    assert results == [results[0]] * 4
    assert len(llm.generate(["ab", ids], temperature=0)) == 2


def test_tokens_may_be_of_any_kind_of_list(llm: LLM) -> None:
    ids = TOKENIZER.encode("ab").ids
    one = llm.generate(ids, temperature=0)[0].outputs[0].token_ids
    for array in (np.array(ids, np.uint16), torch.tensor(ids), tuple(ids), [np.int64(token) for token in ids]):
        for prompts in (array, [array], np.array([ids]), torch.tensor([ids])):
            (output,) = llm.generate(prompts, temperature=0)
            assert output.outputs[0].token_ids == one and output.prompt_token_ids == ids
            assert all(type(token) is int for token in output.prompt_token_ids)
    assert len(llm.generate(torch.tensor([ids, ids]), temperature=0)) == 2
    assert torch.equal(llm.logits([np.array(ids)]), llm.logits([ids]))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt is empty"),
        (np.array([]), "no prompt"),
        (np.array(3), "prompts must be a text or a list, not int"),
        (np.array([1.0]), "must be text or a list of token numbers, not float"),
        (np.array([True]), "must be text or a list of token numbers, not bool"),
        (torch.ones((1, 1, 1), dtype=torch.int64), "must be text or a list of token numbers, not list"),
        ([], "no prompt"),
        ([[]], "prompt is empty"),
        (["ok", ""], "prompt is empty"),
        ([3.5], "must be text or a list of token numbers, not float"),
        (7, "prompts must be a text or a list, not int"),
        ([["a"]], "must be text or a list"),
        ([b"bytes"], "must be text or a list of token numbers, not bytes"),
        (b"bytes", "not bytes"),
        ([[True]], "must be text"),
        ([[1, -1]], "token -1 is outside the vocabulary of 260"),
        ([[VOCAB]], "token 260 is outside"),
        ([[10**5000]], "a number of thousands of digits is outside"),
        ([[1] * CONTEXT], "has 1000 tokens, the context 1000"),
        ("a" * (CONTEXT + 1), "has 1001 tokens"),
    ],
)
def test_malformed_prompts(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        llm.generate(prompts, temperature=0)
    assert "\n" not in str(raised.value)
    assert not llm.engine.busy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be a finite number, at least 0, not -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number between 0.001 and 1000"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be a number between -2 and 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"temperature": math.inf}, "temperature must be a finite number, at least 0, not inf"),
        ({"min_p": "x"}, "min_p must be a number between 0 and 1, not 'x'"),
        ({"temperature": 10**5000}, "not a number of thousands of digits"),
        ({"stop": 5}, "stop must be one or several texts"),
        ({"stop": [""] * 1000}, r"\.\.\.\]$"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n must be"),
        ({"n": 2**14 + 1, "max_tokens": 1}, "n must be a whole number of at least 1 and at most 16384"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
        ({"n": 2, "best_of": 1}, "best_of must be None or a whole number of at least n"),
        ({"seed": 0.5}, "seed must be None or a whole number"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"beam": 4}, "unknown sampling option 'beam'"),
    ],
)
def test_malformed_options(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate("a", **options)


def test_a_cache_smaller_than_the_context_is_told_as_the_reason() -> None:
    llm = fake_llm(pages=3)
    room = llm.context
    assert room < CONTEXT
    for ask in (llm.generate, llm.logits):
        with pytest.raises(
            UsageError, match=rf"the cache room for {room} of the model's {CONTEXT} \(see kv_cache_bytes"
        ):
            ask([[1] * (room + 1)])  # type: ignore[operator]


def test_mismatched_parameters(llm: LLM) -> None:
    for params in ("x", {"max_tokens": 1}, [None]):
        with pytest.raises(UsageError, match="params must be SamplingParams"):
            llm.generate("a", params)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="2 SamplingParams for 1"):
        llm.generate("a", [SamplingParams()] * 2)
    with pytest.raises(UsageError, match="not both"):
        llm.generate("a", SamplingParams(), max_tokens=3)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "empty"),
        ([[]], "empty"),
        ([1, 2], "token_ids must be"),
        ([[1, 2], [3]], "one length"),
        ([[1.5]], "whole numbers"),
        ([[VOCAB]], "outside"),
        ([[1] * (CONTEXT + 1)], f"has {CONTEXT + 1} tokens, the context {CONTEXT}: shorten it"),
    ],
)
def test_malformed_token_ids(llm: LLM, token_ids: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.logits(token_ids)


def test_without_a_tokenizer_only_tokens() -> None:
    llm = fake_llm()
    assert llm.generate([[1, 2]], temperature=0)[0].outputs[0].text == ""
    with pytest.raises(UsageError, match="no tokenizer"):
        llm.generate("a")
    with pytest.raises(UsageError, match="no tokenizer: stop texts"):
        llm.generate([[1, 2]], temperature=0, stop="a")


def test_closed_once_and_for_all(llm: LLM) -> None:
    with llm:
        pass
    assert llm.executor.library.closed
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.generate("a", temperature=0)


def test_encoding_a_long_text_lets_other_threads_run() -> None:
    """A server's other answers must not wait for one client's prompt."""
    tokenizer, go, ran = byte_tokenizer(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), ran.set()))
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(60)  # nobody is made to give way
    try:
        go.set()
        assert len(encode(tokenizer, "x " * 200_000)) == 400_000 and ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_threads_share_a_model(llm: LLM) -> None:
    prompts = [[first, 2, 3] for first in range(1, 7)]
    alone = [reference_greedy(prompt, 40) for prompt in prompts]
    result: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        for _ in range(3):
            result[number] = llm.generate([prompts[number]], max_tokens=40, temperature=0)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(len(prompts))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert [result.get(number) for number in range(len(prompts))] == alone
    assert llm.engine.pool.used == 0 and not llm.engine.busy


def test_a_tokenizer_that_fails_with_a_prompt_is_told() -> None:
    """A pattern that can be tried in too many ways: the code of tokenizers then fails, which is no Exception."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = byte_tokenizer()
    split = pre_tokenizers.Split(Regex("(a|a)*$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    llm = fake_llm(tokenizer=tokenizer)
    with pytest.raises(UsageError, match=r"the tokenizer fails with this prompt: .*retry-limit"):
        llm.generate("a" * 60 + "!")
    assert llm.generate("!", max_tokens=2)[0].outputs[0].token_ids
    with pytest.raises(UsageError, match=r"the tokenizer fails with the file: .*retry-limit"):
        list(encoded(tokenizer, ["a" * 60 + "!"], "the file"))
