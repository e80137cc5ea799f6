"""The two halves of a server with its engine apart, in two threads of one process."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qcompile.runtime.llm import LLM
from qcompile.runtime.server import app
from qcompile.runtime.server.apart.channel import Received, Sender, pair
from qcompile.runtime.server.apart.front import Asks, Told, serve_front
from qcompile.runtime.server.apart.host import EngineHost
from qcompile.runtime.server.apart.model import RemoteModel
from qcompile.runtime.server.apart.remote import RemoteService
from qcompile.runtime.server.service import Service


@contextmanager
def hosted(llm: LLM, max_waiting: int) -> Iterator[tuple[EngineHost, socket.socket, socket.socket]]:
    """The half of the engine. Yields it, where the other half asks, and where it is told."""
    its_asks, asks = pair()
    tells, its_tells = pair()
    host = EngineHost(llm, max_waiting, Sender(tells).send)

    class Asked(asyncio.Protocol):
        def __init__(self) -> None:
            self.received, self.lost = Received(), asyncio.get_running_loop().create_future()

        def data_received(self, data: bytes) -> None:
            for message in self.received.add(data):
                if message[0] != "listening":
                    host.asked(message)

        def connection_lost(self, exc: Exception | None) -> None:
            self.lost.set_result(None)

    async def run() -> None:
        _, protocol = await asyncio.get_running_loop().create_connection(Asked, sock=asks)
        await protocol.lost

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield host, its_asks, its_tells
    finally:
        thread.join()
        host.service.close()
        tells.close()


@contextmanager
def serving_apart(llm: LLM, artifact: Path, max_waiting: int = 256, **options: Any) -> Iterator[tuple[int, Service]]:
    """A server of a model: its port, and the service of its engine."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as `serve` does
    with hosted(llm, max_waiting) as (host, asking, telling), app.bind("127.0.0.1", 0) as listening:
        facts, files = host.facts, llm.manifest["files"]
        asks, told = Asks(asking), Told(telling)
        model = RemoteModel(artifact, files, facts, lambda tokens: asks.send(("end_at", tokens)))
        remote = RemoteService(model, max_waiting, asks.send)
        served = app.Served(model, "tiny", max_waiting=max_waiting, drain_seconds=0.5, **options)
        front = threading.Thread(target=serve_front, args=(served, remote, listening, asks, told))
        front.start()
        try:
            yield listening.getsockname()[1], host.service
        finally:
            remote.failed(SystemExit())  # ends the server
            front.join()
            asking.close()
            telling.close()
