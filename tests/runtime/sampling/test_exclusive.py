"""Which `oneOf` of JSON schemas becomes `anyOf`: only one of which no value satisfies two schemas."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest

from qcompile.errors import UsageError
from qcompile.runtime.sampling.exclusive import one_of_as_any_of, overlap
from qcompile.runtime.sampling.grammars import Grammars
from qcompile.runtime.sampling.rewritten import rewritten
from qcompile.runtime.sampling.structured import StructuredOutputsParams
from tests.support.fake import EOS, VOCAB, byte_tokenizer

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
KINDS = {"$defs": {"A": {"$ref": "#/$defs/a~1b"}, "a/b": {"const": "a"}, "c d": {"const": "b"}}}


def record(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


EXCLUSIVE: dict[str, Any] = {
    "types": {"oneOf": [TEXT, WHOLE, {"type": ["null", "boolean"]}, {"type": "array"}]},
    "a type and values": {"oneOf": [{"const": "a"}, {"enum": [1, None]}, {"type": "boolean"}]},
    "values": {"oneOf": [{"const": 1, "title": "one"}, {"const": 2}, {"enum": [True, "1"]}]},
    "a broken number": {"oneOf": [{"const": 1.5}, WHOLE]},
    "ranges": {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3.5}]},
    "a range and a value": {"oneOf": [{"type": "number", "minimum": 4}, {"const": 3}]},
    "a property": {"oneOf": [record(k={"const": "a"}, x=WHOLE), record(k={"const": "b"}), record(k=WHOLE)]},
    "a deeper property": {"oneOf": [record(k=record(k={"const": 1})), record(k=record(k={"const": 2}))]},
    "a forbidden property": {"oneOf": [record(a=WHOLE), record(b=WHOLE) | {"additionalProperties": False}]},
    "references": KINDS | {"oneOf": [record(k={"$ref": "#/$defs/A"}), record(k={"$ref": "#/$defs/c%20d"})]},
    "what is around": record(k=TEXT)
    | {"oneOf": [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}]},
    "a part of all": {"oneOf": [{"allOf": [TEXT, {"maxLength": 3}]}, {"allOf": [WHOLE]}]},
    "options": {"oneOf": [{"anyOf": [TEXT, {"type": "null"}]}, {"oneOf": [{"const": 1}, {"const": 2}]}]},
    "one": {"oneOf": [{}]},
    "in a part": {"type": "array", "items": {"oneOf": [TEXT, WHOLE]}},
}
OVERLAPPING: dict[str, Any] = {
    "the same": {"oneOf": [TEXT, TEXT]},
    "whole numbers are numbers": {"oneOf": [WHOLE, {"type": "number"}]},
    "1.0 is whole": {"oneOf": [WHOLE, {"const": 1.0}]},
    "1.0 is 1": {"oneOf": [{"const": 1}, {"const": 1.0}]},
    "ranges that touch": {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}]},
    "ranges of what may be a text": {"oneOf": [{"maximum": 3}, {"minimum": 4}]},
    "a property that may be left out": {
        "oneOf": [record(k={"const": "a"}), {"type": "object", "properties": {"k": {"const": "b"}}}]
    },
    "what may be no object": {"oneOf": [{"required": ["k"], "properties": {"k": {"const": v}}} for v in ("a", "b")]},
    "other properties": {"oneOf": [record(a=WHOLE), record(b=WHOLE)]},
    "a pattern permits it": {
        "oneOf": [record(a=WHOLE), record(b=WHOLE) | {"additionalProperties": False, "patternProperties": {"a": {}}}]
    },
    "a reference to itself": {"oneOf": [record(k={"$ref": "#"}), record(k={"$ref": "#"})]},
    "a reference relative to another schema": {
        "$defs": {"A": {"const": "a"}, "B": {"const": "b"}, "C": {"$id": "c", "$defs": {"A": {}}}},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    },
    "beside anyOf": {"anyOf": [TEXT, WHOLE], "oneOf": [TEXT, WHOLE]},
    "some options": {"oneOf": [{"anyOf": [TEXT, WHOLE]}, {"const": 2}]},
}


def compiled(schema: str) -> Any:
    return Grammars(byte_tokenizer(), VOCAB, [EOS]).compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_schemas_that_exclude_each_other(name: str) -> None:
    text = rewritten(json.dumps(EXCLUSIVE[name]))
    assert text == json.dumps(EXCLUSIVE[name]).replace('"oneOf"', '"anyOf"')
    assert compiled(text)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_schemas_that_may_hold_together(name: str) -> None:
    assert rewritten(json.dumps(OVERLAPPING[name])) == json.dumps(OVERLAPPING[name])
    assert one_of_as_any_of(OVERLAPPING[name]) == ["#/oneOf"]


def holds(schema: Any, value: Any) -> bool:
    """Whether a value satisfies a schema with the keywords below."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    kind = kinds.get(type(value), "number")
    whole = kind == "number" and float(value).is_integer()
    given = schema.get("type", [kind])
    given = [given] if isinstance(given, str) else given
    allowed = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    properties = schema.get("properties", {})
    return (
        (kind in given or (whole and "integer" in given))
        and any(each == value and isinstance(each, bool) == isinstance(value, bool) for each in allowed)
        and (kind != "number" or schema.get("minimum", value) <= value <= schema.get("maximum", value))
        and (kind != "object" or set(schema.get("required", ())) <= set(value))
        and (kind != "object" or all(holds(part, value[n]) for n, part in properties.items() if n in value))
        and (kind != "object" or schema.get("additionalProperties", True) or set(value) <= set(properties))
        and all(holds(part, value) for part in schema.get("allOf", ()))
        and ("anyOf" not in schema or any(holds(part, value) for part in schema["anyOf"]))
    )


