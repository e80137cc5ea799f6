"""The tools of a request, as far as parsers must know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qcompile.errors import UsageError, shown

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class DeclaredTools:
    """The JSON schema of the parameters of each tool, by the tool's name."""

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> DeclaredTools:
        """Tools in OpenAI's form: `{"type": "function", "function": {"name": ..., "parameters": schema}}`.

        Raises UsageError for anything else, and for two tools of one name.
        """
        parameters: dict[str, Mapping[str, Any]] = {}
        for place, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            schema = (function.get("parameters") or {}) if isinstance(function, Mapping) else {}
            if not isinstance(name, str) or not isinstance(schema, Mapping):
                form = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
                raise UsageError(f"tools.{place} must be {form}, not {shown(tool)}")
            if name in parameters:
                raise UsageError(f"tools: {shown(name)} occurs twice")
            parameters[name] = schema
        return cls(parameters)

    def only(self, name: str) -> DeclaredTools:
        """The tool of this name alone; none if there is none."""
        return DeclaredTools({each: schema for each, schema in self.parameters.items() if each == name})

    def knows(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self.parameters

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter of a tool may have; empty if its schema does not tell."""
        properties = self.parameters.get(name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _types(schema)


def _types(schema: object, depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > 4:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str | list):
        return frozenset([given] if isinstance(given, str) else [each for each in given if isinstance(each, str)])
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            each = [_types(option, depth + 1) for option in options]
            return frozenset().union(*each) if all(each) else frozenset()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(_TYPES.get(type(value), "null") for value in values)
