"""Encode many texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qcompile.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 1 << 20
"""Approximate number of characters encoded at once: a second of work."""


def encoded(tokenizer: Tokenizer, texts: Sequence[str], name: str) -> Iterator[list[int]]:
    """The tokens of each text, without the special tokens that the tokenizer adds around one.

    Texts are encoded in batches on demand, so that interrupts take effect between them. Raises UsageError, calling the
    texts `name`, if the tokenizer fails because it has no unknown token.
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
