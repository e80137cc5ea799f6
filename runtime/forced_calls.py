"""Schemas of replies that must call tools: a list of calls, in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qcompile.errors import UsageError, shown

_NONE = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function that declares none."""
_VALUES = ("const", "enum", "default", "examples")
"""Keywords of schemas with values, which are no schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with schemas by name."""


def named_function(choice: Any) -> str | None:
    """The function that `tool_choice` names; None for "required". Raises UsageError for anything else."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        one = '{"type": "function", "function": {"name": ...}}'
        raise UsageError(f"tool_choice must be 'auto', 'none', 'required' or {one}, not {shown(choice)}")
    return name


def calls_schema(tools: Sequence[Mapping[str, Any]], name: str | None, several: bool) -> dict[str, Any]:
    """The schema of a list of calls of `tools`, or of one call of the tool `name`. several: whether it may be longer.

    Raises UsageError if no tool has the name, or the parameters of one are no object.
    """
    calls, parameters = [], {}
    for number, (called, schema) in enumerate(schemas_by_name(tools, name)):
        place = f"tool{number}"
        parameters[place] = _moved(schema, f"#/$defs/{place}")
        properties = {"name": {"const": called}, "parameters": {"$ref": f"#/$defs/{place}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    length = {"minItems": 1} if several and name is None else {"minItems": 1, "maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, **length, "$defs": parameters}


def schemas_by_name(tools: Sequence[Mapping[str, Any]], name: str | None) -> list[tuple[str, Mapping[str, Any]]]:
    """The tools, or that of the name, each with the schema of its parameters. Raises UsageError as `calls_schema`."""
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not functions:
        raise UsageError(f"tool_choice: there is no tool {shown(name)}")
    return [(function["name"], _of_object(function)) for function in functions]


def _of_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's parameters, which are an object: a call has them by name. Raises UsageError."""
    schema: Mapping[str, Any] = function.get("parameters") or _NONE
    given = schema.get("type", "object")
    if given != "object" and not (isinstance(given, list) and "object" in given):
        what = f"the parameters of {shown(function['name'])} must be of type 'object', not {shown(given)}"
        raise UsageError(f"tools: {what}")
    return {**schema, "type": "object"}


def _moved(schema: Any, place: str, by_name: bool = False) -> Any:
    """A schema that becomes a part of another one, at `place`: its references to itself are changed.

    by_name: whether `schema` maps names that the user chose to schemas, so that no name in it is a keyword.
    """
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {
        name: value if name in _VALUES and not by_name else _moved(value, place, name in _NAMED and not by_name)
        for name, value in schema.items()
    }
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
