"""The schemas that a JSON schema consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_PARTS = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "propertyNames"),
    *("unevaluatedProperties", "not", "if", "then", "else"),
)
_LISTS = "items", "prefixItems", "anyOf", "allOf", "oneOf"
_NAMED = "properties", "patternProperties", "$defs", "definitions", "dependentSchemas"
"""Keywords with a schema, a list of schemas, and schemas by name."""


def schemas_in(schema: Any, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and those in it, outer ones first, each with its place as a JSON pointer.

    A property, or a value that is allowed, may have the name of a keyword, too: these are none.
    """
    if not isinstance(schema, dict):
        return
    yield place, schema
    parts = [(name, schema[name]) for name in _PARTS if name in schema]
    for name in _LISTS:
        if isinstance(listed := schema.get(name), list):
            parts += [(f"{name}/{number}", part) for number, part in enumerate(listed)]
    for name in _NAMED:
        if isinstance(named := schema.get(name), dict):
            parts += [(f"{name}/{each}", part) for each, part in named.items()]
    for name, part in parts:
        yield from schemas_in(part, f"{place}/{name}")
