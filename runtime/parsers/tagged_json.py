"""Calls as JSON between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` for each."""

from __future__ import annotations

from qcompile.runtime.parsers.incremental import Steps
from qcompile.runtime.parsers.json_call import JsonCallParser


class TaggedJsonParser(JsonCallParser):
    """The end tag may be missing."""

    markers = ("<tool_call>",)

    def call(self, marker: str) -> Steps[None]:
        yield from self.skip_space()
        yield from self.json_call()
        yield from self.skip_space()
        yield from self.skip("</tool_call>")
