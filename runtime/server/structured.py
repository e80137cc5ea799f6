"""Structured outputs in requests: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from qcompile.errors import UsageError, shown
from qcompile.runtime.sampling.structured import FORCED, StructuredOutputsParams, named_as, structured

_WITHOUT_EFFECT = ("whitespace_pattern", "structural_tag", "disable_fallback", "disable_additional_properties")
"""More fields of vLLM's `structured_outputs`: some clients send them with values that ask for nothing."""


class StructureFields(BaseModel):
    """The fields of a request that ask for structured outputs. At most one may be given."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def asked_structure(fields: StructureFields) -> StructuredOutputsParams | None:
    """What the fields ask for; None for any text. Raises UsageError."""
    given = {name: value for name in StructureFields.model_fields if (value := getattr(fields, name)) is not None}
    if given.get("response_format") == {"type": "text"}:
        del given["response_format"]
    if len(given) > 1:
        raise UsageError(f"not both {' and '.join([*given][:2])}: give one of them")
    with named_as(structure_field(fields)):
        for name, value in given.items():
            if name == "response_format":
                return _of_format(value)
            if name == "structured_outputs":
                return structured({n: v for n, v in value.items() if v is not None and (v or n not in _WITHOUT_EFFECT)})
            return structured({name.removeprefix("guided_"): value})
    return None


def structure_field(fields: StructureFields) -> str | None:
    """The field that the language of a request comes from, as errors name it; None for `structured_outputs`."""
    if fields.structured_outputs is not None:
        return None
    if fields.response_format is not None:
        return "response_format.json_schema"
    guided = (name for name in StructureFields.model_fields if name.startswith("guided_"))
    return next((name for name in guided if getattr(fields, name) is not None), FORCED)


def _of_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What a `response_format` asks for. Some clients have the schema beside the type `json_object`."""
    kind = given.get("type")
    if kind not in _FORMATS:
        raise UsageError(f"response_format.type must be text, json_object or json_schema, not {shown(kind)}")
    _require_known("response_format", given, _FORMATS[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")
        return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)
    described = given.get("json_schema")
    if not isinstance(described, Mapping) or described.get("schema") is None:
        raise UsageError("response_format.json_schema must be an object with a schema")
    _require_known("response_format.json_schema", described, _DESCRIPTION)
    return StructuredOutputsParams(json=described["schema"])


_FORMATS = {"text": ("type",), "json_object": ("type", "schema"), "json_schema": ("type", "json_schema")}
"""The fields of each type of `response_format`."""
_DESCRIPTION = ("name", "schema", "strict", "description")


def _require_known(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise UsageError for a field that `given` has and that is none of `known`; null asks for nothing."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise UsageError(f"{where} has no field {shown(name)}: it has {', '.join(known)}")
