"""A replica that is stopped or hangs is noticed, gets no new requests, and is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import web

from qcompile.runtime.server.replicas import pulse, replica
from qcompile.runtime.server.replicas.forwarding import Forwarding
from qcompile.runtime.server.replicas.replica import Replica, ReplicaLaunch
from tests.runtime.server.replicas.test_router import Upstream, routed, run, whole

IDLE = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.stdin.readline(); "
    "print('{}', flush=True); sys.stdin.read()"
)


async def until(result: object) -> None:
    while not result():  # type: ignore[operator]
        await asyncio.sleep(0.01)


def test_a_stopped_or_silent_process_is_killed_and_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(replica, "_FIRST_DELAY", 0.01)

    async def test(folder: Path) -> None:
        said: list[str] = []
        silent = False

        async def health(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(5 if silent else 0)
            return web.Response(status=503)  # it answers, whatever it says

        app = web.Application()
        app.router.add_get("/health", health)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        one = Replica(0, ReplicaLaunch((sys.executable, "-c", IDLE), {}, folder / "process"), said.append)
        await web.UnixSite(runner, str(folder / "0")).start()
        forwarding = Forwarding(folder / "0")
        tasks = [asyncio.create_task(one.keep()), asyncio.create_task(pulse.watch(one, forwarding, said.append))]
        await until(lambda: one.ready)
        first = one.pid
        assert first
        await asyncio.sleep(0.2)
        assert one.pid == first and one.missed == 0 and not said
        os.kill(first, signal.SIGSTOP)
        await until(lambda: one.ready and one.pid != first)
        assert said == [
            "replica 0 is stopped, and is killed",
            "replica 0 has ended (SIGKILL), and starts again in 0.01 s",
        ]
        monkeypatch.setattr(pulse, "MOST_SILENCES", 3)
        second, silent = one.pid, True
        await until(lambda: one.missed)
        silent = False
        await until(lambda: one.missed == 0)
        assert one.pid == second
        silent = True
        await until(lambda: one.pid != second)
        assert said[2] == "replica 0 does not answer, and is killed"
        await until(lambda: one.ready)
        lines, one.kill = len(said), None  # type: ignore[method-assign]
        one.end()  # while it ends, it answers its open requests and takes no others
        await asyncio.sleep(0.5)
        assert said[lines:] == [] and not any(task.done() for task in tasks[1:])
        for task in tasks[::-1]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await one.close(1)
        await forwarding.close()
        await runner.cleanup()

    run(test, tmp_path)


def test_new_requests_go_to_replicas_that_answer(tmp_path: Path) -> None:
    async def test(folder: Path) -> None:
        both = [Upstream(whole), Upstream(whole)]
        async with routed(folder, list(both)) as (client, router):
            router._replicas[0].missed = 1
            for _ in range(3):
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status == 201
            assert [len(one.asked) for one in both] == [0, 3]
            router._replicas[1].missed = 1  # none is known to answer: one of them may all the same
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status == 201

    run(test, tmp_path)
