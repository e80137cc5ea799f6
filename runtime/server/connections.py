"""What a client may ask of a connection before its request has been read: sizes, times, and numbers of connections.

The HTTP parser keeps what it has read of a request line or a header until its end, without a limit. The limits here are
applied to what the parser is given.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from qcompile.errors import shown
from qcompile.runtime.server import api

_LINE_BYTES = 16 << 10
"""Longest target of a request line. Larger ones get HTTP 414."""
_HEAD_BYTES = 64 << 10
"""Most bytes of header fields, and of all else that is not the body. More get HTTP 431."""
_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
_FIELDS = 128
"""Most header fields, trailers included. More get HTTP 431."""
_FED_AT_ONCE = 8 << 10
"""Bytes that the parser is given between two looks at the limits."""
_PIPELINED = 16
"""Most requests that a client may send before it has the response to the first."""
_CLOSE_SECONDS = 2
"""How long a client may take to read the refusal before the connection is cut."""
_UNREAD = 4 << 20
"""Bytes that are read and thrown away after a refusal, since most clients read it only when they have sent everything.
Then the server reads no more of the connection: to take 100 MB costs a tenth of a second of processor time, in which it
would answer nobody."""
_RESERVED_FILES = 64
"""File descriptors of the process that connections leave for other uses."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of an HTTP server's connections.

    request_seconds: how long a request's header, with its body, may take to arrive. most: connections at once.
    most_per_address: connections at once from one IP address.
    """

    request_seconds: float = 30.0
    most: int = 4096
    most_per_address: int = 1024


DEFAULT_LIMITS = ConnectionLimits()


class _Connections:
    """The connections of one server, and those of each address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open = 0
        self._by_address: Counter[str] = Counter()

    def refusal(self, address: str) -> str:
        """Why one more connection of this address is refused; empty if it is not."""
        if self._open >= self.limits.most:
            return f"the server has {self.limits.most:,} connections, as many as it takes: try again later"
        if self._by_address[address] >= self.limits.most_per_address:
            return f"{shown(address)} has {self.limits.most_per_address:,} connections here, as many as one may have"
        return ""

    def add(self, address: str) -> None:
        self._open += 1
        self._by_address[address] += 1

    def remove(self, address: str) -> None:
        self._open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def limited_protocol(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """A class of uvicorn's protocol for the connections of one server, within `limits`."""
    limits = ConnectionLimits(limits.request_seconds, _files(limits.most), limits.most_per_address)
    return type("LimitedProtocol", (_LimitedProtocol,), {"all": _Connections(limits)})


def _files(most: int) -> int:
    """How many of `most` connections the process may have. Raises its limit of open files if it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most
    if hard == resource.RLIM_INFINITY or hard > soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(most, soft - _RESERVED_FILES))


class _BrokenLimit(Exception):
    """What the parser was given breaks a limit; raised in its callbacks, so that it ends."""


class _LimitedProtocol(HttpToolsProtocol):
    """One connection of a client."""

    all: _Connections

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._address: str | None = None  # once the connection is counted
        self._beside = 0  # bytes since the request began, or since its body went on
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._unread = 0  # bytes since the refusal, or of a body since the response to its request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if reason := self.all.refusal(address):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, reason)
            return
        self.all.add(address)
        self._address = address
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._arrived()
        if self._address is not None:
            self.all.remove(self._address)
            self._address = None

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect()
        for start in range(0, len(data), _FED_AT_ONCE):
            if self._refusal or self.transport.is_closing():
                self._throw_away(len(data) - start)
                return
            self._feed(data[start : start + _FED_AT_ONCE])

    def _feed(self, piece: bytes) -> None:
        """Have the parser read some bytes; refuse the request if they are no HTTP or break a limit."""
        self._beside += len(piece)
        try:
            self.parser.feed_data(piece)
            if self._beside > _LINE_BYTES + _HEAD_BYTES:
                self._limit(_LARGE, f"the header is larger than {_HEAD_BYTES:,} bytes")
            if len(self.pipeline) > _PIPELINED:
                self._limit(HTTPStatus.BAD_REQUEST, f"more than {_PIPELINED} requests came before their responses")
        except httptools.HttpParserUpgrade:
            pass  # there is no other protocol: the request gets its response
        except (httptools.HttpParserError, _BrokenLimit):
            self._refuse(*(self._refusal or (HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1")))

    def _throw_away(self, size: int) -> None:
        """Count bytes that nobody reads. After too many, the client may send no more, and is soon cut."""
        before, self._unread = self._unread, self._unread + size
        if before <= _UNREAD < self._unread and not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    def _limit(self, status: HTTPStatus, message: str) -> None:
        self._refusal = status, message
        raise _BrokenLimit

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._beside = min(self._beside, _FED_AT_ONCE)
        self._unread = 0
        if self._deadline is None:
            self._expect()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _LINE_BYTES:
            self._limit(HTTPStatus.REQUEST_URI_TOO_LONG, f"the request line is longer than {_LINE_BYTES:,} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _FIELDS:
            self._limit(_LARGE, f"the request has more than {_FIELDS} header fields")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._beside = 0
        if self.cycle.response_complete:
            self._throw_away(len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._beside = 0
        self._arrived()

    def _expect(self) -> None:
        """Give the client a time in which its request has to arrive."""
        self._arrived()
        self._deadline = self.loop.call_later(self.all.limits.request_seconds, self._late)

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        """The request has not arrived in time."""
        self._deadline = None
        cycle = self.cycle
        if self.pipeline or (cycle and not cycle.more_body and not cycle.response_complete):
            self._expect()  # the client may wait for the response to an earlier request
        elif (cycle is None or cycle.response_complete) and not self._beside:
            self.transport.close()  # it has not begun
        else:
            seconds = self.all.limits.request_seconds
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the request did not arrive within {seconds:g} seconds")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Send a refusal if no response has begun, and end the connection once the client has read the refusal."""
        self._refusal = status, message
        self._arrived()
        self.pipeline.clear()
        cycle = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if answering:
            self.transport.close()
            return
        body = json.dumps(api.failure(message, "invalid_request_error")).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        # A socket that is closed while the client still sends would be reset, and the refusal lost.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)
