"""Calls in a section: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

from __future__ import annotations

from qcompile.runtime.parsers.call_parser import MOST_NAME
from qcompile.runtime.parsers.incremental import Steps
from qcompile.runtime.parsers.json_call import JsonCallParser

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENT, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class SectionTokensParser(JsonCallParser):
    """What stands before the arguments is an id, of a name and the call's number: the number is not kept."""

    markers = (_SECTION, _CALL)

    def call(self, marker: str) -> Steps[None]:
        yield from self.skip_space()
        if marker == _SECTION:
            yield from self.expect(_CALL)
        yield from self.in_turn(self._one, _CALL, _CALL_END)
        yield from self.skip(_SECTION_END)

    def _one(self) -> Steps[None]:
        id, _ = yield from self.take_until((_ARGUMENT,), MOST_NAME, "{\n")
        name, colon, number = id.strip().rpartition(":")
        name = name if colon and number.isdigit() else id.strip()
        yield from self.skip_space()
        yield from self.arguments_object(name.removeprefix("functions."))
