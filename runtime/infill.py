"""Prompts that ask for the text between a prefix and a suffix, by tokens that models of code were trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qcompile.errors import UsageError
from qcompile.runtime.tokenizer import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Tokens before the prefix, before the suffix, and before what is between them. A tokenizer has one such triple."""


def infill_tokens(tokenizer: Tokenizer | None, prefixes: Sequence[object], suffix: str) -> list[list[int]]:
    """The tokens of prompts that have the model write what is between each prefix and the suffix. Raises UsageError."""
    marks = _marks(tokenizer)
    if tokenizer is None or marks is None:
        raise UsageError("suffix is not supported by this model: its tokenizer has no tokens for a text's middle")
    before, between, after = marks
    tokens = []
    for prefix in prefixes:
        if not isinstance(prefix, str):
            raise UsageError("suffix is for prompts of text")
        texts = [encode(tokenizer, text, special=False) for text in (prefix, suffix)]
        tokens.append([*encode(tokenizer, ""), before, *texts[0], between, *texts[1], after])
    return tokens


def _marks(tokenizer: Tokenizer | None) -> list[int] | None:
    """The first triple of marks that a tokenizer has."""
    for names in _MARKS if tokenizer else ():
        tokens = [tokenizer.token_to_id(name) for name in names]  # type: ignore[union-attr]
        if all(token is not None for token in tokens):
            return [int(token) for token in tokens if token is not None]
    return None
