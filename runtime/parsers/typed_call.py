"""Calls with arguments that are written one by one as text. They become JSON by the types that the tool declares."""

from __future__ import annotations

import json
from collections.abc import Sequence

from qcompile.runtime.parsers.call_parser import CallParser
from qcompile.runtime.parsers.incremental import MalformedError, Steps
from qcompile.runtime.parsers.json_values import parsed, written
from qcompile.runtime.parsers.tools import DeclaredTools

_PYTHON = {"True": "true", "False": "false", "None": "null"}


class TypedCallParser(CallParser):
    """Hands out an object of typed arguments. A text is handed out while it comes, other values when they have ended.

    framed: whether a line break after the start and before the end of a value is not part of it.
    """

    framed = False

    def __init__(self, tools: DeclaredTools) -> None:
        super().__init__(tools)
        self._name, self._first = "", True

    def begin_object(self, name: str) -> None:
        """Begin a call and its arguments."""
        self.begin_call(name)
        self.say("{")
        self._first, self._name = True, name

    def argument(self, key: str, closing: str) -> Steps[None]:
        """Take a value up to `closing`, as argument `key`. Raises MalformedError if it does not end."""
        self.say(("" if self._first else ", ") + written(key) + ": ")
        self._first = False
        if self.framed:
            yield from self.skip("\n")
        closings = ("\n" + closing, closing) if self.framed else (closing,)
        types = self.tools.types(self._name, key)
        if types == {"string"}:
            yield from self._string(closings)
            return
        value = ""
        while True:
            piece, end = yield from self.find(closings)
            value += piece
            if end:
                break
            if not piece:
                self.say(value)
                raise MalformedError
        self.say(_typed(value, types))

    def _string(self, closings: Sequence[str]) -> Steps[None]:
        self.say('"')
        while True:
            piece, end = yield from self.find(closings)
            self.say(json.dumps(piece, ensure_ascii=False)[1:-1])
            if end:
                self.say('"')
                return
            if not piece:
                raise MalformedError


def _typed(text: str, types: frozenset[str]) -> str:
    """A value of one of these types (empty: any) as JSON. A text that is none of them stays a text."""
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        value = parsed(bare)
    except MalformedError:
        return written(text)
    if isinstance(value, str) or (types and not _of(value) & types):  # texts are written without quotes
        return written(text)
    return bare


def _of(value: object) -> set[str]:
    """The names that JSON schemas have for the type of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number"} | ({"integer"} if value == value // 1 else set())
    return {"array" if isinstance(value, list) else "object"}
