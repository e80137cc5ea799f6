"""Schemas of replies that must call tools: a list of calls, in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qcompile.errors import UsageError, shown

_NONE = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function that declares none."""


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

    Raises UsageError if no tool has the name.
    """
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not functions:
        raise UsageError(f"tool_choice: there is no tool {shown(name)}")
    calls, parameters = [], {}
    for number, function in enumerate(functions):
        place = f"tool{number}"
        parameters[place] = _moved(function.get("parameters") or _NONE, f"#/$defs/{place}")
        properties = {"name": {"const": function["name"]}, "parameters": {"$ref": f"#/$defs/{place}"}}
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


def _moved(schema: Any, place: str) -> Any:
    """A schema whose root is at `place` of another one: its references to itself are changed."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
