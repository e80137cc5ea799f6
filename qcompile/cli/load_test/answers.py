"""Reads what a server sent: when which tokens came, and how the answer ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from qcompile.cli.load_test.client import Recording

_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Parts of a chat's delta that are made of tokens."""


@dataclass(frozen=True)
class TimedAnswer:
    """A request that was answered or failed. Times are in seconds.

    first: from sending to the first token. gaps: for each token after the first piece, the time since the piece before,
    divided by the tokens of its piece. whole: from sending to the end. input_tokens, output_tokens: as the server
    counts them, else output pieces. late: how long after it was due the request was sent.
    """

    sent: float
    late: float
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    whole: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None

    @property
    def between(self) -> float:
        """Mean time between two tokens; 0 if there is only one."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else 0.0


def read(recording: Recording) -> TimedAnswer:
    """What a recording says."""
    late = recording.sent - recording.due
    failure = recording.failure or _refusal(recording)
    if failure:
        return TimedAnswer(recording.sent, late, failure=failure)
    pieces = _Pieces()
    for at, event in events(recording):
        if event.get("error"):
            return TimedAnswer(recording.sent, late, failure=_message(event["error"]))
        pieces.add(at, event)
    if not pieces.ended:
        return TimedAnswer(recording.sent, late, failure="the stream ended without a finish reason")
    pieces.settle()
    if not pieces.counts:
        return TimedAnswer(recording.sent, late, failure="the answer has no token")
    first, gaps = pieces.times()
    whole = recording.ended - recording.sent
    output = pieces.output_tokens
    return TimedAnswer(recording.sent, late, first - recording.sent, gaps, whole, pieces.input_tokens, output)


def _refusal(recording: Recording) -> str | None:
    """Why the server refused a request; None if it did not."""
    if recording.status == 200:
        return None
    try:
        said = json.loads(b"".join(piece for _, piece in recording.pieces))
    except ValueError:
        said = None
    why = _message(said.get("error", said)) if isinstance(said, dict) else ""
    return f"HTTP {recording.status}" + (f": {why}" if why else "")


def _message(error: Any) -> str:
    """The text of an error, in OpenAI's form or others."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return " ".join(str(error).split())[:300]


def events(recording: Recording) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of a stream, each with the time at which its last byte came."""
    rest = b""
    for at, piece in recording.pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if line.startswith(b"data:") and (text := line[5:].strip()) and text != b"[DONE]":
                try:
                    event = json.loads(text)
                except ValueError:
                    event = {"error": "an event of the stream is not JSON"}
                yield at, event if isinstance(event, dict) else {}


class _Pieces:
    """Times and token counts of the pieces of one stream."""

    def __init__(self) -> None:
        self.counts: list[tuple[float, float]] = []  # time, tokens
        self.input_tokens = self.output_tokens = 0
        self.ended = False
        self._counted = 0  # tokens that pieces with a count of their own have
        self._told = True  # whether every piece has a count

    def add(self, at: float, event: dict[str, Any]) -> None:
        """Take one event."""
        choices = event.get("choices") or []
        self.ended = self.ended or any(choice.get("finish_reason") for choice in choices)
        content = any(_has_text(choice) for choice in choices)
        usage = event.get("usage") or {}
        total = usage.get("completion_tokens")
        if isinstance(total, int):
            self.input_tokens = usage.get("prompt_tokens") or self.input_tokens
            self.output_tokens = max(self.output_tokens, total)
        if not choices:  # the last event, with the usage alone
            return
        if isinstance(total, int):
            if total > self._counted:
                self.counts.append((at, total - self._counted))
                self._counted = total
        elif content:
            self._told = False
            self.counts.append((at, 1))

    def settle(self) -> None:
        """Spread the tokens evenly over the pieces if only their sum is known; without that, a piece is a token."""
        if not self._told and self.counts:
            share = self.output_tokens / len(self.counts) if self.output_tokens else 1.0
            self.counts = [(at, share) for at, _ in self.counts]
        self.output_tokens = self.output_tokens or round(sum(tokens for _, tokens in self.counts))

    def times(self) -> tuple[float, list[float]]:
        """When the first token came, and the time between tokens, for each token after the first piece."""
        gaps: list[float] = []
        for (before, _), (at, tokens) in zip(self.counts, self.counts[1:], strict=False):
            gaps += [(at - before) / tokens] * max(1, round(tokens))
        return self.counts[0][0], gaps


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event brings text."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(name) for name in _TEXTS)
