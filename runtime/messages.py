"""Replies as messages in OpenAI's form, while they are written."""

from __future__ import annotations

import secrets
import string
from typing import Any

from qcompile.runtime.parsers.events import CallStart, Event, ReasoningPiece, TextPiece
from qcompile.runtime.turn import Turn

_ID_CHARACTERS = string.ascii_letters + string.digits
_MOST_ID = 24


def new_call_id(characters: int | None, prefix: str = "call_") -> str:
    """An id for a call, of `characters` letters and digits where a template needs that, else with a prefix."""
    drawn = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(characters or _MOST_ID))
    return drawn if characters else prefix + drawn


class MessageStream:
    """The message of one reply as its text comes. Each `push` returns what it adds to the message, OpenAI's delta."""

    def __init__(self, turn: Turn) -> None:
        self._parser, self._id_characters = turn.parser(), turn.id_characters
        self._message: dict[str, Any] = {"role": "assistant", "content": None}

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return len(self._message.get("tool_calls", ()))

    @property
    def message(self) -> dict[str, Any]:
        """The message so far. One that only calls tools has no content; an empty one has empty content."""
        content = self._message["content"]
        calls = [call | {"function": dict(call["function"])} for call in self._message.get("tool_calls", ())]
        content_message = self._message | {"content": content if content is not None or calls else ""}
        return content_message | {"tool_calls": calls} if calls else content_message

    def push(self, text: str, ended: bool = False) -> dict[str, Any]:
        """Add further text, and with `ended` all that was held back. Returns the delta; empty if nothing is certain."""
        events = self._parser.push(text)
        delta: dict[str, Any] = {}
        for event in events + (self._parser.end() if ended else []):
            self._add(delta, event)
        return delta

    def _add(self, delta: dict[str, Any], event: Event) -> None:
        if isinstance(event, TextPiece | ReasoningPiece):
            name = "content" if isinstance(event, TextPiece) else "reasoning_content"
            for part in (delta, self._message):
                part[name] = (part.get(name) or "") + event.text
            return
        if isinstance(event, CallStart):
            head, index = {"id": new_call_id(self._id_characters), "type": "function"}, {"index": self.calls}
            for part, first in ((delta, index), (self._message, {})):
                function = {"name": event.name, "arguments": ""}
                part.setdefault("tool_calls", []).append({**first, **head, "function": function})
            return
        added = delta.setdefault("tool_calls", [])
        if not added:
            added.append({"index": self.calls - 1, "function": {"arguments": ""}})
        for call in (added[-1], self._message["tool_calls"][-1]):
            call["function"]["arguments"] += event.text
