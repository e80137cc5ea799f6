"""Lines of JSON, as people give texts and prompts."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from qcompile.errors import UsageError


def check(path: Path) -> None:
    """Raise UsageError unless there is a file at `path`, which may be a pipe; nothing is read of it."""
    try:
        folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"{path}: {why}") from error
    if folder:
        raise UsageError(f"{path} is a directory: give a file")


def read(path: str | Path) -> str:
    """The file's text, without the mark that some programs put before UTF-8. Raises OSError, UnicodeDecodeError."""
    return Path(path).read_bytes().decode("utf-8-sig")


def lines(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1. Only a newline ends one: JSON may hold all else."""
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def parsed(line: str) -> Any:
    """The value that `line` is; None where it is no JSON, or nested beyond what can be read."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def text_of(value: Any, *names: str) -> str | None:
    """The first of these entries of an object that holds something, else the last; None where that is no text.

    Half of a surrogate pair, which JSON can spell, is none.
    """
    if not isinstance(value, dict):
        return None
    found = next((value[name] for name in names if value.get(name)), value.get(names[-1]))
    try:
        return found if isinstance(found, str) and found.encode() is not None else None
    except UnicodeEncodeError:
        return None
