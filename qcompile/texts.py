"""Texts as users give them: files of plain text or JSON lines, read with clear errors and encoded in batches."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.errors import RustFailure, UsageError, told_in_rust

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SAVED_DATASET = ("dataset_info.json", "dataset_dict.json")
"""Files by which a folder of Dataset.save_to_disk is known, of one part or several."""
PIECE = 1 << 20
"""Approximate number of characters encoded at once: a second of work."""


def check(path: Path, tables: bool = False) -> None:
    """Raise UsageError unless there is a file at `path`, possibly a pipe; reads nothing from it.

    With `tables`, a folder of Dataset.save_to_disk will do (text_tables).
    """
    try:
        folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"{path}: {why}") from error
    if folder and any((path / name).is_file() for name in _SAVED_DATASET):
        if tables:
            return
        raise UsageError(f'{path} is a saved dataset: give JSON lines with a "text", as Dataset.to_json writes them')
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


def documents(text: str, name: str) -> list[str] | None:
    """The texts of JSON lines, or of one JSON array, of objects with a "text"; None if `text` is not JSON.

    It is JSON if its first line is a JSON object, or all of it is one object or array, or the file `name` says so by
    its ending. Items of an array may be texts. Raises UsageError naming the line or item that has no text.
    """
    numbered = lines(text)
    if not numbered:
        return None
    if isinstance(parsed(numbered[0][1]), dict):
        return [_text(parsed(line), f"{name} line {number}") for number, line in numbered]
    whole = parsed(text) if text.lstrip()[0] in "[{" else None
    if isinstance(whole, list) and whole:
        items = ({"text": item} if isinstance(item, str) else item for item in whole)
        return [_text(item, f"{name} item {number}") for number, item in enumerate(items, start=1)]
    if isinstance(whole, dict):
        return [_text(whole, name)]
    if whole == [] or name.lower().endswith((".json", ".jsonl", ".ndjson")):
        raise UsageError(f'{name} line {numbered[0][0]}: not a JSON object with a "text" in Unicode')
    return None


def _text(value: Any, place: str) -> str:
    text = text_of(value, "text")
    if text is None:
        raise UsageError(f'{place}: not a JSON object with a "text" in Unicode')
    return text


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


def started(ids: list[int], begin: int) -> list[int]:
    """The tokens of a text after the token `begin`, which the text itself may have written out."""
    return ids if ids[:1] == [begin] else [begin, *ids]


def encoded(tokenizer: Tokenizer, texts: Sequence[str], name: str) -> Iterator[list[int]]:
    """The tokens of each text, without the special tokens that the tokenizer adds around one.

    Texts are encoded in batches on demand, so that interrupts take effect between them. Raises UsageError, calling the
    texts `name`, if the tokenizer fails, as it does if it has no unknown token.
    """
    first = size = 0
    for end, text in enumerate(texts, start=1):
        size += len(text)
        if size >= PIECE or end == len(texts):
            try:
                with told_in_rust():
                    encodings = tokenizer.encode_batch_fast(list(texts[first:end]), add_special_tokens=False)
            except RustFailure as error:
                raise UsageError(f"the tokenizer fails with {name}: {error}") from None
            except Exception as error:  # tokenizers raises plain Exception
                raise UsageError(f"{name} is outside the vocabulary: {error}") from error
            for encoding in encodings:
                yield encoding.ids
            first, size = end, 0
