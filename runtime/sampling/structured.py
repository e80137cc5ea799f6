"""What structured output a request asks for: a JSON schema, a regular expression, a choice of texts, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from qcompile.errors import UsageError, shown
from qcompile.runtime.sampling.schemas import MOST_DEPTH, schema_text

Kind = Literal["json", "regex", "choice", "grammar", "calls"]

MOST_BYTES = 256 << 10
"""Longest schema, expression or grammar, in bytes of UTF-8: what is longer takes seconds to compile."""
FORCED = "tools"
"""How errors name the language of calls that the model is forced to make, which follows from the tools' schemas."""
_ANY_OBJECT = '{"type": "object"}'


class StructureError(UsageError):
    """A language is malformed or cannot be compiled. name: its field of StructuredOutputsParams. what: the reason."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"structured_outputs.{name} {what}")
        self.what = what


@contextmanager
def named_as(field: str | None) -> Iterator[None]:
    """Let a StructureError name `field`, in which the caller gave the language; None for structured_outputs."""
    try:
        yield
    except StructureError as error:
        raise error if field is None else UsageError(f"{field} {error.what}") from None


class Reasoning(NamedTuple):
    """Any text between two tags, which stands before an output. begun: whether the prompt has the first tag.

    Otherwise an output may begin without it. In replies of several messages, `again` stands behind the second tag, and
    such a text may follow again. heads: texts of which one stands before an output in any case.
    """

    opening: str
    closing: str
    begun: bool = False
    again: str = ""
    heads: tuple[str, ...] = ()


class Source(NamedTuple):
    """A description of a language in one form: what a compiled grammar is known by. compact: JSON without spaces.

    reasoning: what stands before the language.
    """

    kind: Kind
    text: str
    compact: bool = False
    reasoning: Reasoning | None = None


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The language that a request's output belongs to; names are vLLM's. Exactly one of the first five is given.

    json: a JSON schema, as text or as Python's values. regex: a regular expression for the whole output. choice: texts,
    of which the output is one. grammar: a grammar in Lark's format, as llguidance reads it. json_object: any JSON
    object. disable_any_whitespace: no spaces and newlines between the parts of JSON. Raises UsageError.

    Chats set the last two. calls, in place of the first five: texts, each with the JSON schema of what follows it;
    an output is one of them. reasoning: what stands before the language.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    calls: Sequence[tuple[str, Mapping[str, Any]]] | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        given = [name for name in (*_KINDS, "calls") if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if not isinstance(self.disable_any_whitespace, bool):
            raise StructureError(
                "disable_any_whitespace", f"must be True or False, not {shown(self.disable_any_whitespace)}"
            )
        if len(given) != 1:
            what = f"not both {given[0]} and {given[1]}" if given else "not none"
            raise UsageError(f"structured_outputs must have one of {', '.join(_KINDS)}, {what}")
        object.__setattr__(self, "_source", self._read(given[0]))

    @property
    def source(self) -> Source:
        """The language in one form."""
        language: Source = self.__dict__["_source"]
        return language._replace(reasoning=self.reasoning)

    def _read(self, name: str) -> Source:
        value = getattr(self, name)
        if name == "json_object":
            if value is not True:
                raise StructureError(name, f"must be True, not {shown(value)}")
            return Source("json", _ANY_OBJECT, self.disable_any_whitespace)
        if name == "json":
            return Source("json", _schema_text(value), self.disable_any_whitespace)
        if name == "calls":
            listed = [(head, _schema_text(schema)) for head, schema in value]
            return Source("calls", _limited(name, json.dumps(listed)), self.disable_any_whitespace)
        if name == "choice":
            texts = isinstance(value, Sequence) and not isinstance(value, str) and value
            if not texts or not all(isinstance(text, str) for text in value):
                raise StructureError(name, "must be a list of texts, with at least one")
            return Source("choice", _limited(name, json.dumps(list(value), ensure_ascii=False)))
        if not isinstance(value, str) or not value:
            raise StructureError(name, "must be a text with at least one character")
        return Source("regex" if name == "regex" else "grammar", _limited(name, value))


_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def structured(given: object) -> StructuredOutputsParams:
    """Structured output as a caller gives it: StructuredOutputsParams, or its fields by name. Raises UsageError."""
    if isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise UsageError(f"structured_outputs must be StructuredOutputsParams or its fields, not {shown(given)}")
    known = [field.name for field in fields(StructuredOutputsParams) if field.name not in ("calls", "reasoning")]
    for name in given:
        if name not in known:
            raise UsageError(f"structured_outputs has no field {shown(name)}: it has {', '.join(known)}")
    return StructuredOutputsParams(**given)


def _schema_text(given: Any) -> str:
    """A JSON schema as text."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    except RecursionError:
        raise StructureError("json", f"is nested deeper than {MOST_DEPTH} levels") from None
    except (TypeError, ValueError) as error:
        raise StructureError("json", f"is not JSON: {error}") from None
    try:
        return schema_text(_limited("json", text))
    except ValueError as error:
        raise StructureError("json", str(error)) from None


def _limited(name: str, text: str) -> str:
    """`text`, if it is Unicode and short enough. Raises StructureError."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise StructureError(name, f"is not valid Unicode at character {error.start}") from None
    if size > MOST_BYTES:
        raise StructureError(name, f"has {size:,} bytes, of at most {MOST_BYTES:,}")
    return text
