"""Structured outputs behind reasoning: any text up to its end, which is text or a special token, then the language."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qcompile.errors import UsageError
from qcompile.runtime.sampling.grammars import Grammars
from qcompile.runtime.sampling.masks import GrammarState, mask_words
from qcompile.runtime.sampling.structured import Reasoning, StructuredOutputsParams, structured
from tests.support.fake import byte_tokenizer

EOS = 0
LANGUAGES = [
    (StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}}), '{"a": 5}'),
    (StructuredOutputsParams(json_object=True), "{}"),
    (StructuredOutputsParams(regex="[ab]{2}"), "ab"),
    (StructuredOutputsParams(choice=["x", "yy"]), "yy"),
    (StructuredOutputsParams(grammar='start: "q" start | "z"'), "qqz"),
]


def allowed(state: GrammarState, token: int, vocab: int, ahead: list[int] | None = None) -> bool:
    mask = np.zeros(mask_words(vocab), np.uint32)
    state.fill(ahead or [], mask.ctypes.data, len(mask))
    return bool(mask[token // 32] >> token % 32 & 1)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_the_language_begins_where_reasoning_ends(special: bool, begun: bool) -> None:
    tokenizer = byte_tokenizer()
    if special:
        tokenizer.add_special_tokens(["<think>", "</think>"])
    vocab = tokenizer.get_vocab_size()
    grammars = Grammars(tokenizer, vocab, [EOS])
    for language, output in LANGUAGES:
        grammar = grammars.compile(replace(language, reasoning=Reasoning("<think>", "</think>", begun)))
        thought = tokenizer.encode(("" if begun else "<think>") + 'hm {"a" so\n</think>\n\n').ids
        said = tokenizer.encode(output).ids
        state = grammar.start()
        for place, token in enumerate(thought):
            assert allowed(state, token, vocab), (language, place)
            assert not allowed(state, EOS, vocab)
            state.note(token)
        assert not allowed(state, tokenizer.encode("!").ids[0], vocab)
        assert allowed(state, said[-1], vocab, said[:-1]) and allowed(state, EOS, vocab, said)


def test_without_reasoning_the_language_may_begin_at_once() -> None:
    grammars = Grammars(byte_tokenizer(), 257, [EOS])
    encode = byte_tokenizer().encode
    for begun in (True, False):
        asked = StructuredOutputsParams(regex="ab", reasoning=Reasoning("<think>", "</think>", begun))
        state = grammars.compile(asked).start()
        assert allowed(state, encode("a").ids[0], 257) and allowed(state, encode("!").ids[0], 257) == begun


CHANNELS = Reasoning(
    "<|channel|>analysis<|message|>", "<|end|>", False, "<|start|>assistant", ("<|channel|>final<|message|>",)
)
CALLS = StructuredOutputsParams(
    calls=[("<|channel|>to=f<|message|>", {"const": 1}), ("<|channel|>to=g<|message|>", {})]
)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("thoughts", [0, 1, 2])
def test_the_language_begins_in_the_message_behind_those_with_reasoning(special: bool, thoughts: int) -> None:
    """Of which there may be none or several."""
    tokenizer = byte_tokenizer()
    if special:
        tokenizer.add_special_tokens(["<|channel|>", "<|message|>", "<|end|>", "<|start|>"])
    vocab = tokenizer.get_vocab_size()
    grammars = Grammars(tokenizer, vocab, [EOS])
    before = '<|channel|>analysis<|message|>{"a" so\n<|end|><|start|>assistant' * thoughts
    cases = [(replace(asked, reasoning=CHANNELS), CHANNELS.heads[0], said) for asked, said in LANGUAGES]
    bare = CHANNELS._replace(heads=())
    for asked, head, said in [*cases, (replace(CALLS, reasoning=bare), "<|channel|>to=f<|message|>", "1")]:
        state = grammars.compile(asked).start()
        for place, token in enumerate(tokenizer.encode(before + head).ids):
            assert allowed(state, token, vocab), (asked, place)
            assert not allowed(state, EOS, vocab)
            state.note(token)
        output = tokenizer.encode(said).ids
        assert not allowed(state, tokenizer.encode("!").ids[0], vocab)
        assert allowed(state, output[-1], vocab, output[:-1]) and allowed(state, EOS, vocab, output)


def test_requests_do_not_set_it() -> None:
    for name, value in (("reasoning", ["a", "b", True]), ("calls", [["a", {}]])):
        with pytest.raises(UsageError, match=f"structured_outputs has no field '{name}'"):
            structured({"regex": "a", name: value})
