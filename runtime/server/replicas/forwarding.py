"""Sends a client's request to a replica, and the replica's response to the client, as it comes."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from yarl import URL

from qcompile.errors import ResourceError
from qcompile.runtime.server import api
from qcompile.runtime.server.errors import MESSAGES, messages_failure

_OF_A_CONNECTION = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "trailers"),
    *("transfer-encoding", "upgrade", "content-length", "x-forwarded-for", "expect"),
}
"""Headers that are not passed on: they concern one connection, or are written anew."""
_MOST_CONNECTIONS = 1024
"""To one replica at once; further requests wait for one. Fewer than its socket queues."""
_CONNECT_SECONDS = 10.0
RESPONSES = "/v1/responses"
_RESPONSE_ID = re.compile(rb'"id": ?"(resp_\w+)"')
LOST = "the process that answered this request has ended: send it again"


class UnreachableError(ResourceError):
    """A replica takes no connections: it has got nothing of the request."""


class LostError(ResourceError):
    """A replica has ended while it had a request."""


@dataclass(frozen=True)
class Watch:
    """What is told of a request that is forwarded. lost: its replica has ended in the midst of a stream.

    done: the response has ended, however. named: the id of the response that is kept there for later requests.
    """

    lost: Callable[[], None]
    done: Callable[[], None]
    named: Callable[[str], None]


class Forwarding:
    """Connections to one replica. Open it, and use it, on an event loop.

    Each request has a connection of its own: then a connection that cannot be made means that the replica has nothing
    of the request.
    """

    def __init__(self, socket: Path) -> None:
        connector = aiohttp.UnixConnector(str(socket), limit=_MOST_CONNECTIONS, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def text(self, path: str, seconds: float) -> str:
        """The text of a path that is there. Raises UnreachableError, LostError."""
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.get(f"http://replica{path}", timeout=timeout, raise_for_status=True) as response:
                return await response.text()
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(str(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LostError(str(error)) from error

    async def answers(self, path: str, seconds: float) -> bool:
        """Whether there is an answer, of any status, within a time."""
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.get(f"http://replica{path}", timeout=timeout):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(self, path: str, headers: Mapping[str, str]) -> None:
        """Post a request without a body. Raises ResourceError with the answer if its status is not 200."""
        try:
            async with self._session.post(f"http://replica{path}", headers=headers) as response:
                if response.status != 200:
                    raise ResourceError(f"{path.partition('?')[0]}: {await response.text()}")
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(str(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LostError(str(error)) from error

    async def send(self, request: Request, body: bytes, watch: Watch) -> Response:
        """The replica's response, streamed if it is a stream of events. Raises UnreachableError, LostError."""
        streamed = False
        try:
            response = await self._session.request(
                request.method, _url(request), headers=_headers(request), data=body, allow_redirects=False
            )
            headers = [(name.lower(), value) for name, value in response.raw_headers]
            kept = [pair for pair in headers if pair[0].decode("latin-1") not in _OF_A_CONNECTION]
            if response.content_type == "text/event-stream":
                streamed = True
                # The end of the response object counts, too: the client may leave before the first event is asked for.
                end = weakref.finalize(response, watch.done)
                events = _events(request.url.path, response, watch, end)
                answer: Response = StreamingResponse(events, response.status)
            else:
                content = await response.read()
                _find_id(request.url.path, content, watch)
                answer = Response(content, response.status)
                if request.method != "HEAD":
                    kept.append((b"content-length", b"%d" % len(content)))
            answer.raw_headers = kept
            return answer
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(str(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LostError(LOST) from error
        finally:
            if not streamed:
                watch.done()


async def _events(
    path: str, response: aiohttp.ClientResponse, watch: Watch, end: Callable[[], object]
) -> AsyncIterator[bytes]:
    """The whole events of a stream; if the replica ends, an event with the error, in the format of the path's API."""
    held, named = b"", not path.startswith(RESPONSES)
    try:
        async for piece in response.content.iter_any():
            held += piece
            if not named:
                named = _find_id(path, held, watch)
            if (last := held.rfind(b"\n\n")) >= 0:
                yield held[: last + 2]
                held = held[last + 2 :]
        if held:
            yield held
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        watch.lost()
        yield failure_event(path).encode()
    finally:
        response.close()  # the replica cancels what it has not sent
        end()


def _find_id(path: str, content: bytes, watch: Watch) -> bool:
    """Tell `watch` the id of a response of OpenAI's Responses API; returns whether there is one."""
    id = response_id(path, content)
    if id:
        watch.named(id)
    return bool(id)


def response_id(path: str, content: bytes) -> str:
    """The id of a response of OpenAI's Responses API by its beginning; empty if it is none."""
    match = _RESPONSE_ID.search(content[:512]) if path.startswith(RESPONSES) else None
    return match[1].decode() if match else ""


def failure_event(path: str) -> str:
    """An event that says that the replica has ended."""
    if path.startswith(MESSAGES):
        return api.named_event(messages_failure(LOST))
    if path.startswith(RESPONSES):
        return api.named_event({"type": "error", "code": "server_error", "message": LOST, "param": None})
    return api.event(api.failure(LOST, "server_error"))


def _url(request: Request) -> URL:
    raw = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope.get("query_string", b"")
    target = raw.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
    return URL(f"http://replica{target}", encoded=True)


def _headers(request: Request) -> list[tuple[str, str]]:
    """The client's headers, and its address."""
    passed = [(name, value) for name, value in request.headers.items() if name not in _OF_A_CONNECTION]
    with contextlib.suppress(AttributeError):  # no client is known
        passed.append(("x-forwarded-for", request.client.host))  # type: ignore[union-attr]
    return passed