ATOMS = [None, True, False, 0, 1, 1.0, 1.5, 2, "a", "b"]
VALUES = [
    *ATOMS,
    *(dict(zip("kx", each, strict=False)) for n in (0, 1, 2) for each in itertools.product(ATOMS, repeat=n)),
]


def drawn(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema."""
    schema: dict[str, Any] = {}
    if draw.random() < 0.6:
        kinds = ["null", "boolean", "integer", "number", "string", "object"]
        schema["type"] = draw.choice([draw.choice(kinds), draw.sample(kinds, 2), "object"])
    if draw.random() < 0.3:
        schema |= draw.choice([{"const": draw.choice(ATOMS)}, {"enum": draw.sample(ATOMS, 3)}])
    if draw.random() < 0.3:
        schema[draw.choice(["minimum", "maximum"])] = draw.choice([0, 1, 1.5])
    if depth < 2 and draw.random() < 0.6:
        schema["properties"] = {name: drawn(draw, depth + 1) for name in draw.sample("kx", draw.randrange(1, 3))}
        schema["required"] = draw.sample("kx", draw.randrange(3))
        schema["additionalProperties"] = draw.random() < 0.5
    if depth < 2 and draw.random() < 0.3:
        schema[draw.choice(["allOf", "anyOf"])] = [drawn(draw, depth + 1) for _ in range(2)]
    return schema


def test_no_value_satisfies_two_schemas_that_are_taken_as_exclusive() -> None:
    draw, count = random.Random(7), 0
    for _ in range(1500):
        around, branches = drawn(draw) if draw.random() < 0.3 else {}, [drawn(draw), drawn(draw)]
        around.pop("anyOf", None)
        if one_of_as_any_of(around | {"oneOf": branches}):
            continue
        count += 1
        assert not [v for v in VALUES if holds(around, v) and all(holds(each, v) for each in branches)], branches
    assert count > 300


def test_what_cannot_be_shown_is_refused_with_its_place() -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": [WHOLE, {"type": "number"}]}}}
    with pytest.raises(UsageError, match=r"one schema of the oneOf at #/properties/a/oneOf can hold: use anyOf"):
        compiled(json.dumps(schema))
    assert "the oneOf at #/oneOf can" in overlap([json.dumps({"oneOf": [{}, {}]})])


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"allOf": [{"$ref": "#"}] * 50}] * 50},
        {"oneOf": [{"enum": list(range(n, n + 900))} for n in range(0, 9000, 1000)] * 3},
        {"oneOf": [record(k={"const": n}) for n in range(1500)]},
        {"oneOf": [{"anyOf": [record(k={"$ref": "#"})] * 20}] * 20},
    ],
)
def test_a_proof_ends_soon(schema: dict[str, Any]) -> None:
    begun = time.monotonic()
    one_of_as_any_of(schema)
    assert time.monotonic() - begun < 1  # a request waits for it; it takes a fifth of that
