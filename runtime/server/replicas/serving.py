"""Runs replicas and the router in front of them, until a signal ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from qcompile.errors import ResourceError
from qcompile.runtime.server.connections import ConnectionLimits, limited_protocol
from qcompile.runtime.server.replicas.replica import Replica, ReplicaLaunch
from qcompile.runtime.server.replicas.router import Routed, Router
from qcompile.runtime.server.signals import SignalledServer

_STARTUP_POLL = 0.05
_LAST_SECONDS = 3.0
"""How much longer than its open answers a replica may take to end before it is killed."""


def serve_replicas(
    routed: Routed,
    launches: Sequence[ReplicaLaunch],
    listening: socket.socket,
    limits: ConnectionLimits,
    drain_seconds: float,
    say: Callable[[str], None],
    ready: Callable[[dict[str, Any]], None],
) -> bool:
    """Serve requests on a bound socket by the replicas. Returns whether SIGTERM ended it; SIGINT is raised again.

    drain_seconds: how long open responses may continue after the signal. ready: called with the facts of the first
    replica once that is ready; the others follow. Raises ResourceError with the exit code of the first replica if that
    ends before.
    """
    replicas = [Replica(at, launch, say, needed=at == 0) for at, launch in enumerate(launches)]
    config = uvicorn.Config(
        "",
        http=limited_protocol(limits),
        interface="asgi3",
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(drain_seconds + 1),
    )
    server = _RouterServer(config, routed, replicas, ready, say)
    with server.capture_signals():
        server.run(sockets=[listening])
    code = replicas[0].exit_code
    if code is not None:
        error = ResourceError(f"the first replica has ended with exit code {code} before it answered")
        error.exit_code = code if code > 0 else ResourceError.exit_code
        raise error
    return server.terminated


class _RouterServer(SignalledServer):
    """Starts replicas before it listens, and ends them when it ends."""

    def __init__(
        self,
        config: uvicorn.Config,
        routed: Routed,
        replicas: Sequence[Replica],
        ready: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._routed, self._replicas, self._ready, self._say = routed, replicas, ready, say
        self._watching: list[asyncio.Task[None]] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._router: Router | None = None
        config.app = self._answer
        self._app: Any = None

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        self._router = Router(self._routed, self._replicas)
        try:
            await super().serve(sockets)
        finally:
            for task in self._watching:
                task.cancel()
            await asyncio.gather(*(replica.close(_LAST_SECONDS) for replica in self._replicas))
            for task in self._keeping:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await self._router.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        first = self._replicas[0]
        self._keep(first)
        while not (first.ready or first.exit_code is not None or self.should_exit):
            await asyncio.sleep(_STARTUP_POLL)
        if not first.ready:
            self.should_exit = True
            return
        for replica in self._replicas[1:]:
            self._keep(replica)
        assert self._router
        self._app = self._router.app()
        self._watching = [asyncio.create_task(each) for each in self._router.watches(self._say)]
        await super().startup(sockets)
        self._ready(first.facts)

    def _keep(self, replica: Replica) -> None:
        self._keeping.append(asyncio.get_running_loop().create_task(replica.keep()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for replica in self._replicas:
            replica.end()
        await super().shutdown(sockets)
