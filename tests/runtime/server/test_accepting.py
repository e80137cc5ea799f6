"""Connections that come together are taken together, whatever the event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

import pytest
import uvloop

from qcompile.runtime.server import accepting
from qcompile.runtime.server.accepting import Acceptor

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def turns(count: int, listening: socket.socket) -> list[int]:
    """The turn of the event loop in which each of `count` waiting connections gets its protocol."""
    taken: list[int] = []
    turn = 0

    class Noted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken.append(turn)
            transport.close()

    clients = [socket.create_connection(listening.getsockname()) for _ in range(count)]
    acceptor = Acceptor(listening, Noted)
    for turn in range(100):  # noqa: B007 - the protocols read it
        await asyncio.sleep(0)
    acceptor.close()
    await acceptor.wait_closed()
    for client in clients:
        client.close()
    return taken


def run(new: Callable[[], asyncio.AbstractEventLoop], work: Callable[[], object]) -> object:
    with asyncio.Runner(loop_factory=new) as runner:
        return runner.run(work())  # type: ignore[arg-type]


@pytest.mark.parametrize("new", LOOPS.values(), ids=LOOPS)
def test_all_that_wait_are_taken_in_one_turn(new: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        taken = run(new, lambda: turns(20, listening))
    assert isinstance(taken, list) and len(taken) == 20 and max(taken) - min(taken) <= 1


def test_a_system_without_descriptors_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "_RETRY_SECONDS", 0.01)

    class Scarce:
        """A socket of a process that has too many files open, at first."""

        def __init__(self, listening: socket.socket) -> None:
            self._listening, self.refused = listening, 0

        def accept(self) -> tuple[socket.socket, object]:
            if self.refused < 2:
                self.refused += 1
                raise OSError(errno.EMFILE, "too many open files")
            return self._listening.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self._listening, name)

    async def work(scarce: Scarce) -> None:
        made = asyncio.Event()

        class Noted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set()

        acceptor = Acceptor(scarce, Noted)  # type: ignore[arg-type]
        with socket.create_connection(scarce._listening.getsockname()):
            await asyncio.wait_for(made.wait(), 5)
        acceptor.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        scarce = Scarce(listening)
        asyncio.run(work(scarce))
    assert scarce.refused == 2
