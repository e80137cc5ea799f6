"""What parsers of tool calls share: content around calls, and malformed calls as text.

A call is certain as soon as its name is. Before that, text that leaves the format comes out as content, as it stands.
After that, the arguments are handed out as they come; where they leave the format, they end, and content goes on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from qcompile.runtime.parsers.events import ArgumentsPiece, CallStart, TextPiece
from qcompile.runtime.parsers.incremental import WHITESPACE, Incremental, MalformedError, Steps
from qcompile.runtime.parsers.tools import DeclaredTools

MOST_NAME = 256
"""Most characters of the name of a tool or a parameter."""
_NO_NAME = " <>{}[]()\"',"


def is_name(name: str) -> bool:
    """Whether a text can be the name of a tool: not empty, and without whitespace and the like."""
    return 0 < len(name) <= MOST_NAME and name.isprintable() and not any(char in _NO_NAME for char in name)


class CallParser(Incremental):
    """Reads content, and a call after each of `markers`. Whitespace between content and calls is dropped."""

    markers: Sequence[str]

    def __init__(self, tools: DeclaredTools) -> None:
        super().__init__()
        self.tools = tools
        self._space = ""  # whitespace after content, which is dropped before a call
        self._after_call = False
        self._sent: int | None = None  # up to where the text that is arguments as it stands was handed out

    @abstractmethod
    def call(self, marker: str) -> Steps[None]:
        """Read what follows a marker. Raises MalformedError, with `mark` set to what is not part of a call."""

    def start(self) -> Steps[None]:
        """Read calls at the start of the reply that need no marker. Raises MalformedError."""
        yield from ()

    def in_turn(self, one: Callable[[], Steps[None]], begin: str, end: str) -> Steps[None]:
        """Read a call by `one`, and those that follow after `begin` each. `end`, behind a call, may be missing.

        Raises MalformedError.
        """
        more = True
        while more:
            yield from one()
            yield from self.skip_space()
            yield from self.skip(end)
            yield from self.skip_space()
            if more := (yield from self.looks_at(begin)):
                self.mark = self.at
                yield from self.skip(begin)

    def parse(self) -> Steps[None]:
        self.mark = 0
        yield from self._attempt(self.start())
        while True:
            piece, marker = yield from self.find(self.markers)
            self._write(piece)
            if marker:
                self.mark = self.at - len(marker)
                yield from self._attempt(self.call(marker))
            elif not piece:
                break
        if not self._after_call:
            self.events.append(TextPiece(self._space))

    def _attempt(self, steps: Steps[None]) -> Steps[None]:
        try:
            yield from steps
        except MalformedError:
            self.pass_on_end()
        if self.mark is not None:
            self._write(self.text[self.mark : self.at])
            self.mark = None

    def pause(self) -> None:
        if self._sent is not None:
            self.say(self.text[self._sent : self.at])
            self._sent = 0  # the next push drops what was handed out

    def begin_call(self, name: str) -> None:
        """A call is certain. Raises MalformedError for what cannot be a name."""
        if not is_name(name):
            raise MalformedError
        self.events.append(CallStart(name))
        self._space, self._after_call, self.mark = "", True, None

    def say(self, text: str) -> None:
        """Hand out a piece of the arguments."""
        if text:
            self.events.append(ArgumentsPiece(text))

    def pass_on(self) -> None:
        """From here on, the text that is taken is arguments."""
        self._sent = self.at

    def pass_on_end(self) -> None:
        """The arguments that are text as it stands end here."""
        self.pause()
        self._sent = None

    def _write(self, text: str) -> None:
        """Hand out content, but whitespace only if content follows it."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip(WHITESPACE)
        body = text.rstrip(WHITESPACE)
        self._space = text[len(body) :]
        if body:
            self.events.append(TextPiece(body))
            self._after_call = False
