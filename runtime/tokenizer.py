"""Loads an artifact's tokenizer, and encodes text as tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.artifact.hashes import listed_file
from qcompile.errors import ArtifactError, RustFailure, UsageError, told_in_rust

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(root: Path, files: dict[str, Any], name: str = "tokenizer.json") -> Tokenizer | None:
    """Load and verify the tokenizer `name` of the artifact at `root`; None if it has none.

    files: those of the artifact's manifest. Raises ArtifactError.
    """
    content = listed_file(root, files, name)
    if content is None:
        return None
    from tokenizers import Tokenizer  # costs 20 ms that token-only use does not need

    try:
        with told_in_rust():
            tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise ArtifactError(f"{root / name} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, special: bool = True) -> list[int]:
    """A prompt's token numbers, with `special` including the tokens that the tokenizer adds. Raises UsageError.

    Other threads run during the encoding of a long text, which takes seconds; `Tokenizer.encode` would block them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid Unicode at character {error.start}: give UTF-8") from error
    try:
        with told_in_rust():
            ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    except RustFailure as error:
        raise UsageError(f"the tokenizer fails with this prompt: {error}") from None
    except Exception as error:  # tokenizers raises plain Exception for unknown text without an unknown token
        raise UsageError(f"the prompt is outside the tokenizer's vocabulary: {error}") from error
    return ids
