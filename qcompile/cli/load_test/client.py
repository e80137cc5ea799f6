"""Sends one request and notes when which bytes came. They are read after the level, to delay no other request."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from qcompile.cli.load_test.workload import Query

_GREEDY = {"temperature": 0, "stream": True}


@dataclass(frozen=True)
class Endpoint:
    """Where requests go: the server's root, the model's name, and the API key if one is needed.

    chat: whether to use /v1/chat/completions. extras: fields beyond the common ones that this server accepts.
    """

    root: str
    model: str
    key: str | None = None
    chat: bool = False
    extras: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where requests are posted."""
        return f"{self.root}/v1/{'chat/' if self.chat else ''}completions"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Content-Type": "application/json"} | authorization(self.key)

    def body(self, query: Query) -> bytes:
        """The request for a query, as it is sent."""
        asked: dict[str, Any] = {"model": self.model, "max_tokens": query.output_tokens} | _GREEDY
        if self.chat:
            asked["messages"] = query.messages
        else:
            asked["prompt"] = query.prompt
        for name in self.extras:
            asked |= EXTRAS[name]
        return json.dumps(asked).encode()


EXTRAS: dict[str, dict[str, Any]] = {
    "counts": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "usage": {"stream_options": {"include_usage": True}},
    "ignore_eos": {"ignore_eos": True},
}
"""Fields that not every server knows: token counts in each piece, or in the last one, and outputs of full length."""


def reason(error: Exception) -> str:
    """Why a server could not be reached, in a few words."""
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if isinstance(number, int) and number > 0 else str(error) or type(error).__name__


def authorization(key: str | None) -> dict[str, str]:
    """The header with an API key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@dataclass
class Recording:
    """A request and what came back. Times are in seconds on one monotonic clock.

    due: when it should have been sent. pieces: time and bytes of each part of the body. failure: why there is no
    complete response, if there is none.
    """

    query: Query
    due: float
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None


async def send(session: aiohttp.ClientSession, endpoint: Endpoint, query: Query, due: float | None = None) -> Recording:
    """Send a query now, and wait for the end of the response. Errors are noted in the result."""
    body = endpoint.body(query)
    recording = Recording(query, time.perf_counter() if due is None else due)
    recording.sent = time.perf_counter()
    try:
        posted = session.post(endpoint.url, data=body, headers=endpoint.headers, allow_redirects=False)
        async with posted as response:
            recording.status = response.status
            async for piece in response.content.iter_any():
                recording.pieces.append((time.perf_counter(), piece))
    except TimeoutError:
        recording.failure = "no complete answer within --timeout"
    except (aiohttp.ClientError, OSError) as error:
        recording.failure = reason(error)
    recording.ended = time.perf_counter()
    return recording


def session(timeout: float) -> aiohttp.ClientSession:
    """Connections without a limit of their number; `timeout` in seconds is for a whole response."""
    limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 30))
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits)
