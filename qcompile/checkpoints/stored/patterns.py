"""Patterns of modules' names in the configurations of checkpoints, limited so that matching takes no long time."""

from __future__ import annotations

import re

from qcompile.errors import UnsupportedError, UsageError, shown

MOST_REPEATS, MOST_LETTERS = 5, 128
"""The most repetitions in a pattern, and the longest name that it is tried on."""


def pattern_of(place: str, text: str) -> re.Pattern[str]:
    """The regular expression `text`, which the configuration has in `place`.

    Raises UsageError if it is none, UnsupportedError if matching may take long.
    """
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{place}: {shown(text)} is no pattern: {error}") from None
    repeats = len(re.findall(r"(?<!\\)[*+{]", text))
    if repeats > MOST_REPEATS or re.search(r"\)[*+{]", text):
        reason = f"over {MOST_REPEATS} repetitions, or repeats a group"
        raise UnsupportedError(f"{place}: {shown(text)} has {reason}, which is not read")
    return pattern


def matches(pattern: re.Pattern[str], module: str) -> bool:
    """Whether the beginning of a module's name matches. Raises UnsupportedError for a name that is too long."""
    if len(module) > MOST_LETTERS:
        raise UnsupportedError(f"module {module}: patterns are not read for names of over {MOST_LETTERS} letters")
    return pattern.match(module) is not None
