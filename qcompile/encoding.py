"""Many texts to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qcompile.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 1 << 20
"""Characters encoded at once, about: a second of work."""


def encoded(tokenizer: Tokenizer, texts: Sequence[str], name: str) -> Iterator[list[int]]:
    """The tokens of each text, without those that the tokenizer puts around one.

    Texts are encoded in pieces: between them an interrupt is heeded, and nothing is done for what nobody asks for.
    Raises UsageError, calling them `name`, where the tokenizer gives up, having no token for the unknown.
    """
    first = size = 0
    for end, text in enumerate(texts, start=1):
        size += len(text)
        if size >= PIECE or end == len(texts):
            try:
                encodings = tokenizer.encode_batch_fast(list(texts[first:end]), add_special_tokens=False)
            except Exception as error:  # tokenizers raises plain Exception
                raise UsageError(f"{name} is outside the vocabulary: {error}") from error
            for encoding in encodings:
                yield encoding.ids
            first, size = end, 0
