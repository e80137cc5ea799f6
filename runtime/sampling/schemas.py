"""JSON schemas of structured outputs as text, within the limits of what is compiled soon."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

MOST_DEPTH = 128
"""Most levels of a schema's brackets in each other, as in llguidance, which has such limits for all grammars."""
MOST_PROPERTIES = 3000
"""Most properties of a schema. The time to compile an object grows with the square of its number of properties: this
number takes a second."""
MOST_MULTIPLE = 100_000
"""Largest common multiple of all `multipleOf`, in units of their smallest decimal place: llguidance has a state for
each remainder."""
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(r"[\[\](){}]")


def schema_text(text: str) -> str:
    """The text of a JSON schema, checked. Raises ValueError with the rest of a sentence about the schema."""
    try:
        if _depth(text) > MOST_DEPTH:
            raise RecursionError
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"is nested deeper than {MOST_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if schema is False:
        raise ValueError("is false: no output can satisfy it")
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema: an object")
    _check_size(schema)
    return text


def _check_size(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a schema that would take seconds to compile, in which nothing can stop llguidance."""
    count = sum(len(each) for each in _values(schema, "properties") if isinstance(each, Mapping))
    if count > MOST_PROPERTIES:
        raise ValueError(f"has {count:,} properties, of at most {MOST_PROPERTIES:,}: ask for parts of it one by one")
    if _common_multiple(_values(schema, "multipleOf")) > MOST_MULTIPLE:
        raise ValueError(f"has values of multipleOf with too large a common multiple: the limit is {MOST_MULTIPLE:,}")


def _common_multiple(given: Iterable[Any]) -> int:
    """The least common multiple of numbers, in units of the smallest decimal place that one of them has."""
    finite = (each for each in given if isinstance(each, int | float) and math.isfinite(each) and each > 0)
    numbers = [Decimal(str(each)).normalize() for each in finite]
    places = max([0, *(-int(number.as_tuple().exponent) for number in numbers)])
    return math.lcm(*(int(number.scaleb(places)) for number in numbers))


def _values(schema: Any, name: str) -> Iterator[Any]:
    """All that a schema has by this name, on any level."""
    if isinstance(schema, Mapping):
        if name in schema:
            yield schema[name]
        for each in schema.values():
            yield from _values(each, name)
    elif isinstance(schema, list):
        for each in schema:
            yield from _values(each, name)


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which only Python takes for JSON."""
    raise ValueError(f"it has {name}")


def _depth(text: str) -> int:
    """Most brackets that are open at once in JSON, outside of its texts."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest
