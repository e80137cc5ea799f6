"""Replies in parts between tokens: `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>` for calls.

`<|START_THINKING|>` begins reasoning, `<|START_RESPONSE|>` content.
"""

from __future__ import annotations

from qcompile.runtime.parsers.events import ReasoningPiece
from qcompile.runtime.parsers.incremental import Steps
from qcompile.runtime.parsers.json_call import JsonCallParser

_ACTION, _THINKING, _THINKING_END = "<|START_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"
_AROUND_CONTENT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class ActionTokensParser(JsonCallParser):
    """Calls have the key `tool_name`. Ids that the model gives them are not kept."""

    markers = (_ACTION, _THINKING, *_AROUND_CONTENT)
    name_key = "tool_name"

    def call(self, marker: str) -> Steps[None]:
        if marker == _ACTION:
            yield from self.skip_space()
            yield from self.list_of_calls()
            yield from self.skip_space()
            yield from self.skip("<|END_ACTION|>")
            return
        self.mark = None  # the token is no part of the content
        if marker == _THINKING:
            yield from self._reasoning()

    def _reasoning(self) -> Steps[None]:
        while True:
            piece, end = yield from self.find((_THINKING_END,))
            self.events.append(ReasoningPiece(piece))
            if end or not piece:
                return
