"""A request and its response as they go between processes, and the response that an application makes of a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Asked:
    """A request over HTTP. path, query: as they were sent, percent-encoded. client: its address, if it is known."""

    method: str
    path: bytes
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    client: tuple[str, int] | None = None

    def scope(self) -> dict[str, Any]:
        """The request as ASGI describes it."""
        from urllib.parse import unquote

        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": unquote(self.path.decode("latin-1")),
            "raw_path": self.path,
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


@dataclass(frozen=True)
class Head:
    """The beginning of a response: its status and its headers."""

    status: int
    headers: Headers

    @property
    def streams(self) -> bool:
        """Whether the response is a stream of events."""
        return dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")


@dataclass(frozen=True)
class Wanted:
    """Which replica a request wants. blocks: its prompt's beginnings (`affinity.blocks_of`). replica: the name of the
    one that keeps an earlier response; empty if the request names none."""

    blocks: Sequence[int] = ()
    replica: str = ""


async def respond(app: Callable[..., Any], asked: Asked) -> AsyncIterator[Head | bytes]:
    """The response of an ASGI application: its head, then pieces of its body, each of them whole events of a stream.

    The request is cancelled if the iteration ends early.
    """
    sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    unread = [asked.body]

    async def receive() -> dict[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client leaves: the task is cancelled
        raise AssertionError

    async def run() -> None:
        try:
            await app(asked.scope(), receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield Head(message["status"], tuple(message.get("headers", ())))
            elif body := _joined(message, sent):
                yield body
        await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _joined(message: dict[str, Any], sent: asyncio.Queue[dict[str, Any] | None]) -> bytes:
    """The body of a message and of those that have followed it: a reader that is slow gets fewer, larger pieces."""
    pieces = [message.get("body", b"")]
    while not sent.empty():
        following = sent.get_nowait()
        if following is None:
            sent.put_nowait(None)
            break
        pieces.append(following.get("body", b""))
    return b"".join(pieces)
