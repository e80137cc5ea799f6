"""Text to tokens and back, the latter as tokens come."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.artifact import listed_file
from qcompile.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"  # what a decoder puts for bytes that are not (yet) a character
_CONTEXT = 6  # tokens of the prompt that a decoder must see: some strip a space at the start of a text
_MOST_CONTEXT = 256  # where those have no text, being special
_MAX_HELD = 32


def load_tokenizer(root: Path, files: dict[str, Any], name: str = "tokenizer.json") -> Tokenizer | None:
    """The tokenizer `name` of an artifact whose manifest has `files`, verified; None if it has none."""
    content = listed_file(root, files, name)
    if content is None:
        return None
    from tokenizers import Tokenizer  # costs 20 ms that token-only use does not need

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise ArtifactError(f"{root / name} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, special: bool = True) -> list[int]:
    """A prompt's token numbers, `special` with those that the tokenizer puts around it. Raises UsageError.

    Other threads run meanwhile, as they would not by `Tokenizer.encode`: a long text takes seconds.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid Unicode at character {error.start}: give UTF-8") from error
    try:
        found: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    except Exception as error:  # tokenizers raises plain Exception, where there is no token for the unknown
        raise UsageError(f"the prompt is outside the tokenizer's vocabulary: {error}") from error
    return found


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text as it is behind other tokens: some decoders strip the space at the start of a text."""
    once, twice = (str(tokenizer.decode([token] * count, skip_special_tokens=False)) for count in (1, 2))
    return twice[len(once) :] if twice.startswith(once) else once


class Detokenizer:
    """Turns a growing list of tokens into a growing text, never giving out half a character.

    Special tokens give no text. The text of all tokens together is the tokenizer's own decoding of them
    after the prompt, and the same in whatever pieces they come.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # A tokenizer with tokens of single bytes spoils the whole run of bytes of which one is wrong, what was given
        # out of it too: how long the run in the window is must not depend on the pieces.
        self._one_by_one = tokenizer.token_to_id("<0x0A>") is not None
        self._ids = list(prompt[-_CONTEXT:])  # the window that is decoded
        if not self._decode():
            self._ids = list(prompt[-_MOST_CONTEXT:])
        self._whole = len(self._ids)  # tokens of it after which a character ended
        self._given = len(self._decode().rstrip(BROKEN))  # characters of its text given out

    def clone(self) -> Detokenizer:
        """An independent copy of the state."""
        twin = copy.copy(self)
        twin._ids = self._ids.copy()
        return twin

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens make certain; with `last`, all that was held back too."""
        if self._one_by_one and len(tokens) > 1:
            return "".join([self._push([token], False) for token in tokens]) + self._push([], last)
        return self._push(tokens, last)

    def _push(self, tokens: Sequence[int], last: bool) -> str:
        self._ids += tokens
        text = self._decode()
        held = 0 if last else len(text) - len(text.rstrip(BROKEN))
        over = held > _MAX_HELD  # no character is that long: these are broken, but the last may be half of one
        if over:
            held = 0 if self._one_by_one else 1
        given = len(text) - held
        new = text[self._given : given]
        if (over or not held) and len(self._ids) > self._whole:
            self._shrink(given, held)
        else:
            self._given = max(self._given, given)
        return new

    def _shrink(self, given: int, held: int) -> None:
        """All but `held` is given out: the window shrinks to the newest tokens, as context of the next, if they have
        any text."""
        before, self._ids = self._ids, self._ids[self._whole :]
        self._given = len(self._decode()) - held
        if self._given <= 0 and len(before) < _MOST_CONTEXT:
            self._ids, self._given = before, given
        self._whole = len(self._ids) - min(3 * held, len(self._ids))  # what is held back has at most 3 bytes

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)
