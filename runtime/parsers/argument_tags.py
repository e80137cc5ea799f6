"""Calls as a name and tags: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

from __future__ import annotations

from qcompile.runtime.parsers.call_parser import MOST_NAME
from qcompile.runtime.parsers.incremental import Steps
from qcompile.runtime.parsers.typed_call import TypedCallParser

_END, _KEY = "</tool_call>", "<arg_key>"


class ArgumentTagsParser(TypedCallParser):
    """Line breaks may stand between tags."""

    markers = ("<tool_call>",)

    def call(self, marker: str) -> Steps[None]:
        name, end = yield from self.take_until((_KEY, _END), MOST_NAME, "{<")
        self.begin_object(name.strip())
        while end == _KEY:
            key, _ = yield from self.take_until(("</arg_key>",), MOST_NAME)
            yield from self.skip_space()
            yield from self.expect("<arg_value>")
            yield from self.argument(key.strip(), "</arg_value>")
            yield from self.skip_space()
            end = _KEY if (yield from self.skip(_KEY)) else ""
        if not end:
            yield from self.expect(_END)
        self.say("}")
