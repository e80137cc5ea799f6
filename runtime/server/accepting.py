"""Takes all connections that wait for a server at once.

uvloop takes one in each turn of the event loop. Under load a turn takes tens of milliseconds, and clients that come
together would wait for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

_AT_ONCE = 256
"""Most connections that are taken in one turn."""
_RETRY_SECONDS = 0.5
"""How long the system is left alone when it has no descriptors or memory for one more connection."""


class Acceptor:
    """Takes connections of a bound socket on the running event loop, until it is closed."""

    def __init__(self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening, self._protocol = listening, protocol
        self._connecting: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        listening.setblocking(False)
        listening.listen(socket.SOMAXCONN)
        self._open()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The socket, as servers of asyncio tell theirs."""
        return (self._listening,)

    def is_serving(self) -> bool:
        """Whether connections are taken."""
        return not self._closed

    def close(self) -> None:
        """Take no more connections."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listening.fileno())
            if self._retry is not None:
                self._retry.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connections that were taken have their protocols."""
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _open(self) -> None:
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # its client has left
                continue
            except OSError:
                self._loop.remove_reader(self._listening.fileno())
                self._retry = self._loop.call_later(_RETRY_SECONDS, self._open)
                return
            connection.setblocking(False)
            task: asyncio.Task[object] = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its client has left
            await self._loop.connect_accepted_socket(self._protocol, connection)
