"""`oneOf` of JSON schemas of which no value satisfies two: there it means `anyOf`, which grammars have.

A schema is taken as the list of all schemas that must hold with it: its own keywords, those of references, of `allOf`,
and of the schema around the `oneOf`. Two of them exclude each other if types, allowed values or ranges of numbers have
nothing in common, or if both are objects that need a property of which that holds, or that one of them forbids.
What this does not show is left to llguidance, which knows some of these cases, and refuses others.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from qcompile.runtime.sampling.schema_parts import schemas_in

_MOST_DEPTH = 8
"""Levels of properties and references that a proof follows: schemas may refer to themselves."""
_MOST_STEPS = 50_000
"""Pairs of schemas that are compared: a fifth of a second."""
_VALUES_A_STEP = 16
"""Pairs of values that take the time of a step."""
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_Parts = list[Mapping[str, Any]]


def overlap(texts: Iterable[str]) -> str:
    """Why schemas, as text, cannot be compiled of which a `oneOf` is left: the rest of a sentence."""
    places = [place for text in texts for place in one_of_as_any_of(json.loads(text))]
    where = f" at {places[0]}" if places else ""
    return f"nothing shows that at most one schema of the oneOf{where} can hold: use anyOf, or tell them apart by const"


def one_of_as_any_of(schema: dict[str, Any]) -> list[str]:
    """Rename each `oneOf` of which at most one schema can hold. Returns the places of the others.

    A `oneOf` beside an `anyOf` is left.
    """
    proof, left = Exclusion(schema), list[str]()
    places = [(place, part) for place, part in schemas_in(schema) if isinstance(part.get("oneOf"), list)]
    proved = [("anyOf" not in part and proof.exclusive(part), place, part) for place, part in places]
    for holds, place, part in proved:
        if holds:
            renamed = {"anyOf" if name == "oneOf" else name: value for name, value in part.items()}
            part.clear()
            part.update(renamed)
        else:
            left.append(f"{place}/oneOf")
    return left


class Exclusion:
    """Compares schemas that may refer to parts of `root`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._steps = root, 0
        self._based = any("$id" in part for place, part in schemas_in(root) if place != "#")
        """Whether references may be relative to another schema than the root."""

    def exclusive(self, schema: Mapping[str, Any]) -> bool:
        """Whether no value satisfies two schemas of a `oneOf`."""
        around = {name: value for name, value in schema.items() if name != "oneOf"}
        branches = [[branch, around] for branch in schema["oneOf"]]
        return all(self._apart(one, other, 0) for one, other in itertools.combinations(branches, 2))

    def _apart(self, one: Sequence[Any], other: Sequence[Any], depth: int) -> bool:
        """Whether nothing satisfies all schemas of both lists."""
        self._steps += 1
        if depth > _MOST_DEPTH or self._steps > _MOST_STEPS:
            return False
        first, second = (list(self._together(each, 0)) for each in (one, other))
        kinds = _types(first), _types(second)
        if not kinds[0] & kinds[1] or self._values_apart(first, second) or _ranges_apart(first, second, kinds):
            return True
        if self._options_apart(first, other, depth) or self._options_apart(second, one, depth):
            return True
        return kinds[0] == kinds[1] == {"object"} and self._objects_apart(first, second, depth)

    def _together(self, schemas: Sequence[Any], depth: int) -> Iterator[Mapping[str, Any]]:
        """These schemas, and those that hold with them."""
        for schema in schemas:
            self._steps += 1
            if not isinstance(schema, Mapping) or depth > _MOST_DEPTH or self._steps > _MOST_STEPS:
                continue
            yield schema
            more = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
            yield from self._together([*more, self._referred(schema.get("$ref"))], depth + 1)

    def _referred(self, reference: Any) -> Any:
        """The part of the root that a reference names; None for others."""
        if not isinstance(reference, str) or not (reference + "/").startswith("#/") or self._based:
            return None
        part: Any = self._root
        for name in unquote(reference).split("/")[1:]:
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
        return part

    def _values_apart(self, one: _Parts, other: _Parts) -> bool:
        """Whether two lists of allowed values have none in common."""
        lists = [[values for part in parts if (values := _values(part)) is not None] for parts in (one, other)]
        for first, second in itertools.product(*lists):
            self._steps += len(first) * len(second) // _VALUES_A_STEP
            if self._steps <= _MOST_STEPS and not any(_same(a, b) for a in first for b in second):
                return True
        return False

    def _options_apart(self, one: _Parts, other: Sequence[Any], depth: int) -> bool:
        """Whether all options of an `anyOf` or `oneOf` among the schemas `one` exclude those of `other`."""
        options = [part[name] for part in one for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)]
        return any(all(self._apart([option], other, depth + 1) for option in each) for each in options)

    def _objects_apart(self, one: _Parts, other: _Parts, depth: int) -> bool:
        """Whether a property that objects must have excludes them."""
        needed = _required(one), _required(other)
        if any(_forbidden(name, other) for name in needed[0]) or any(_forbidden(name, one) for name in needed[1]):
            return True
        shared = sorted(needed[0] & needed[1])
        return any(self._apart(_property(name, one), _property(name, other), depth + 1) for name in shared)


def _types(parts: _Parts) -> frozenset[str]:
    """The types of values that satisfy all of these; `number` is that of numbers that are not whole."""
    kinds = _TYPES
    for part in parts:
        given = part.get("type")
        if isinstance(given, str | list):
            named = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
            kinds &= named | ({"integer"} if "number" in named else set())
        if (values := _values(part)) is not None:
            kinds &= {_type(value) for value in values}
    return frozenset(kinds)


def _type(value: Any) -> str:
    """The narrowest JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return (
        "string"
        if isinstance(value, str)
        else "array"
        if isinstance(value, list)
        else "null"
        if value is None
        else "object"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(part: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema allows; None for any."""
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1. Values in others are taken as Python does, in which
    more are equal."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _ranges_apart(one: _Parts, other: _Parts, kinds: tuple[frozenset[str], ...]) -> bool:
    """Whether both are numbers of which those of one are all smaller."""
    if not all(each <= {"integer", "number"} for each in kinds):
        return False
    (low, high), (low2, high2) = _range(one), _range(other)
    return high < low2 or high2 < low


def _range(parts: _Parts) -> tuple[float, float]:
    """The least and the largest number that these allow, or bounds of it."""
    lows, highs = [-math.inf], [math.inf]
    for part in parts:
        lows += [part[name] for name in ("minimum", "exclusiveMinimum") if _is_number(part.get(name))]
        highs += [part[name] for name in ("maximum", "exclusiveMaximum") if _is_number(part.get(name))]
        if (values := _values(part)) and all(map(_is_number, values)):
            lows.append(min(values))
            highs.append(max(values))
    return max(lows), min(highs)


def _required(parts: _Parts) -> set[str]:
    listed = [part["required"] for part in parts if isinstance(part.get("required"), list)]
    return {name for names in listed for name in names if isinstance(name, str)}


def _property(name: str, parts: _Parts) -> list[Any]:
    """The schemas of a property."""
    return [named[name] for part in parts if isinstance(named := part.get("properties"), Mapping) and name in named]


def _forbidden(name: str, parts: _Parts) -> bool:
    """Whether one of these allows only properties among which this one is not."""
    return any(
        part.get("additionalProperties") is False
        and not part.get("patternProperties")
        and name not in (part.get("properties") or {})
        for part in parts
    )
