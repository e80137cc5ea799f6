"""A reply as a client sees it: content, reasoning and tool calls, and the parser that finds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qcompile.runtime.parsers.events import ArgumentsPiece, CallStart, Event, ReasoningPiece, TextPiece, merged
from qcompile.runtime.parsers.incremental import Incremental

_MOST_AT_ONCE = 1 << 12
"""Most characters that parsers take at once: they search all of what they have after each call."""


@dataclass
class ToolCall:
    """A call of a tool. arguments: JSON, if the model wrote it."""

    name: str
    arguments: str = ""


@dataclass
class ParsedReply:
    """What a reply consists of. content, reasoning: None where there is none."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Add what was found next."""
        for event in events:
            if isinstance(event, TextPiece):
                self.content = (self.content or "") + event.text
            elif isinstance(event, ReasoningPiece):
                self.reasoning = (self.reasoning or "") + event.text
            elif isinstance(event, CallStart):
                self.calls.append(ToolCall(event.name))
            else:
                self.calls[-1].arguments += event.text


class ReplyParser:
    """Finds reasoning first, and calls in the rest. Without a parser, all is content.

    most_calls: further calls are left out.
    """

    def __init__(
        self, reasoning: Incremental | None = None, calls: Incremental | None = None, most_calls: int | None = None
    ) -> None:
        self._reasoning, self._calls, self._most = reasoning, calls, most_calls
        self._begun = 0

    def push(self, text: str) -> list[Event]:
        """What is certain after a further piece of the reply."""
        events: list[Event] = []
        for start in range(0, len(text), _MOST_AT_ONCE):
            piece = text[start : start + _MOST_AT_ONCE]
            events += self._rest(self._reasoning.push(piece) if self._reasoning else [TextPiece(piece)])
        return self._allowed(events)

    def end(self) -> list[Event]:
        """What was held back until the end of the reply."""
        events = self._rest(self._reasoning.end() if self._reasoning else [])
        return self._allowed(events + (self._calls.end() if self._calls else []))

    def whole(self, text: str) -> ParsedReply:
        """Parse a whole reply."""
        reply = ParsedReply()
        reply.add(self.push(text))
        reply.add(self.end())
        return reply

    def _rest(self, events: Iterable[Event]) -> list[Event]:
        """Replace text by what the parser of calls finds in it."""
        parsed: list[Event] = []
        for event in events:
            parsed += self._calls.push(event.text) if self._calls and isinstance(event, TextPiece) else [event]
        return parsed

    def _allowed(self, events: Iterable[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            self._begun += isinstance(event, CallStart)
            beyond = self._most is not None and self._begun > self._most
            if not (beyond and isinstance(event, CallStart | ArgumentsPiece)):
                kept.append(event)
        return merged(kept)
