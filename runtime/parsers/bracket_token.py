"""Calls behind the token `[TOOL_CALLS]`: a list of JSON objects, or a name and, behind `[ARGS]`, its arguments."""

from __future__ import annotations

from qcompile.runtime.parsers.call_parser import MOST_NAME
from qcompile.runtime.parsers.incremental import MalformedError, Steps
from qcompile.runtime.parsers.json_call import JsonCallParser


class BracketTokenParser(JsonCallParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.

    Call ids of the model are not kept.
    """

    markers = ("[TOOL_CALLS]",)

    def call(self, marker: str) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self.list_of_calls()):
            return
        if (yield from self.looks_at("{")):
            yield from self.json_call()
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        name = ""
        while not (yield from self.looks_at("{")):
            if (yield from self.skip("[CALL_ID]")):
                yield from self.take_until(("[ARGS]",), MOST_NAME)
                break
            if (yield from self.skip("[ARGS]")):
                break
            char = yield from self.peek()
            if not char or len(name) == MOST_NAME:
                raise MalformedError
            name += char
            self.at += 1
        yield from self.skip_space()
        yield from self.arguments_object(name.strip())
