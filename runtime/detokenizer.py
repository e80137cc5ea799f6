"""Decodes tokens to text incrementally."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
_CONTEXT = 6  # tokens of the prompt before the window: some decoders strip a space at the start of a text
_MOST_CONTEXT = 256  # the same where these are special tokens without text
_MAX_HELD = 32  # most characters of incomplete text that are held back


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text when it follows other tokens: some decoders strip the space at the start of a text."""
    once, twice = (str(tokenizer.decode([token] * count, skip_special_tokens=False)) for count in (1, 2))
    return twice[len(once) :] if twice.startswith(once) else once


class TokenLengths(dict[int, int]):
    """Characters of a token's text on its own, by token; 0 if it has none, or if its bytes may be part of a character.

    skip_special: whether special tokens have no text. Filled as tokens are asked for.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special

    def __missing__(self, token: int) -> int:
        text = self._tokenizer.decode([token], skip_special_tokens=self._skip_special)
        length = self[token] = 0 if BROKEN in text else len(text)
        return length


class Detokenizer:
    """Decodes tokens incrementally and returns only complete characters.

    Special tokens have no text with `skip_special`. lengths: those of the tokenizer's tokens, which texts share. The
    whole text equals the tokenizer's own decoding of all tokens after the prompt, and does not depend on how the tokens
    are divided among calls.

    `tokenizers.decoders.DecodeStream` gives other results (tests/runtime/test_text.py shows each): it never returns an
    incomplete character at the end of a text, holds any number of invalid bytes back, raises an exception on some
    invalid bytes of a tokenizer with byte fallback, and cannot be copied, which the search for stop texts needs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        skip_special: bool = True,
        lengths: TokenLengths | None = None,
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._lengths = TokenLengths(tokenizer, skip_special) if lengths is None else lengths
        # With single-byte tokens, one invalid byte makes the whole run of bytes around it invalid, including what was
        # returned already. The length of the run in the window must not depend on how tokens are divided among calls.
        self._one_by_one = tokenizer.token_to_id("<0x0A>") is not None
        self._ids = list(prompt[-_CONTEXT:])  # the window of tokens that is decoded
        if not self._decode():
            self._ids = list(prompt[-_MOST_CONTEXT:])
        self._complete = len(self._ids)  # tokens of the window up to the last complete character
        self._returned = len(self._decode().rstrip(BROKEN))  # characters of the window's text already returned

    def clone(self) -> Detokenizer:
        """An independent copy of the state."""
        twin = copy.copy(self)
        twin._ids = self._ids.copy()
        return twin

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """The complete characters that these tokens add; with `last`, also what was held back."""
        if self._one_by_one and len(tokens) > 1:
            return "".join([self._push([token], False) for token in tokens]) + self._push([], last)
        return self._push(tokens, last)

    def _push(self, tokens: Sequence[int], last: bool) -> str:
        self._ids += tokens
        text = self._decode()
        held = len(text) - len(text.rstrip(BROKEN)) if not last and text.endswith(BROKEN) else 0
        over = held > _MAX_HELD  # no character is that long: the bytes are invalid, but the last may begin a character
        if over:
            held = 0 if self._one_by_one else 1
        returned = len(text) - held
        new = text[self._returned : returned]
        if (over or not held) and len(self._ids) > self._complete:
            self._shrink(returned, held)
        else:
            self._returned = max(self._returned, returned)
        return new

    def _shrink(self, returned: int, held: int) -> None:
        """After all text but `held` characters was returned: shrink the window to its newest tokens, as context, if
        these have text. The last one is enough, if it is whole characters."""
        if not held and (length := self._lengths[self._ids[-1]]):
            self._ids, self._returned, self._complete = self._ids[-1:], length, 1
            return
        before, self._ids = self._ids, self._ids[self._complete :]
        self._returned = len(self._decode()) - held
        if self._returned <= 0 and len(before) < _MOST_CONTEXT:
            self._ids, self._returned = before, returned
        self._complete = len(self._ids) - min(3 * held, len(self._ids))  # what is held back has at most 3 bytes

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special)
