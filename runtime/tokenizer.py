"""Text to tokens and back, the latter as tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qcompile.errors import ArtifactError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BROKEN = "\ufffd"  # what a decoder puts for bytes that are not (yet) a character
_CONTEXT = 6  # tokens of the prompt that a decoder must see: some strip a space at the start of a text
_MAX_HELD = 32


def load_tokenizer(root: Path) -> Tokenizer | None:
    """The artifact's tokenizer, or None if it has none."""
    path = root / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer  # costs 20 ms that token-only use does not need

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ArtifactError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Detokenizer:
    """Turns a growing list of tokens into a growing text, never giving out half a character.

    Special tokens give no text. The text of all tokens together is the tokenizer's own decoding of them
    after the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])  # the window that is decoded
        self._whole = len(self._ids)  # tokens of it after which a character ended
        self._given = len(self._decode().rstrip(_BROKEN))  # characters of its text given out

    def clone(self) -> Detokenizer:
        """An independent copy of the state."""
        twin = object.__new__(Detokenizer)
        twin._tokenizer, twin._ids = self._tokenizer, self._ids.copy()
        twin._whole, twin._given = self._whole, self._given
        return twin

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens make certain; with `last`, all that was held back too."""
        self._ids += tokens
        text = self._decode()
        certain = text.rstrip(_BROKEN)
        if last or len(text) - len(certain) > _MAX_HELD:  # no character is that long: these are broken
            certain = text
        new = certain[self._given :]
        if len(certain) == len(text) and len(self._ids) > self._whole:
            # All spoken for: the window shrinks to these tokens, the next ones' context.
            del self._ids[: self._whole]
            self._whole = len(self._ids)
            self._given = len(self._decode())
        else:
            self._given = max(self._given, len(certain))
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)
