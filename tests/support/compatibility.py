"""Requests that ask for one field of an API at a time, through the API's own client, and the table of what happens.

The fields are those of the client's types: a client with new fields has none of these requests for them, which a test
notices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import anthropic
import openai

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

    call: sends a request by the client.
    """

    path: str
    params: Any
    base: Mapping[str, Any]
    call: Callable[[Any, dict[str, Any]], Any]
    probes: Mapping[str, Sequence[Probe]]

    @property
    def fields(self) -> list[str]:
        """The names of all fields that the client knows."""
        return sorted(get_type_hints(self.params))

    def request(self, name: str, probe: Probe) -> dict[str, Any]:
        """The request that asks for a value of a field."""
        return {**self.base, **probe.along, name: probe.value}

    def asked(self, client: Any, request: dict[str, Any]) -> Any:
        """The reply, a list of its pieces if it is streamed, or the line of a refusal as RefusedRequest."""
        try:
            reply = self.call(client, request)
            return list(reply) if request.get("stream") else reply
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            body: Any = error.body
            return RefusedRequest(error.status_code, (body.get("error") or body)["message"])


@dataclass(frozen=True)
class RefusedRequest:
    """The status and the message of a refusal."""

    status: int
    message: str


def row(name: str, probe: Probe, reply: Any) -> str:
    """A line of a table."""
    if isinstance(reply, RefusedRequest):
        result = f"{REFUSED} ({reply.status}): {reply.message}"
    else:
        result = WORKS if probe.shows else ACCEPTED
    shown = json.dumps(probe.value, ensure_ascii=False)
    shown = f"{shown[:57]}..." if len(shown) > 60 else shown
    along = f" with {', '.join(f'`{each}`' for each in probe.along)}" if probe.along else ""
    cells = (f"`{name}`", f"`{shown}`{along}", result)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
