"""The process that answers clients: the HTTP server of a model with its engine elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qcompile.errors import ResourceError
from qcompile.runtime.server.apart.channel import Message, Received, encoded
from qcompile.runtime.server.apart.remote import RemoteService
from qcompile.runtime.server.app import Served, Server, serve_by

LOST = "the process of the engine has ended"


class Asks:
    """Sends messages to the engine's process. What is sent before the event loop runs waits for it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def send(self, message: Message) -> None:
        """Send a message. Nothing happens if the other process has ended: its other channel tells that."""
        if self._transport is None:
            self._waiting.append(encoded(message))
        elif not self._transport.is_closing():  # else uvloop raises an exception
            self._transport.write(encoded(message))

    async def connect(self) -> None:
        """Send what waits, and all that follows, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(asyncio.Protocol, sock=self._connection)
        self._transport.writelines(self._waiting)
        self._waiting.clear()


class _Told(asyncio.Protocol):
    """Takes what the engine's process tells."""

    def __init__(self, received: Received, heed: Callable[[Sequence[Any]], None], lost: Callable[[], None]) -> None:
        self._received, self._heed, self._lost = received, heed, lost

    def data_received(self, data: bytes) -> None:
        for message in self._received.add(data):
            self._heed(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


def serve_front(served: Served, service: RemoteService, listening: socket.socket, asks: Asks, told: Told) -> None:
    """Serve requests on a bound socket until the engine's process says that it is enough, or ends.

    Raises ResourceError if that process ends without a word.
    """
    known: list[BaseException] = []  # failures that the engine's process has told its user of

    class FrontServer(Server):
        """Ends when it is told to; signals are for the other process."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await asks.connect()
            await told.connect(self._heed, service)
            await super().startup(sockets)

        def _heed(self, message: Sequence[Any]) -> None:
            name, *operands = message
            match name:
                case "grown":
                    service.grown(operands[0])
                case "refused":
                    service.refused(*operands)
                case "returned":
                    service.returned(*operands)
                case "cancelled":
                    service.cancelled(*operands)
                case "failed":
                    known.append(ResourceError(operands[0]))
                    service.lost(known[0])
                case "end":
                    self.should_exit = True
                case "force":
                    self.should_exit = self.force_exit = True
                case _:
                    raise AssertionError(name)

    try:
        serve_by(served, service, listening, lambda: asks.send(("listening",)), FrontServer)
    except ResourceError:
        if service.failure not in known:
            raise


class Told:
    """The channel of the engine's process. `first` is its first message, from a blocking read."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._received = connection, Received()
        self._left: list[Any] = []

    def first(self) -> list[Any] | None:
        """The first message; None if the other process ends before it sends one."""
        while content := self._connection.recv(1 << 16):
            if messages := list(self._received.add(content)):
                first, *self._left = messages
                return list(first)
        return None

    async def connect(self, heed: Callable[[Sequence[Any]], None], service: RemoteService) -> None:
        """Have the running event loop heed all further messages, and tell `service` when there are no more."""

        def lost() -> None:
            service.lost(None if service.ended else ResourceError(LOST))

        for message in self._left:
            heed(message)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: _Told(self._received, heed, lost), sock=self._connection)
