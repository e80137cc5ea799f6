"""Calls between tokens, `<｜tool▁sep｜>` before or behind the name. Arguments are JSON, or JSON in a code block."""

from __future__ import annotations

from qcompile.runtime.parsers.call_parser import MOST_NAME
from qcompile.runtime.parsers.incremental import Steps
from qcompile.runtime.parsers.json_call import JsonCallParser

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _BETWEEN = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class FencedTokensParser(JsonCallParser):
    """`name<｜tool▁sep｜>{...}`, or the older ``function<｜tool▁sep｜>name\\n```json\\n{...}\\n``` ``."""

    markers = (_CALLS, _CALL)

    def call(self, marker: str) -> Steps[None]:
        yield from self.skip_space()
        if marker == _CALL or (yield from self.skip(_CALL)):
            yield from self.in_turn(self._one, _CALL, _CALL_END)
            yield from self.skip(_CALLS_END)

    def _one(self) -> Steps[None]:
        name, _ = yield from self.take_until((_BETWEEN,), MOST_NAME)
        fenced = name.strip() == "function" and not (yield from self.looks_at("{"))
        if fenced:
            name, _ = yield from self.take_until(("\n",), MOST_NAME)
            yield from self.expect("```json")
        yield from self.skip_space()
        yield from self.arguments_object(name.strip())
        if fenced:
            yield from self.skip_space()
            yield from self.skip("```")
