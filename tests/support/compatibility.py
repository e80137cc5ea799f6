"""Requests that ask for one field of an API at a time, through the API's own client, and the table of what happens.

The fields are those of the client's types, or of a library's functions and classes: one with new fields has none of
these requests for them, which a test notices.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import anthropic
import openai

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
WORKS, ACCEPTED, REFUSED = "works", "accepted, without effect", "refused"
Shows = Callable[[Any, Any], bool]
"""Whether a reply shows what was asked for; the second argument is the reply to the request without the field."""


@dataclass(frozen=True)
class Probe:
    """A value of a field. along: fields that it needs; says: what the model replies, None for what it computes.

    shows: None if the value must not change anything.
    """

    value: Any
    shows: Shows | None = None
    along: Mapping[str, Any] = field(default_factory=dict)
    says: str | None = None


@dataclass(frozen=True)
class Api:
    """An endpoint. params: the client's type of its requests; base: a whole request that always has the same reply.

    call: sends a request by the client; a refusal may be a RefusedRequest or an exception of the two clients.
    own: fields with which the library does something itself, and which it does not send.
    """

    path: str
    params: Any
    base: Mapping[str, Any]
    call: Callable[[Any, dict[str, Any]], Any]
    probes: Mapping[str, Sequence[Probe]]
    own: frozenset[str] = frozenset()

    @property
    def fields(self) -> list[str]:
        """The names of all fields that the client knows and sends."""
        return sorted(self._known - self.own)

    @property
    def used(self) -> list[str]:
        """The names of all fields that it knows and uses itself."""
        return sorted(self._known & self.own)

    @property
    def _known(self) -> set[str]:
        if inspect.isroutine(self.params):
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            given = inspect.signature(self.params).parameters.values()
            return {each.name for each in given if each.kind not in kinds and each.name != "self"}
        return set(getattr(self.params, "model_fields", None) or get_type_hints(self.params))

    def request(self, name: str, probe: Probe) -> dict[str, Any]:
        """The request that asks for a value of a field."""
        return {**self.base, **probe.along, name: probe.value}

    def asked(self, client: Any, request: dict[str, Any]) -> Any:
        """The reply, a list of its pieces if it is streamed, or the line of a refusal as RefusedRequest."""
        try:
            reply = self.call(client, request)
            return list(reply) if request.get("stream") and not isinstance(reply, RefusedRequest) else reply
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            body: Any = error.body
            return RefusedRequest(error.status_code, (body.get("error") or body)["message"])


@dataclass(frozen=True)
class RefusedRequest:
    """The status and the message of a refusal; no status if the library itself refuses."""

    status: int | None
    message: str


def row(name: str, probe: Probe, reply: Any) -> str:
    """A line of a table."""
    if isinstance(reply, RefusedRequest):
        result = f"{REFUSED} ({reply.status or 'by the library'}): {reply.message}"
    else:
        result = WORKS if probe.shows else ACCEPTED
    shown = json.dumps(probe.value, ensure_ascii=False)
    shown = f"{shown[:57]}..." if len(shown) > 60 else shown
    along = f" with {', '.join(f'`{each}`' for each in probe.along)}" if probe.along else ""
    cells = (f"`{name}`", f"`{shown}`{along}", result)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def assert_page(path: str, rows: list[str], update: bool) -> None:
    """Compare the table of an endpoint with the page, or write it there."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"## {path}\n")
    head = text.index("|---|---|---|\n", start) + len("|---|---|---|\n")
    result = re.match(r"(\|.*\n)*", text[head:])
    assert result
    if update:
        written = "".join(f"{line}\n" for line in rows)
        PAGE.write_text(text[:head] + written + text[head + result.end() :], encoding="utf-8")
        return
    assert result[0].splitlines() == rows, "docs/compatibility.md: run pytest --update-golden and read what it wrote"
