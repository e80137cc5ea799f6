"""Reasoning between two tags at the start of a reply; what follows is text for the next parser."""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.runtime.parsers.events import ReasoningPiece, TextPiece
from qcompile.runtime.parsers.incremental import WHITESPACE, Incremental, Steps


@dataclass(frozen=True)
class ReasoningTags:
    """The texts that reasoning stands between."""

    opening: str
    closing: str


class ReasoningParser(Incremental):
    """Splits a reply into its reasoning and the rest. Whitespace around the reasoning is dropped.

    begun: whether the prompt ends within the reasoning, with the opening tag. Otherwise a reply that does not begin
    with that tag has no reasoning. Reasoning that does not end is all of the reply.
    """

    def __init__(self, tags: ReasoningTags, begun: bool) -> None:
        super().__init__()
        self._tags, self._begun = tags, begun

    def parse(self) -> Steps[None]:
        if (yield from self._opens()) or self._begun:
            yield from self._reasoning()
            yield from self.skip_space()
        while piece := (yield from self._rest()):
            self.events.append(TextPiece(piece))

    def _opens(self) -> Steps[bool]:
        self.mark = self.at
        yield from self.skip_space()
        opened = yield from self.skip(self._tags.opening)
        if not opened:
            self.at = self.mark
        self.mark = None
        return opened

    def _reasoning(self) -> Steps[None]:
        yield from self.skip_space()
        held = ""  # whitespace that is dropped if the reasoning ends with it
        while True:
            piece, closing = yield from self.find((self._tags.closing,))
            text = held + piece
            body = text.rstrip(WHITESPACE)
            held = text[len(body) :]
            self.events.append(ReasoningPiece(body))
            if closing or not piece:
                return

    def _rest(self) -> Steps[str]:
        """The text that has come and not been taken; empty at the end."""
        yield from self.peek()
        piece, self.at = self.text[self.at :], len(self.text)
        return piece
