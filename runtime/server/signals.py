"""A server that takes connections on bound sockets until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from qcompile.runtime.server.accepting import Acceptor


class SignalledServer(uvicorn.Server):
    """SIGTERM is how services are ended: `run` returns after it, where other signals are raised again.

    terminated: whether it was SIGTERM.
    """

    terminated = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on bound sockets, as uvicorn does, but take all connections that wait (accepting.py)."""
        await self.lifespan.startup()
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}

        def protocol() -> asyncio.Protocol:
            kind: Any = self.config.http_protocol_class
            connection: asyncio.Protocol = kind(config=self.config, **state)
            return connection

        acceptors: list[Any] = [Acceptor(each, protocol) for each in sockets or ()]
        self.servers = acceptors  # shutdown closes them, and waits for that
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Heed a signal."""
        if sig == signal.SIGTERM:
            self.should_exit = self.terminated = True
        else:
            super().handle_exit(sig, frame)
