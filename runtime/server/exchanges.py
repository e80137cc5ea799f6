"""Records of requests over HTTP and their responses, for the access log and for traces."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from qcompile.runtime.outputs import RequestOutput

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]
POLLED = ("/health", "/metrics")
"""Paths that are asked for every few seconds: logged at level debug alone, and not traced."""


@dataclass(eq=False)
class Exchange:
    """One request and its response.

    path: as the client gave it, without its query. route: the pattern of the path, None for unknown paths. client: the
    address of the client, if known. status: 0 if no response was begun. whole: whether the response was sent to its
    end. outputs: the prompts that were completed. Times are on the monotonic clock, in seconds, 0 for what has not
    happened.
    """

    method: str
    path: str
    client: str | None
    headers: dict[bytes, bytes]
    started: float = field(default_factory=time.monotonic)
    route: str | None = None
    status: int = 0
    first_byte: float = 0.0
    ended: float = 0.0
    whole: bool = False
    outputs: list[RequestOutput] = field(default_factory=list)

    def header(self, name: str) -> str | None:
        """A header of the request, by its name in lower case."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the completed prompts."""
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def generated_tokens(self) -> int:
        """Tokens generated for the completed prompts."""
        return sum(output.generated_tokens for output in self.outputs)


Sink = Callable[[Exchange], None]
"""Takes an exchange that has ended."""
_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def note(output: RequestOutput) -> None:
    """Add a completed prompt to the exchange that the caller serves, if one is recorded."""
    exchange = _current.get()
    if exchange is not None:
        exchange.outputs.append(output)


class ExchangeRecorder:
    """Middleware that records exchanges, and hands each to all sinks when its response has ended."""

    def __init__(self, app: Application, sinks: Sequence[Sink]) -> None:
        self._app, self._sinks = app, sinks

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        exchange = Exchange(scope["method"], scope["path"], client[0] if client else None, dict(scope["headers"]))

        async def watched(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                exchange.status, exchange.first_byte = message["status"], time.monotonic()
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                exchange.whole = True

        token = _current.set(exchange)
        try:
            await self._app(scope, receive, watched)
        finally:
            _current.reset(token)
            exchange.ended = time.monotonic()
            route = scope.get("route")
            exchange.route = route.path if route else None
            for sink in self._sinks:
                sink(exchange)
