"""Calls as a list of JSON objects behind a tag: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`."""

from __future__ import annotations

from qcompile.runtime.parsers.incremental import Steps
from qcompile.runtime.parsers.json_call import JsonCallParser


class TokenListParser(JsonCallParser):
    """Behind the token `<|tool_call|>`. One object alone may stand in place of the list, and the end may be missing."""

    markers = ("<|tool_call|>",)
    closing = "<|/tool_call|>"

    def call(self, marker: str) -> Steps[None]:
        yield from self.skip_space()
        if not (yield from self.list_of_calls()):
            yield from self.json_call()
        yield from self.skip_space()
        yield from self.skip(self.closing)


class TaggedListParser(TokenListParser):
    """Between the tags `<tool_calls>` and `</tool_calls>`."""

    markers = ("<tool_calls>",)
    closing = "</tool_calls>"
