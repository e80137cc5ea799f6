"""The bytes of single tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from qcompile.runtime.token_bytes import token_bytes
from tests.runtime.test_text import byte_fallback, leading_space
from tests.support.fake import byte_tokenizer

TEXT = "x = 你好 🙂\n\x00\x7f\xad é"


def test_bytes_of_a_byte_level_tokenizer_join_to_the_text() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(TEXT).ids
    result = [token_bytes(tokenizer, token) for token in tokens]
    assert b"".join(each for each in result if each is not None) == TEXT.encode() and len(result) == len(TEXT.encode())
    every = sorted(token_bytes(tokenizer, token) or b"" for token in range(1, 257))
    assert every == [bytes([byte]) for byte in range(256)]
    assert token_bytes(tokenizer, 0) == b"<eos>"


def test_bytes_that_fall_back() -> None:
    tokenizer = byte_fallback()
    assert token_bytes(tokenizer, tokenizer.token_to_id("<0xF0>")) == b"\xf0"
    assert token_bytes(tokenizer, tokenizer.token_to_id("<0x0A>")) == b"\n"


def test_a_token_of_whole_characters_has_the_bytes_of_its_text() -> None:
    tokenizer = leading_space()
    texts = {tokenizer.id_to_token(token): token_bytes(tokenizer, token) for token in range(tokenizer.get_vocab_size())}
    assert texts["▁a"] == b" a" and texts["<s>"] == b"<s>"


@pytest.mark.parametrize("name", ["\ufffd", "<0xG0>", "你\ufffd"])
def test_bytes_that_a_name_does_not_tell_are_unknown_or_those_of_the_text(name: str) -> None:
    """The text of these tokens has the character that stands for what is none."""
    tokenizer = Tokenizer(models.BPE(vocab={name: 0, "a": 1}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    assert token_bytes(tokenizer, 0) == (None if "\ufffd" in name else name.encode())


def test_bytes_that_are_decoded_to_something_else_are_unknown() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"ä½": 0, "a": 1}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\ufffd", "\ufffd\ufffd")])
    assert token_bytes(tokenizer, 0) is None
    tokenizer.decoder = decoders.ByteLevel()
    assert token_bytes(tokenizer, 0) == b"\xe4\xbd"
