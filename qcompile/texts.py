"""Texts as users give them: files of plain text or JSON lines, read with clear errors and encoded in batches."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 1 << 20
"""Approximate number of characters encoded at once: a second of work."""


def check(path: Path) -> None:
    """Raise UsageError unless there is a file at `path`, possibly a pipe; reads nothing from it."""
    try:
        folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"{path}: {why}") from error
    if folder:
        raise UsageError(f"{path} is a directory: give a file")


def read(path: str | Path) -> str:
    """The file's text, without a UTF-8 byte order mark. Raises OSError, UnicodeDecodeError."""
    return Path(path).read_bytes().decode("utf-8-sig")


def lines(text: str) -> list[tuple[int, str]]:
    """The non-blank lines with their numbers from 1. Only a newline ends a line: JSON may contain other separators."""
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def parsed(line: str) -> Any:
    """The value of `line`; None if it is not JSON, or nested too deeply."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def text_of(value: Any, *names: str) -> str | None:
    """The first of these entries of an object that is not empty, else the last; None if it is not text.

    An unpaired surrogate, which JSON can express, does not count as text.
    """
    if not isinstance(value, dict):
        return None
    chosen = next((value[name] for name in names if value.get(name)), value.get(names[-1]))
    try:
        return chosen if isinstance(chosen, str) and chosen.encode() is not None else None
    except UnicodeEncodeError:
        return None


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
