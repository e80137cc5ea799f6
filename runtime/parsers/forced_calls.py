"""A reply that a grammar makes a list of calls: `[{"name": ..., "parameters": {...}}]`.

No part of such a reply is content. So a call is certain as soon as its name is, and with its first character where only
one tool can be called. `max_tokens` may end the reply anywhere: what stands before a name is then dropped.
"""

from __future__ import annotations

import json

from qcompile.runtime.parsers.incremental import MalformedError, Steps
from qcompile.runtime.parsers.json_call import JsonCallParser
from qcompile.runtime.parsers.tools import DeclaredTools


class ForcedCallsParser(JsonCallParser):
    """Reads the list. tools: those that can be called. From where a text leaves the format on, it is content."""

    markers = ()

    def __init__(self, tools: DeclaredTools) -> None:
        super().__init__(tools)
        self._only = next(iter(tools.parameters)) if len(tools.parameters) == 1 else None

    def parse(self) -> Steps[None]:
        self.mark = 0
        try:
            yield from self._list()
        except MalformedError:
            self.pass_on_end()
            if self.mark is not None and not (yield from self._at_end()):
                self._write(self.text[self.mark : self.at])
        self.mark = None
        while not (yield from self._at_end()):
            start, self.at = self.at, len(self.text)
            self._write(self.text[start:])

    def call(self, marker: str) -> Steps[None]:
        raise NotImplementedError("there are no markers")

    def _list(self) -> Steps[None]:
        """Read all calls. Raises MalformedError."""
        yield from self.skip_space()
        yield from self.expect("[")
        more = True
        while more:
            if self._only is not None:
                self.begin_call(self._only)
            yield from self.skip_space()
            yield from self._one()
            more = yield from self.goes_on("]")

    def _one(self) -> Steps[None]:
        """Read a call. Raises MalformedError."""
        yield from self.expect("{")
        yield from self.skip_space()
        yield from self._named("name")
        name = json.loads((yield from self.taken(self._string())))
        if self._only is None:
            self.begin_call(name)
        yield from self.goes_on("}")
        yield from self._named("parameters")
        self.pass_on()
        yield from self._value()
        self.pass_on_end()
        yield from self.skip_space()
        yield from self.expect("}")

    def _named(self, name: str) -> Steps[None]:
        """Read a key and its colon. Raises MalformedError for another key."""
        if (yield from self._key()) != name:
            raise MalformedError

    def _at_end(self) -> Steps[bool]:
        return not (yield from self.peek())
