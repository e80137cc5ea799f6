"""Schemas of structured outputs before llguidance reads them."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from qcompile.runtime.sampling.rewritten import FORMATS, rewritten


def read(schema: Any) -> Any:
    return json.loads(rewritten(json.dumps(schema)))


def test_formats_that_are_notes_for_readers_are_left_out() -> None:
    """pydantic and OpenAPI write such formats, which by JSON Schema's rules demand nothing."""
    path, date = {"type": "string", "format": "path"}, {"type": "string", "format": "date"}
    parts = {
        "type": "object",
        "properties": {"a": path, "format": {"type": "integer", "format": "int64"}, "d": date},
        "additionalProperties": {"anyOf": [path, {"items": [path, date], "prefixItems": [path]}]},
        "$defs": {"format": path},
        "default": {"format": "path"},
        "enum": [{"format": "path"}],
        "not": path,
    }
    text, number = {"type": "string"}, {"type": "integer"}
    assert read(parts) == parts | {
        "properties": {"a": text, "format": number, "d": date},
        "additionalProperties": {"anyOf": [text, {"items": [text, date], "prefixItems": [text]}]},
        "$defs": {"format": text},
        "not": text,
    }


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_demands_stay(name: str) -> None:
    given = {"type": "string", "format": name}
    assert read(given) == given


@pytest.mark.parametrize("given", ['{"format": 3}', '{"properties": [3], "anyOf": {"a": 1}, "items": 7}', '{ "a":1 }'])
def test_other_schemas_keep_their_text(given: str) -> None:
    assert rewritten(given) == given


def test_schemas_with_formats_of_pydantic_compile() -> None:
    matcher, given = import_module("llguidance").LLMatcher, {"type": "string", "format": "password"}
    tool: Any = matcher.validate_grammar
    assert "Unknown format" in tool(matcher.grammar_from_json_schema(given))
    assert not tool(matcher.grammar_from_json_schema(rewritten(json.dumps(given))))


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"unevaluatedProperties": True, "unevaluatedItems": {}},
        {"dependentRequired": {}, "dependentSchemas": {"a": {}}},
        {"if": {"type": "string"}},
        {"then": {"type": "string"}, "else": False},
        {"minContains": 2, "maxContains": 3},
    ],
)
def test_keywords_that_demand_nothing_are_left_out(idle: dict[str, Any]) -> None:
    assert read({"type": "object", "items": idle, "anyOf": [idle], **idle}) == {
        "type": "object",
        "items": {},
        "anyOf": [{}],
    }
    assert read({"default": idle}) == {"default": idle}


@pytest.mark.parametrize(
    "demand",
    [
        {"uniqueItems": True, "maxItems": 2},
        {"propertyNames": {"type": "string", "maxLength": 3}},
        {"propertyNames": 1},
        {"unevaluatedProperties": False},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"if": {}, "then": False},
        {"contains": {}, "minContains": 2},
    ],
)
def test_keywords_that_demand_something_stay(demand: dict[str, Any]) -> None:
    assert read(demand) == demand
    assert read({"type": "array", "maxItems": 1, "uniqueItems": True}) == {"type": "array", "maxItems": 1}
