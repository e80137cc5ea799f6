"""Middleware of the server: how large a request's body may be, and the count of responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException

from qcompile.errors import ResourceError
from qcompile.runtime.server.errors import refused

MOST_BYTES, MOST_BYTES_A_TOKEN = 2 << 20, 16
"""Largest request body: bytes, or bytes per token of the context if that is more. While a body is parsed, all other
responses wait."""
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


def most_bytes(context: int) -> int:
    """The largest body of a request to a model of this context, in bytes."""
    return max(MOST_BYTES, MOST_BYTES_A_TOKEN * context)


class Bounded:
    """Middleware that tells `responded` the path's pattern and the status of each response, and refuses bodies of more
    than `most` bytes before they are held in memory."""

    def __init__(self, app: Callable[..., Awaitable[None]], responded: Callable[[str, int], None], most: int) -> None:
        self._app, self._responded, self._most = app, responded, most

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")[:18]
        length = int(announced) if announced.isdigit() else 0
        read, started = 0, False

        async def bounded() -> dict[str, Any]:
            nonlocal read
            if length <= self._most:  # a larger announced body is refused unread
                message = await receive()
                read += len(message.get("body", b""))
            if max(length, read) > self._most:
                raise HTTPException(413, f"the request is larger than {self._most:,} bytes")
            return message

        async def counted(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                route = scope.get("route")
                path = route.path if route else "other"  # arbitrary paths must not become labels
                self._responded(path, message["status"])
            await send(message)

        try:
            await self._app(scope, bounded, counted)
        except asyncio.CancelledError:  # shutdown, while the client still sends or reads
            if not started:
                refusal = await refused(Request(scope), ResourceError("the server is closing"))
                await refusal(scope, receive, counted)
