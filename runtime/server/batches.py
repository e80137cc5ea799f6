"""Answers requests in OpenAI's batch format by the server's application, in this process and without a network."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from qcompile.errors import UsageError, shown
from qcompile.runtime.server.api import failure

Json = dict[str, Any]
Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application: called with the scope of a request, and functions to receive and to send."""


class BatchLine(NamedTuple):
    """One request of a batch. url is a path of the API, body the request as the endpoint takes it."""

    custom_id: str
    url: str
    body: Json


def parse(value: Any) -> BatchLine:
    """The request of a line, which holds this JSON value. Raises UsageError."""
    if not isinstance(value, dict):
        raise UsageError("not a JSON object")
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not (isinstance(custom_id, str) and custom_id):
        raise UsageError("custom_id: a text that names the request is needed")
    if method != "POST":
        raise UsageError(f"method: only POST is possible, not {shown(method)}")
    if not (isinstance(url, str) and url.startswith("/v1/")):
        raise UsageError(f"url: a path such as /v1/chat/completions is needed, not {shown(url)}")
    if not isinstance(body, dict):
        raise UsageError("body: the request as a JSON object is needed")
    if body.get("stream"):
        raise UsageError("body.stream: answers of a batch are not streamed")
    return BatchLine(custom_id, url, body)


def refusal(custom_id: str | None, message: str) -> Json:
    """The result of a line that is no request."""
    error = {"code": "invalid_request", "message": message}
    return {"id": _name("batch_req"), "custom_id": custom_id, "response": None, "error": error}


async def answers(
    app: Application, lines: Sequence[BatchLine], at_once: int, ended: Callable[[], bool]
) -> AsyncIterator[Json]:
    """The results of requests as they are completed, with `at_once` of them under way; ends early where `ended()`."""
    waiting = iter(lines)
    running: set[asyncio.Task[Json]] = set()
    try:
        while True:
            while len(running) < at_once and (line := next(waiting, None)) is not None:
                running.add(asyncio.ensure_future(_answer(app, line)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if ended():
                return
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()


async def _answer(app: Application, line: BatchLine) -> Json:
    """The result of a request, whatever its status."""
    status, content = await _post(app, line.url, json.dumps(line.body).encode())
    try:
        body: Any = json.loads(content)
    except ValueError:
        body = content.decode(errors="replace")
    response = {"status_code": status, "request_id": _name("req"), "body": body}
    return {"id": _name("batch_req"), "custom_id": line.custom_id, "response": response, "error": None}


async def _post(app: Application, path: str, content: bytes) -> tuple[int, bytes]:
    """Status and body of the response to a POST request."""
    headers = [(b"host", b"batch"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    unread, status, parts = [content], 500, list[bytes]()

    async def receive() -> Json:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client stays until it has the response
        raise AssertionError

    async def send(message: Json) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception as error:  # a bug: the other requests of the batch go on
        if not parts:
            parts.append(json.dumps(failure(f"unexpected {type(error).__name__}: {error}", "server_error")).encode())
    return status, b"".join(parts)


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
