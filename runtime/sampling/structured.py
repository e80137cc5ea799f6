"""What structured output a request asks for: a JSON schema, a regular expression, a choice of texts, or a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from qcompile.errors import UsageError, shown

Kind = Literal["json", "regex", "choice", "grammar"]

MOST_BYTES = 256 << 10
"""Longest schema, expression or grammar, in bytes of UTF-8: what is longer takes seconds to compile."""
MOST_DEPTH = 128
"""Most levels of a schema's brackets in each other, as in llguidance, which has such limits for all grammars."""
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(r"[\[\](){}]")
_ANY_OBJECT = '{"type": "object"}'


class Source(NamedTuple):
    """A description of a language in one form: what a compiled grammar is known by. compact: JSON without spaces."""

    kind: Kind
    text: str
    compact: bool = False


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The language that a request's output belongs to; names are vLLM's. Exactly one of the first five is given.

    json: a JSON schema, as text or as Python's values. regex: a regular expression for the whole output. choice: texts,
    of which the output is one. grammar: a grammar in Lark's format, as llguidance reads it. json_object: any JSON
    object. disable_any_whitespace: no spaces and newlines between the parts of JSON. Raises UsageError.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            what = f"not both {given[0]} and {given[1]}" if given else "not none"
            raise UsageError(f"structured_outputs must have one of {', '.join(_KINDS)}, {what}")
        object.__setattr__(self, "_source", self._read(given[0]))

    @property
    def source(self) -> Source:
        """The language in one form."""
        found: Source = self.__dict__["_source"]
        return found

    def _read(self, name: str) -> Source:
        value = getattr(self, name)
        if name == "json_object":
            if value is not True:
                raise UsageError(f"structured_outputs.json_object must be True, not {shown(value)}")
            return Source("json", _ANY_OBJECT, self.disable_any_whitespace)
        if name == "json":
            return Source("json", _schema_text(value), self.disable_any_whitespace)
        if name == "choice":
            texts = isinstance(value, Sequence) and not isinstance(value, str) and value
            if not texts or not all(isinstance(text, str) for text in value):
                raise UsageError("structured_outputs.choice must be a list of texts, with at least one")
            return Source("choice", _limited(name, json.dumps(list(value), ensure_ascii=False)))
        if not isinstance(value, str) or not value:
            raise UsageError(f"structured_outputs.{name} must be a text with at least one character")
        return Source("regex" if name == "regex" else "grammar", _limited(name, value))


_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def structured(given: object) -> StructuredOutputsParams:
    """Structured output as a caller gives it: StructuredOutputsParams, or its fields by name. Raises UsageError."""
    if isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise UsageError(f"structured_outputs must be StructuredOutputsParams or its fields, not {shown(given)}")
    known = [field.name for field in fields(StructuredOutputsParams)]
    for name in given:
        if name not in known:
            raise UsageError(f"structured_outputs has no field {shown(name)}: it has {', '.join(known)}")
    return StructuredOutputsParams(**given)


def _schema_text(given: Any) -> str:
    """A JSON schema as text."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if _depth(_limited("json", text)) > MOST_DEPTH:
            raise RecursionError
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise UsageError(f"structured_outputs.json is nested deeper than {MOST_DEPTH} levels") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"structured_outputs.json is not JSON: {error}") from None
    if schema is False:
        raise UsageError("structured_outputs.json is false: no output can satisfy it")
    if schema is not True and not isinstance(schema, dict):
        raise UsageError("structured_outputs.json must be a JSON schema: an object")
    return "{}" if schema is True else text


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which only Python takes for JSON."""
    raise ValueError(f"it has {name}")


def _limited(name: str, text: str) -> str:
    """`text`, if it is Unicode and short enough. Raises UsageError."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"structured_outputs.{name} is not valid Unicode at character {error.start}") from None
    if size > MOST_BYTES:
        raise UsageError(f"structured_outputs.{name} has {size:,} bytes, of at most {MOST_BYTES:,}")
    return text


def _depth(text: str) -> int:
    """Most brackets that are open at once in JSON, outside of its texts."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest
