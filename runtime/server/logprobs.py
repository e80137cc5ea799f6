"""Log probabilities of tokens in OpenAI's format: spellings, bytes and offsets of the tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qcompile.runtime.detokenizer import BROKEN
from qcompile.runtime.outputs import CompletionOutput, RequestOutput
from qcompile.runtime.sampling.logprobs import Logprob

TokenBytes = Callable[[int], bytes | None]
"""Gives the bytes of a token; None where they are unknown."""
Columns = dict[str, list[Any]]


def no_bytes(token: int) -> None:
    """The `TokenBytes` of a model without a tokenizer."""


def prompt_entries(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """The log probabilities of a prompt by token number, in vLLM's format."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if each is None else {str(token): one._asdict() for token, one in each.items()}
        for each in output.prompt_logprobs
    ]


class TextOffsets:
    """Counts the characters of a text token by token. start: the offset of the first token."""

    def __init__(self, start: int = 0) -> None:
        self._next = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token: bytes) -> int:
        """The offset of the next token: that of the character that its first byte belongs to."""
        offset = self._next
        self._next += len(self._decoder.decode(token))
        return offset

    def end(self) -> int:
        """The length of the text if no token follows: an incomplete character counts."""
        return self._next + len(self._decoder.decode(b"", final=True))


class TokenSpeller:
    """Spells tokens. Parts of characters, which have no text of their own, are spelled by their bytes."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def bytes_of(self, token: int, text: str) -> bytes | None:
        """The bytes of a token with this text; None if it is a part of a character and they are unknown."""
        return self._token_bytes(token) if BROKEN in text else text.encode()

    def spelled(self, token: int, text: str, mark: str) -> str:
        """The text of a token, or its bytes as `\\xe4\\xbd` after a mark."""
        raw = self.bytes_of(token, text)
        if BROKEN not in text or raw is None or BROKEN.encode() in raw:
            return text
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)

    def completion(
        self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], offsets: TextOffsets
    ) -> Columns:
        """Tokens with their log probabilities and alternatives, as /v1/completions tells them."""
        chosen = list(zip(tokens, logprobs, strict=True))
        counted = [self.counted(token, each[token].decoded_token or "") for token, each in chosen]
        return {
            "tokens": [self._named(token, each[token]) for token, each in chosen],
            "token_logprobs": [each[token].logprob for token, each in chosen],
            "top_logprobs": [self._by_spelling(each) for _, each in chosen],
            "text_offset": [offsets.of(each) for each in counted],
        }

    def prompt(self, text: str, first: str, output: RequestOutput) -> Columns:
        """The log probabilities of an echoed prompt. Its first token has the text `first` and no log probability.

        The last token ends where the text does: special tokens may precede the text.
        """
        assert output.prompt_logprobs is not None
        begin, *rest = output.prompt_token_ids
        scored = [each for each in output.prompt_logprobs if each is not None]
        columns = self.completion(rest, scored, TextOffsets())
        texts = [first, *(each[token].decoded_token or "" for token, each in zip(rest, scored, strict=True))]
        spelled = [self.counted(token, own) for token, own in zip(output.prompt_token_ids, texts, strict=True)]
        counted = TextOffsets()
        offsets = [counted.of(each) for each in spelled]
        start = len(text) - counted.end()
        for name, nothing in (("tokens", self.spelled(begin, first, "bytes:")), ("token_logprobs", None)):
            columns[name].insert(0, nothing)
        columns["top_logprobs"].insert(0, None)
        return columns | {"text_offset": [max(start + offset, 0) for offset in offsets]}

    def chat(self, sample: CompletionOutput, first: int, top: int) -> dict[str, Any] | None:
        """A chat choice's log probabilities from token `first` on, with the `top` most probable tokens at each."""
        if sample.logprobs is None:
            return None
        content = []
        for token, each in zip(sample.token_ids[first:], sample.logprobs[first:], strict=True):
            content.append(self.chat_token(token, each, top))
        return {"content": content}

    def chat_token(self, token: int, each: Mapping[int, Logprob], top: int) -> dict[str, Any]:
        """A token with its log probability, and the `top` most probable tokens at its place."""
        likeliest = sorted(each, key=lambda other: each[other].rank)[:top]
        alternatives = [self._chat_token(other, each[other]) for other in likeliest]
        return self._chat_token(token, each[token]) | {"top_logprobs": alternatives}

    def _chat_token(self, token: int, one: Logprob) -> dict[str, Any]:
        text = one.decoded_token or ""
        raw = self.bytes_of(token, text)
        return {
            "token": self.spelled(token, text, ""),
            "logprob": one.logprob,
            "bytes": None if raw is None else list(raw),
        }

    def _named(self, token: int, one: Logprob) -> str:
        return self.spelled(token, one.decoded_token or "", "bytes:")

    def _by_spelling(self, logprobs: Mapping[int, Logprob]) -> dict[str, float]:
        """Log probabilities by spelling. Of tokens with equal spellings the first counts: the chosen token, else the
        most probable one."""
        spelled: dict[str, float] = {}
        for token, one in logprobs.items():
            spelled.setdefault(self._named(token, one), one.logprob)
        return spelled

    def counted(self, token: int, text: str) -> bytes:
        """The bytes that a token with this text adds to an output, as `TextOffsets` counts them."""
        raw = self.bytes_of(token, text)
        return text.encode() if raw is None else raw
