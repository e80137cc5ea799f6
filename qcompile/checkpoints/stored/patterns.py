"""Patterns of modules' names in the configurations of checkpoints, limited so that matching takes no long time."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import regex

from qcompile.errors import UnsupportedError, UsageError, shown

MOST_REPEATS, MOST_LETTERS, MOST_OF_A_PATTERN = 5, 128, 2000
"""The most repetitions in a pattern, and the most letters of a name that it is tried on, and of a pattern."""
SECONDS = 1.0
"""Processor time that slow matches of a configuration's patterns may take together."""
_SLOW = 1e-3
"""Seconds from which on a match counts as slow: others take microseconds."""


class NamePatterns:
    """The patterns of one configuration, which share a limit of time."""

    def __init__(self) -> None:
        self.left = SECONDS

    def read(self, place: str, text: str, around: str = "{}") -> NamePattern:
        """The regular expression `text`, which the configuration has in `place`; `around` is what is put around it.

        Raises UsageError if it is none, UnsupportedError if it is not read, as matching may take long.
        """
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"{place}: {shown(text)} is no pattern: {error}") from None
        repeats = len(re.findall(r"(?<!\\)[*+{]", text))
        if repeats > MOST_REPEATS or len(text) > MOST_OF_A_PATTERN or re.search(r"\)[*+{]", text):
            reason = f"over {MOST_REPEATS} repetitions or {MOST_OF_A_PATTERN:,} letters, or repeats a group"
            raise UnsupportedError(f"{place}: {shown(text)} has {reason}, which is not read")
        try:
            return NamePattern(place, text, regex.compile(around.format(text)), self)
        except (regex.error, RecursionError, OverflowError) as error:
            raise UsageError(f"{place}: {shown(text)} is no pattern: {error}") from None


@dataclass(frozen=True, eq=False)
class NamePattern:
    """A pattern, with the place in the configuration that it is from, and all that share its limit of time."""

    place: str
    text: str
    compiled: regex.Pattern[str]
    all: NamePatterns

    def matches(self, module: str) -> bool:
        """Whether the beginning of a module's name matches. Raises UnsupportedError if the name is too long, or if that
        takes long: alternatives may be tried in more ways than there are atoms."""
        if len(module) > MOST_LETTERS:
            raise UnsupportedError(f"module {module}: patterns are not read for names of over {MOST_LETTERS} letters")
        began = time.thread_time()
        try:
            return self.compiled.match(module, timeout=max(self.all.left, _SLOW)) is not None
        except TimeoutError:
            raise UnsupportedError(f"{self.place}: {shown(self.text)} takes too long to match {module}") from None
        finally:
            if (took := time.thread_time() - began) > _SLOW:
                self.all.left -= took
