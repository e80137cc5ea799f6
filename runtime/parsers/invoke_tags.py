"""Calls as tags: `<minimax:tool_call><invoke name="f"><parameter name="key">value</parameter></invoke>...`."""

from __future__ import annotations

from qcompile.runtime.parsers.call_parser import MOST_NAME
from qcompile.runtime.parsers.incremental import Steps
from qcompile.runtime.parsers.typed_call import TypedCallParser

_INVOKE, _END = '<invoke name="', "</minimax:tool_call>"


class InvokeTagsParser(TypedCallParser):
    """Several calls may stand between the outer tags. The last of these may be missing."""

    markers = ("<minimax:tool_call>",)

    def call(self, marker: str) -> Steps[None]:
        yield from self.skip_space()
        more = True
        while more:
            yield from self._one()
            yield from self.skip_space()
            more = yield from self.looks_at(_INVOKE)
        yield from self.skip(_END)

    def _one(self) -> Steps[None]:
        if self.mark is None:
            self.mark = self.at
        yield from self.expect(_INVOKE)
        name, _ = yield from self.take_until(('">',), MOST_NAME, "<\n")
        self.begin_object(name)
        yield from self.skip_space()
        while not (yield from self.skip("</invoke>")):
            yield from self.expect('<parameter name="')
            key, _ = yield from self.take_until(('">',), MOST_NAME, "<\n")
            yield from self.argument(key, "</parameter>")
            yield from self.skip_space()
        self.say("}")
