"""A parser of a text that arrives in pieces: it is written as for a whole text, and pauses where it needs the next one.

The events of a text do not depend on where it was cut: a parser reads character by character, or looks for texts, and
waits whenever what follows could change what it does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeVar

from qcompile.runtime.parsers.events import Event

Found = TypeVar("Found")
Steps = Generator[None, None, Found]
"""A part of a parser. It yields where it needs more text, and returns what it has found."""

WHITESPACE = " \t\r\n"


class MalformedError(Exception):
    """The text is not in the format. `Incremental.at` is the first character that does not belong."""


class Incremental(ABC):
    """Reads a text that is pushed in pieces. `at` is the next character of `text`, which holds what is still needed."""

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.mark: int | None = None
        """Where text begins that is kept, because it may have to be given out as it stands; None if there is none."""
        self.ended = False
        self.events: list[Event] = []
        self._steps = self.parse()

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Read the whole text, adding to `events`."""

    def pause(self) -> None:
        """Called before the events so far are handed out."""
        return

    def push(self, text: str) -> list[Event]:
        """Read a further piece. Returns the events that are certain now."""
        done = self.at if self.mark is None else self.mark
        self.text = self.text[done:] + text
        self.at -= done
        if self.mark is not None:
            self.mark -= done
        next(self._steps, None)
        self.pause()
        events, self.events = self.events, []
        return events

    def end(self) -> list[Event]:
        """The events that were held back until the end of the text."""
        self.ended = True
        return self.push("")

    def peek(self) -> Steps[str]:
        """The next character, not taken; empty at the end of the text."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def looks_at(self, literal: str) -> Steps[bool]:
        """Whether the text goes on with `literal`, which is not taken."""
        while True:
            have = self.text[self.at : self.at + len(literal)]
            if not literal.startswith(have) or (self.ended and len(have) < len(literal)):
                return False
            if len(have) == len(literal):
                return True
            yield

    def skip(self, *literals: str) -> Steps[bool]:
        """Take the first of these texts that comes next, if any does."""
        for literal in literals:
            if (yield from self.looks_at(literal)):
                self.at += len(literal)
                return True
        return False

    def expect(self, literal: str) -> Steps[None]:
        """Take `literal`. Raises MalformedError where the text differs."""
        for char in literal:
            if (yield from self.peek()) != char:
                raise MalformedError
            self.at += 1

    def skip_space(self) -> Steps[None]:
        """Take whitespace."""
        while (char := (yield from self.peek())) and char in WHITESPACE:
            self.at += 1

    def taken(self, steps: Steps[None]) -> Steps[str]:
        """The text that these steps take. If they raise MalformedError, `mark` is set to its start or before."""
        outer = self.mark
        if self.mark is None:
            self.mark = self.at
        offset = self.at - self.mark
        yield from steps
        text = self.text[self.mark + offset : self.at]
        if outer is None:
            self.mark = None
        return text

    def take_until(self, ends: Sequence[str], most: int, barred: str = "") -> Steps[tuple[str, str]]:
        """Take the text before the first of `ends`, and that end. Returns both.

        Raises MalformedError if the text ends before, at more than `most` characters, and at a character of `barred`.
        """
        taken = ""
        while True:
            for end in ends:
                if (yield from self.looks_at(end)):
                    self.at += len(end)
                    return taken, end
            char = yield from self.peek()
            if not char or len(taken) == most or char in barred:
                raise MalformedError
            taken += char
            self.at += 1

    def find(self, texts: Sequence[str]) -> Steps[tuple[str, str]]:
        """Take text before the first of `texts`, and that text. Returns both, in pieces as they come.

        The second is empty while more may follow, and both are empty at the end. One of `texts` may be the end of
        another, but not its beginning or middle.
        """
        while True:
            start = self.at
            places = [(place, text) for text in texts if (place := self.text.find(text, start)) >= 0]
            if places:
                place, text = min(places)
                self.at = place + len(text)
                return self.text[start:place], text
            end = len(self.text) - (0 if self.ended else possible_start(self.text[start:], texts))
            if end > start:
                self.at = end
                return self.text[start:end], ""
            if self.ended:
                return "", ""
            yield


def possible_start(text: str, texts: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that one of `texts` begins with."""
    for size in range(min(len(text), max(map(len, texts)) - 1), 0, -1):
        if any(each.startswith(text[-size:]) for each in texts):
            return size
    return 0
