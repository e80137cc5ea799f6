"""Calls as tags: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

from qcompile.runtime.parsers.call_parser import MOST_NAME
from qcompile.runtime.parsers.incremental import MalformedError, Steps
from qcompile.runtime.parsers.typed_call import TypedCallParser


class FunctionTagsParser(TypedCallParser):
    """The outer tag may be missing if the name is that of a tool."""

    outer, outer_end = "<tool_call>", "</tool_call>"
    markers = (outer, "<function=")
    framed = True

    def call(self, marker: str) -> Steps[None]:
        if marker == self.outer:
            yield from self.skip_space()
            yield from self.expect("<function=")
        name, _ = yield from self.take_until((">",), MOST_NAME, "<\n")
        if marker != self.outer and not self.tools.knows(name):
            raise MalformedError
        self.begin_object(name)
        yield from self.skip_space()
        while not (yield from self.skip("</function>")):
            yield from self.expect("<parameter=")
            key, _ = yield from self.take_until((">",), MOST_NAME, "<\n")
            yield from self.argument(key, "</parameter>")
            yield from self.skip_space()
        self.say("}")
        yield from self.skip_space()
        yield from self.skip(self.outer_end)


class SeedTagsParser(FunctionTagsParser):
    """Calls as FunctionTagsParser reads them, with other tags around them. A value is all text between its tags."""

    outer, outer_end = "<seed:tool_call>", "</seed:tool_call>"
    markers = (outer, "<function=")
    framed = False
