"""JSON texts of replies: what they say, and values that can be sent."""

from __future__ import annotations

import json
from typing import Any

from qcompile.runtime.parsers.incremental import MalformedError


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises MalformedError if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedError from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def written(value: Any) -> str:
    """A value as JSON that can be sent: half of a surrogate pair is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if has_surrogates(text) else text


def has_surrogates(text: str) -> bool:
    """Whether a text has halves of surrogate pairs, which cannot be sent as UTF-8."""
    return any("\ud800" <= char <= "\udfff" for char in text)
