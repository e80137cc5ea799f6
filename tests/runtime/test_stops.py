"""Where an output ends by the caller's wish: at stop texts, also those with special tokens in them, and stop tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken

from qcompile.errors import UsageError
from qcompile.runtime.engine.held_text import HeldText
from qcompile.runtime.llm import LLM
from tests.runtime.test_text import scripted
from tests.support.fake import EOS, byte_tokenizer, fake_llm

END, ADDED = 257, 258
TOKENIZER = byte_tokenizer()
TOKENIZER.add_special_tokens([AddedToken("<|end|>", special=True)])
TOKENIZER.add_tokens([AddedToken("<tool>", special=False)])


@pytest.fixture(scope="module")
def llm() -> LLM:
    return fake_llm(tokenizer=TOKENIZER)


def said(llm: LLM, **options: Any) -> Any:
    """The output, of which all pieces of a stream are parts."""
    whole = llm.generate("?", temperature=0, max_tokens=60, **options)[0].outputs[0]
    pieces = [out.outputs[0].new_text for out in llm.stream("?", temperature=0, max_tokens=60, **options)]
    assert "".join(pieces) == whole.text
    return whole


SCRIPT = "ab<|end|>cd<tool>e<|end|><|end|>\nfg 你<|end|>h<eos>"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("<|end|>", "ab", "<|end|>"),
        ("b<|end|>", "a", "b<|end|>"),
        ("<|end|>cd", "ab", "<|end|>cd"),
        ("<|end|>c", "ab", "<|end|>c"),
        ("<|end|><|end|>", "abcd<tool>e", "<|end|><|end|>"),
        ("<|end|>\n", "abcd<tool>e", "<|end|>\n"),
        ("e<|end|><|end|>\nf", "abcd<tool>", "e<|end|><|end|>\nf"),
        ("你<|end|>h", "abcd<tool>e\nfg ", "你<|end|>h"),
        ("<tool>", "abcd", "<tool>"),
        (["<|end|>x", "cd"], "ab", "cd"),
        (["<|end|>x", "end"], "abcd<tool>e\nfg 你h", None),
        (["<|end|>x", "|>cd"], "abcd<tool>e\nfg 你h", None),
        (["d<|end|>", "bcd"], "a", "bcd"),
        ("<|end|>x", "abcd<tool>e\nfg 你h", None),
    ],
)
def test_stop_texts_with_special_tokens(
    llm: LLM, stop: str | list[str], text: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They match the text with the special tokens in it, of which the output shows nothing."""
    if stop == ["d<|end|>", "bcd"]:  # the end between them is in no text, so it parts `bcd`, which is not found
        text, reason = ("abcd<tool>e\nfg 你h", None)
    scripted(llm, SCRIPT, monkeypatch)
    output = said(llm, stop=stop)
    assert (output.text, output.stop_reason, output.finish_reason) == (text, reason, "stop")
    shown = said(llm, stop=stop, skip_special_tokens=False)
    assert shown.stop_reason == reason or isinstance(stop, list)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_tokens(llm: LLM, ignore_eos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(llm, SCRIPT, monkeypatch)
    ids = TOKENIZER.encode(SCRIPT).ids
    d = ids[ids.index(END) + 2]
    output = said(llm, stop_token_ids=[d, ADDED], ignore_eos=ignore_eos)
    assert (output.text, output.stop_reason, output.finish_reason) == ("abc", d, "stop")
    assert output.token_ids == ids[: ids.index(d) + 1]
    output = said(llm, stop_token_ids=[ADDED], include_stop_str_in_output=True, ignore_eos=ignore_eos)
    assert (output.text, output.stop_reason) == ("abcd<tool>", ADDED)
    output = said(llm, stop_token_ids=[END], skip_special_tokens=False, ignore_eos=ignore_eos)
    assert (output.text, output.stop_reason) == ("ab", END)
    output = said(llm, stop_token_ids=[EOS], ignore_eos=ignore_eos)  # also where the end of text is ignored
    assert output.text == "abcd<tool>e\nfg 你h" and output.finish_reason == "stop"
    assert output.stop_reason == (EOS if ignore_eos else None)
    output = said(llm, stop_token_ids=[d], stop="c", ignore_eos=ignore_eos)
    assert (output.text, output.stop_reason) == ("ab", "c")


def test_stop_texts_in_the_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(llm, SCRIPT, monkeypatch)
    for stop, text in (
        ("cd", "abcd"),
        ("b<|end|>c", "abc"),
        ("fg 你", "abcd<tool>e\nfg 你"),
        ("x", "abcd<tool>e\nfg 你h"),
    ):
        assert said(llm, stop=stop, include_stop_str_in_output=True).text == text
    for stop, text in (("b<|end|>c", "ab<|end|>c"), ("x", SCRIPT)):
        output = said(llm, stop=stop, include_stop_str_in_output=True, skip_special_tokens=False)
        assert output.text == text


def test_held_text_against_a_search_in_the_whole() -> None:
    """In whatever pieces it comes: what is let go is never part of a stop text, and shows no special token."""
    rng = random.Random(0)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab#", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 2))]
        letters = rng.choices("ab#", k=12)  # '#' is a special token
        held, out, result = HeldText(), "", None
        for letter in letters:
            held = held.marked("#") if letter == "#" else held + letter
            if result := held.first_stop(stops):
                out += held.shown(result[0])
                break
            keep = held.possible_stop(stops)
            out, held = out + held.shown(keep), held.rest(keep)
        else:
            out += held.shown(len(held.text))
        ends = [
            (end, end - len(stop))
            for stop in stops
            for end in range(len(stop), 13)
            if "".join(letters[end - len(stop) : end]) == stop
        ]
        first = min(ends, default=None)
        start = 12 if first is None else min(begin for end, begin in ends if end == first[0])
        assert out == "".join(letters[:start]).replace("#", ""), (stops, letters)
        assert (result is None) == (first is None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": 5}, "stop_token_ids must be None or a list of at most 1048576 token numbers, not 5"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be None or a list"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids has 1.5, which is no token number"),
        ({"stop_token_ids": [-1]}, "stop_token_ids has -1, which is no token number"),
        ({"stop_token_ids": [True]}, "stop_token_ids has True"),
        ({"stop_token_ids": [260]}, "stop_token_ids has token 260, outside the model's vocabulary of 260"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be True or False, not 1"),
    ],
)
def test_malformed_stops(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate("a", **options)
