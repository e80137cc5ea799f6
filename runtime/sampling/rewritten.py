"""JSON schemas without some keywords that llguidance refuses though they demand nothing, or mean what it knows."""

from __future__ import annotations

import functools
import json
from typing import Any

from qcompile.runtime.sampling.exclusive import one_of_as_any_of
from qcompile.runtime.sampling.schema_parts import schemas_in

_MOST_KEPT = 16
"""Most schemas that are kept: one is written three times while it is compiled, and a proof may take 0.2 seconds."""
FORMATS = {
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
"""The values of `format` that JSON Schema defines. Others, as pydantic's `path` and OpenAPI's `byte`, are notes for
readers that demand nothing; llguidance refuses them."""
_ANY: tuple[object, ...] = ({}, True)
"""Schemas that every value satisfies."""
_ANY_NAME: tuple[object, ...] = (*_ANY, {"type": "string"})
"""Schemas that every name of a property satisfies; zod writes the last one for each record."""


@functools.lru_cache(_MOST_KEPT)
def rewritten(text: str) -> str:
    """A schema, as text, that the same values satisfy."""
    schema = json.loads(text)
    dropped = sum(_drop_idle(part) for _, part in schemas_in(schema))
    if '"oneOf"' in text:
        one_of_as_any_of(schema)
        return json.dumps(schema)
    return json.dumps(schema) if dropped else text


def _drop_idle(schema: dict[str, Any]) -> bool:
    """Remove the keywords of one schema that demand nothing. Returns whether there was one."""
    idle = [name for name, demands_nothing in _IDLE.items() if name in schema and demands_nothing(schema)]
    for name in idle:
        del schema[name]
    return bool(idle)


def _at_most(schema: dict[str, Any], name: str, most: int) -> bool:
    value = schema.get(name)
    return isinstance(value, int) and value <= most


def _is_any(value: object, schemas: tuple[object, ...] = _ANY) -> bool:
    """Whether a schema is one of these. 1 is not true."""
    return isinstance(value, dict | bool) and value in schemas


_IDLE = {
    "format": lambda s: isinstance(s["format"], str) and s["format"] not in FORMATS,
    "uniqueItems": lambda s: s["uniqueItems"] is False or (s["uniqueItems"] is True and _at_most(s, "maxItems", 1)),
    "propertyNames": lambda s: _is_any(s["propertyNames"], _ANY_NAME),
    "unevaluatedProperties": lambda s: _is_any(s["unevaluatedProperties"]),
    "unevaluatedItems": lambda s: _is_any(s["unevaluatedItems"]),
    "dependentRequired": lambda s: s["dependentRequired"] == {},
    "dependentSchemas": lambda s: (
        isinstance(s["dependentSchemas"], dict) and all(_is_any(part) for part in s["dependentSchemas"].values())
    ),
    "if": lambda s: "then" not in s and "else" not in s,
    "then": lambda s: "if" not in s,
    "else": lambda s: "if" not in s,
    "minContains": lambda s: "contains" not in s,
    "maxContains": lambda s: "contains" not in s,
}
"""When a keyword demands nothing, by its name."""
