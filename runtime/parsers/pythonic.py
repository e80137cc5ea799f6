"""A reply that is a list of calls in Python's syntax: `[name(key=value), ...]`, with literals as values."""

from __future__ import annotations

import ast
from typing import Any

from qcompile.runtime.parsers.call_parser import CallParser
from qcompile.runtime.parsers.incremental import MalformedError, Steps
from qcompile.runtime.parsers.json_values import written

_MOST_CHARACTERS = 1 << 16
_MOST_DEPTH = 50
_PAIRS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
PYTHONIC_TOKENS = (*_PAIRS, *_PAIRS.values())
"""Tokens that may stand before and behind a list."""
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(CallParser):
    """A list at the start of a reply is calls if all their names are those of tools. It is read when it is complete.

    The list may stand between tokens, where content may precede it.
    """

    markers = tuple(_PAIRS)

    def start(self) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self.looks_at("[")):
            yield from self._list()

    def call(self, marker: str) -> Steps[None]:
        yield from self.skip_space()
        yield from self._list()
        yield from self.skip_space()
        yield from self.skip(_PAIRS[marker])

    def _list(self) -> Steps[None]:
        calls = _calls((yield from self.taken(self._bracketed())))
        if any(not self.tools.knows(name) for name, _ in calls):
            raise MalformedError
        for name, arguments in calls:
            self.begin_call(name)
            self.say(arguments)

    def _bracketed(self) -> Steps[None]:
        """Take a text in brackets; brackets within quotes do not count."""
        depth = size = 0
        while True:
            char = yield from self.peek()
            if not char or size > _MOST_CHARACTERS or depth > _MOST_DEPTH or (not depth and char != "["):
                raise MalformedError
            self.at += 1
            size += 1
            if char in "'\"":
                size += yield from self._quoted(char, _MOST_CHARACTERS - size)
            depth += (char in "([{") - (char in ")]}")
            if depth == 0:
                return

    def _quoted(self, quote: str, most: int) -> Steps[int]:
        """Take the rest of a text in quotes. Returns its length."""
        size = 0
        while (char := (yield from self.peek())) != quote:
            if not char or size > most:
                raise MalformedError
            self.at += 1
            size += 1
            if char == "\\" and (yield from self.peek()):
                self.at += 1
                size += 1
        self.at += 1
        return size + 1


def _calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls in a list. Raises MalformedError."""
    try:
        tree = ast.parse(_escaped(text), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise MalformedError from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise MalformedError
    return [_call(node) for node in tree.elts]


def _escaped(text: str) -> str:
    """The text with its line breaks in quotes as escapes: some templates show texts without them."""
    written, quote, escaped = [], "", False
    for char in text:
        written.append("\\n" if char == "\n" and quote and not escaped else char)
        if not escaped and char in (quote or "'\""):
            quote = "" if quote else char
        escaped = char == "\\" and not escaped
    return "".join(written)


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise MalformedError
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise MalformedError
        arguments[keyword.arg] = _literal(keyword.value)
    try:
        return ast.unparse(node.func), written(arguments)
    except (ValueError, RecursionError) as error:  # a number of too many digits
        raise MalformedError from error


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON has. Raises MalformedError for anything else."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | bool | int | float)):
        if isinstance(node.value, float) and abs(node.value) == float("inf"):
            raise MalformedError
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    raise MalformedError
