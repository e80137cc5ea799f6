"""A reply that is JSON alone: `{"name": ..., "parameters": {...}}`, several separated by `;`, or a list of such.

Calls may also follow the token `<|python_tag|>`.
"""

from __future__ import annotations

from qcompile.runtime.parsers.incremental import Steps
from qcompile.runtime.parsers.json_call import JsonCallParser


class PlainJsonParser(JsonCallParser):
    """JSON at the start of a reply is a call if its name is that of a tool."""

    markers = ("<|python_tag|>",)
    only_known = True

    def start(self) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self.looks_at("{")) or (yield from self.looks_at("[")):
            yield from self._calls()

    def call(self, marker: str) -> Steps[None]:
        yield from self.skip_space()
        yield from self._calls()

    def _calls(self) -> Steps[None]:
        if (yield from self.list_of_calls()):
            return
        more = True
        while more:
            yield from self.json_call()
            yield from self.skip_space()
            more = yield from self.skip(";")
            yield from self.skip_space()
