"""Strict JSON that arrives in pieces, and tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json

from qcompile.runtime.parsers.call_parser import CallParser
from qcompile.runtime.parsers.incremental import MalformedError, Steps
from qcompile.runtime.parsers.json_values import has_surrogates, parsed

_MOST_DEPTH = 100
_DIGITS, _HEXADECIMAL, _ESCAPES = "0123456789", "0123456789abcdefABCDEF", '"\\/bfnrt'
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class JsonCallParser(CallParser):
    """Reads JSON values, of which calls are made."""

    only_known = False
    """Whether the name of a call must be that of a tool: where the format alone does not tell a call from content."""

    name_key = "name"
    """The key of a call's name."""

    def json_call(self) -> Steps[None]:
        """Read one call, `{"name": ..., "arguments": {...}}`. Other keys are skipped. Raises MalformedError."""
        if self.mark is None:
            self.mark = self.at
        name = arguments = None
        begun = False
        yield from self.expect("{")
        yield from self.skip_space()
        more = not (yield from self.skip("}"))
        while more:
            key = yield from self._key()
            if self.only_known and key not in _KEYS:
                raise MalformedError
            if key == self.name_key and name is None:
                name = self._checked(json.loads((yield from self.taken(self._string()))))
                if arguments is not None:
                    self._begin_whole(name, arguments)
                    begun = True
            elif key in _ARGUMENTS and not begun and name is not None:
                yield from self._arguments(name)
                begun = True
            elif key in _ARGUMENTS and not begun and arguments is None:
                arguments = yield from self.taken(self._value())
            else:
                yield from self._value()
            more = yield from self.goes_on("}")
        if name is None:
            raise MalformedError
        if not begun:
            self._begin_whole(name, "{}")

    def list_of_calls(self) -> Steps[bool]:
        """Read a list of calls, `[{...}, {...}]`, if one comes next. Returns whether it did. Raises MalformedError."""
        if not (yield from self.skip("[")):
            return False
        yield from self.skip_space()
        more = True
        while more:
            yield from self.json_call()
            more = yield from self.goes_on("]")
        return True

    def arguments_object(self, name: str) -> Steps[None]:
        """Begin a call, and hand out the object that comes next as its arguments. Raises MalformedError."""
        if (yield from self.peek()) != "{":
            raise MalformedError
        self.begin_call(name)
        self.pass_on()
        yield from self._value()
        self.pass_on_end()

    def goes_on(self, closing: str) -> Steps[bool]:
        """Take a comma, or the end of an object or a list. Returns whether it goes on. Raises MalformedError."""
        yield from self.skip_space()
        if (yield from self.skip(closing)):
            return False
        yield from self.expect(",")
        yield from self.skip_space()
        return True

    def _key(self) -> Steps[str]:
        key: str = json.loads((yield from self.taken(self._string())))
        yield from self.skip_space()
        yield from self.expect(":")
        yield from self.skip_space()
        return key

    def _checked(self, name: str) -> str:
        if self.only_known and not self.tools.knows(name):
            raise MalformedError
        return name

    def _arguments(self, name: str) -> Steps[None]:
        if (yield from self.looks_at("{")):
            yield from self.arguments_object(name)
        else:
            self._begin_whole(name, (yield from self.taken(self._value())))

    def _begin_whole(self, name: str, arguments: str) -> None:
        """Begin a call with arguments that have come: an object, a text that is one, or nothing."""
        value = parsed(arguments)
        if isinstance(value, str) and value:
            arguments, value = value, parsed(value)
        if value in (None, "", {}):
            arguments = "{}"
        elif not isinstance(value, dict) or has_surrogates(arguments):
            raise MalformedError
        self.begin_call(name)
        self.say(arguments)

    def _value(self, depth: int = 0) -> Steps[None]:
        """Take a JSON value. Raises MalformedError at the first character that cannot belong to one."""
        char = yield from self.peek()
        if char == '"':
            yield from self._string()
        elif char and char in "{[" and depth < _MOST_DEPTH:
            yield from self._nested(char, depth + 1)
        elif char and char in "-0123456789":
            yield from self._number()
        else:
            literal = {"t": "true", "f": "false", "n": "null"}.get(char)
            if literal is None:
                raise MalformedError
            yield from self.expect(literal)

    def _nested(self, opening: str, depth: int) -> Steps[None]:
        closing = "}" if opening == "{" else "]"
        self.at += 1
        yield from self.skip_space()
        more = not (yield from self.skip(closing))
        while more:
            if opening == "{":
                yield from self._string()
                yield from self.skip_space()
                yield from self.expect(":")
                yield from self.skip_space()
            yield from self._value(depth)
            more = yield from self.goes_on(closing)

    def _string(self) -> Steps[None]:
        yield from self.expect('"')
        while (char := (yield from self.peek())) != '"':
            if not char or char < " ":
                raise MalformedError
            self.at += 1
            if char == "\\":
                yield from self._escape()
        self.at += 1

    def _escape(self) -> Steps[None]:
        if (yield from self.skip("u")):
            for _ in range(4):
                yield from self._one_of(_HEXADECIMAL)
        else:
            yield from self._one_of(_ESCAPES)

    def _number(self) -> Steps[None]:
        yield from self.skip("-")
        if not (yield from self.skip("0")):
            yield from self._digits()
        if (yield from self.skip(".")):
            yield from self._digits()
        if (yield from self.skip("e", "E")):
            yield from self.skip("+", "-")
            yield from self._digits()

    def _digits(self) -> Steps[None]:
        yield from self._one_of(_DIGITS)
        while (char := (yield from self.peek())) and char in _DIGITS:
            self.at += 1

    def _one_of(self, characters: str) -> Steps[None]:
        char = yield from self.peek()
        if not char or char not in characters:
            raise MalformedError
        self.at += 1
