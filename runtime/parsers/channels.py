"""Replies of several messages in channels: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>...`.

The channel `analysis` is reasoning. A message with a recipient is a call: `to=functions.name` stands before or behind
the channel. All else is content.
"""

from __future__ import annotations

from qcompile.runtime.parsers.call_parser import CallParser
from qcompile.runtime.parsers.events import ReasoningPiece, TextPiece
from qcompile.runtime.parsers.incremental import MalformedError, Steps

_CHANNEL, _START, _MESSAGE, _CONSTRAINT = "<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_MOST_HEADER = 512
_REASONING = "analysis"


class ChannelsParser(CallParser):
    """Reads a reply that begins within the header of a message. Messages of a kind are joined with line breaks."""

    markers = (_CHANNEL, _START)
    _kinds: frozenset[type] = frozenset()  # of the messages so far
    _reasons = False  # whether this message is reasoning

    def start(self) -> Steps[None]:
        if (yield from self.looks_at(" to=")):
            yield from self.call("")

    def call(self, marker: str) -> Steps[None]:
        self._reasons = False
        header, _ = yield from self.take_until((_MESSAGE,), _MOST_HEADER)
        role, _, channel = (marker + header).partition(_CHANNEL)
        words = channel.replace(_CONSTRAINT, f" {_CONSTRAINT}").split()
        recipients = [word[3:] for word in role.split() + words if word.startswith("to=")]
        if recipients and recipients[0]:
            self.begin_call(recipients[0].removeprefix("functions."))
            yield from self._arguments()
            return
        self.mark = None
        self._reasons = words[:1] == [_REASONING]
        yield from self._message(ReasoningPiece if self._reasons else TextPiece)

    def _arguments(self) -> Steps[None]:
        empty = True
        while True:
            piece, ended = yield from self._body()
            if empty:
                piece = piece.lstrip()
            empty = empty and not piece
            self.say(piece)
            if ended:
                break
        if empty:
            self.say("{}")

    def _message(self, kind: type[TextPiece] | type[ReasoningPiece]) -> Steps[None]:
        joint = "\n" if kind in self._kinds else ""
        while True:
            piece, ended = yield from self._body()
            if piece:
                self._kinds |= {kind}
                self.events.append(kind(joint + piece))
                joint = ""
            if ended:
                return

    def _body(self) -> Steps[tuple[str, bool]]:
        """Take a further piece of a message. Returns it, and whether the message ends with it."""
        piece, end = yield from self.find(_ENDS)
        if end == _START:
            self.at -= len(_START)
        return piece, bool(end) or not piece


class StructuredChannelsParser(ChannelsParser):
    """Reads a reply of which the first message that is no reasoning is structured output: it is the rest of the reply,
    even if it has texts that would end a message. A header in which the reply ends is no content."""

    def call(self, marker: str) -> Steps[None]:
        try:
            yield from super().call(marker)
        except MalformedError:
            if (yield from self.peek()):
                raise
            self.mark = None

    def _body(self) -> Steps[tuple[str, bool]]:
        if self._reasons:
            return (yield from super()._body())
        yield from self.peek()
        piece, self.at = self.text[self.at :], len(self.text)
        return piece, not piece
