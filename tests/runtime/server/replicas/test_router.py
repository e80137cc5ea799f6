"""The router, in front of small servers as replicas: what it passes on, and what clients get as a replica ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web

from qcompile.errors import ResourceError
from qcompile.runtime.server.replicas.replica import Replica, ReplicaLaunch
from qcompile.runtime.server.replicas.router import Routed, Router

METRICS = '# HELP n_total Of them.\n# TYPE n_total counter\nn_total{model_name="m"} 2.0\n'
PIECE = b'data: {"choices": []}\n\n'


@dataclass
class Upstream:
    """A replica's server: notes what it is asked, and answers as `act` does."""

    act: Callable[[web.Request], Awaitable[web.StreamResponse]]
    asked: list[tuple[str, str, bytes, dict[str, str]]] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    status: str = "ok"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/health", "/metrics"):
            return web.Response(text=METRICS if request.path == "/metrics" else json.dumps({"status": self.status}))
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.path_qs, await request.read(), headers))
        try:
            return await self.act(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def whole(request: web.Request) -> web.StreamResponse:
    return web.json_response({"id": "resp_1"}, status=201, headers={"X-Own": "a"})


async def broken_stream(request: web.Request) -> web.StreamResponse:
    """Two events, the second of them a part, and then the end of the process."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(PIECE + PIECE[:9])
    await asyncio.sleep(0.05)
    request.transport.abort()  # type: ignore[union-attr]
    return response


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while True:
        await response.write(PIECE)
        await asyncio.sleep(0.01)


async def dead(request: web.Request) -> web.StreamResponse:
    request.transport.abort()  # type: ignore[union-attr]
    return web.Response()


async def late_dead(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(1.1)
    return await dead(request)


@asynccontextmanager
async def routed(folder: Path, upstreams: list[Upstream | None], **more: Any) -> AsyncIterator[tuple[Any, Router]]:
    """A client of a router in front of these replicas, and the router. None: a replica that has just ended."""
    replicas, runners = [], []
    for at, upstream in enumerate(upstreams):
        replica = Replica(at, ReplicaLaunch((), {}, folder / str(at)), lambda line: None)
        replica.ready, replica.facts = True, {"context": 100}
        replicas.append(replica)
        if upstream is not None:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", upstream.handle)
            runners.append(web.AppRunner(app, handler_cancellation=True))
            await runners[-1].setup()
            await web.UnixSite(runners[-1], str(folder / str(at))).start()
    router = Router(Routed("m", **more), replicas)
    server = uvicorn.Server(uvicorn.Config(router.app(), port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield client, router
        assert not any(replica.in_flight for replica in replicas)
    server.should_exit = True
    await serving
    await router.close()
    for runner in runners:
        await runner.cleanup()


def run(test: Callable[[Path], Awaitable[None]], folder: Path) -> None:
    asyncio.run(asyncio.wait_for(test(folder), 30))  # type: ignore[arg-type]


def metric(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(name)]


def test_requests_and_responses_are_passed_on(tmp_path: Path) -> None:
    async def test(folder: Path) -> None:
        one = Upstream(whole)
        async with routed(folder, [one]) as (client, _):
            headers = {"X-Forwarded-For": "6.6.6.6", "X-Mine": "b", "Content-Type": "application/json"}
            answer = await client.post("/v1/a%2Fb?c=d", data=b'{"prompt": "x"}', headers=headers)
            assert answer.status == 201 and answer.headers["X-Own"] == "a" and await answer.json() == {"id": "resp_1"}
            method, path, body, sent = one.asked[0]
            assert (method, path, body) == ("POST", "/v1/a%2Fb?c=d", b'{"prompt": "x"}')
            assert sent["x-forwarded-for"] == "6.6.6.6" and sent["x-mine"] == "b"
            assert (await client.head("/v1/models")).status == 201
            refused = await client.post("/v1/completions", data=b"x" * (2 << 20) + b"x")
            assert refused.status == 413 and "larger" in (await refused.json())["error"]["message"]
            assert len(one.asked) == 2

    run(test, tmp_path)


def test_a_request_goes_to_another_replica_once_and_only_if_the_first_ends_at_once(tmp_path: Path) -> None:
    async def test(folder: Path) -> None:
        two = Upstream(whole)
        async with routed(folder, [None, two]) as (client, _):
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status == 201
        dying, other = Upstream(dead), Upstream(whole)
        async with routed(folder, [dying, other]) as (client, _):
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status == 201
            assert dying.asked and other.asked
        ends = [Upstream(dead), Upstream(dead), Upstream(whole)]
        async with routed(folder, list(ends)) as (client, _):
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status == 503
            assert [len(one.asked) for one in ends] == [1, 1, 0]
        late, other = Upstream(late_dead), Upstream(whole)
        async with routed(folder, [late, other]) as (client, _):
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status == 503 and "send it again" in (await answer.json())["error"]["message"]
            assert late.asked and not other.asked
            text = await (await client.get("/metrics")).text()
            assert metric(text, "qcompile_lost_requests_total") == [
                'qcompile_lost_requests_total{model_name="m",replica="0"} 1.0',
                'qcompile_lost_requests_total{model_name="m",replica="1"} 0.0',
            ]
        async with routed(folder, [None]) as (client, _):
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status == 503 and "no process" in (await answer.json())["error"]["message"]
            assert (await client.get("/health")).status == 503

    run(test, tmp_path)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/completions", {"error": {"type": "server_error", "param": None, "code": None}}),
        ("/v1/messages", {"type": "error", "error": {"type": "api_error"}}),
        ("/v1/responses", {"type": "error", "code": "server_error", "param": None}),
    ],
)
def test_a_stream_whose_replica_ends_ends_with_an_error_event(path: str, error: dict[str, Any], tmp_path: Path) -> None:
    """In the format of the API, and after the last whole event."""

    async def test(folder: Path) -> None:
        async with routed(folder, [Upstream(broken_stream)]) as (client, _):
            answer = await client.post(path, json={"prompt": "x", "stream": True})
            first, last, end = (await answer.text()).split("\n\n")
            assert first + "\n\n" == PIECE.decode() and end == ""
            result = json.loads(last[last.index("{") :])
            assert "send it again" in (result.get("error") or result).pop("message")
            assert result == error

    run(test, tmp_path)


def test_a_client_that_leaves_cancels_its_request(tmp_path: Path) -> None:
    async def test(folder: Path) -> None:
        async def forever(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(60)
            raise AssertionError

        for act in (endless, forever):
            one = Upstream(act)
            async with routed(folder, [one]) as (client, router):
                asking = asyncio.create_task(client.post("/v1/completions", json={"stream": True}))
                while not one.asked:
                    await asyncio.sleep(0.01)
                if act is endless:
                    (await asking).close()
                else:
                    asking.cancel()
                await one.cancelled.wait()
                while router._replicas[0].in_flight:
                    await asyncio.sleep(0.01)

    run(test, tmp_path)


def test_later_requests_go_where_a_conversation_or_a_response_is(tmp_path: Path) -> None:
    async def test(folder: Path) -> None:
        def answering(id: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
            async def answer(request: web.Request) -> web.StreamResponse:
                return web.json_response({"id": f"resp_{id}"})

            return answer

        both = [Upstream(answering("a")), Upstream(answering("b"))]
        async with routed(folder, both) as (client, _):
            for content in ("one " * 200, "two " * 200):
                for turns in range(1, 4):
                    asked = {"messages": [{"role": "user", "content": content}] * turns}
                    await client.post("/v1/chat/completions", json=asked)
            assert [len(one.asked) for one in both] == [3, 3]
            await client.post("/v1/responses", json={"input": "x" * 600})
            await client.post("/v1/responses", json={"input": "y" * 600})
            for id in ("b", "b", "a", "a", "a"):
                await client.post("/v1/responses", json={"input": "z", "previous_response_id": f"resp_{id}"})
                assert both[id == "b"].asked[-1][1] == "/v1/responses"
                await client.get(f"/v1/responses/resp_{id}")
                assert both[id == "b"].asked[-1][1] == f"/v1/responses/resp_{id}"

    run(test, tmp_path)


def test_the_body_of_a_request_with_a_wrong_key_is_not_read(tmp_path: Path) -> None:
    async def test(folder: Path) -> None:
        one = Upstream(whole)
        async with routed(folder, [one], keys=[b"right"]) as (client, _):
            for key in ("wrong", "right"):
                await client.post("/v1/completions", json={}, headers={"Authorization": f"Bearer {key}"})
            assert [body for _, _, body, _ in one.asked] == [b"", b"{}"]

    run(test, tmp_path)


def test_health_and_metrics_tell_of_each_replica(tmp_path: Path) -> None:
    async def test(folder: Path) -> None:
        async with routed(folder, [Upstream(whole), None]) as (client, router):
            health = await (await client.get("/health")).json()
            each = [{"replica": 0, "status": "ok"}, {"replica": 1, "status": "down"}]
            assert health == {"status": "ok", "replicas": each}
            router._replicas[1].ready = False
            text = await (await client.get("/metrics")).text()
            assert metric(text, "n_total") == ['n_total{model_name="m",replica="0"} 2.0']
            assert metric(text, "qcompile_replica_ready") == [
                'qcompile_replica_ready{model_name="m",replica="0"} 1.0',
                'qcompile_replica_ready{model_name="m",replica="1"} 0.0',
            ]

    run(test, tmp_path)


class Sleeper(Upstream):
    """A replica that falls asleep and wakes, if it can."""

    def __init__(self) -> None:
        super().__init__(self.turn)
        self.can = True

    async def turn(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer k":
            return web.json_response({}, status=401)
        if self.can:
            self.status = "asleep" if request.path == "/sleep" else "ok"
        return web.json_response({"is_sleeping": self.status == "asleep"}, status=200 if self.can else 503)


def test_all_replicas_sleep_or_none(tmp_path: Path) -> None:
    async def test(folder: Path) -> None:
        one, two = Sleeper(), Sleeper()
        key = {"Authorization": "Bearer k"}
        async with routed(folder, [one, two, None], keys=[b"k"], enable_sleep=True) as (client, router):

            async def post(path: str, headers: dict[str, str] = key) -> int:
                return (await client.post(path, headers=headers)).status

            def asked() -> list[list[str]]:
                paths = [[path for _, path, _, _ in each.asked] for each in (one, two)]
                for each in (one, two):
                    each.asked.clear()
                return paths

            assert await post("/sleep", {}) == 401 and one.status == two.status == "ok"
            await router._replicas[0].prepare()
            assert asked() == [["/sleep"]] * 2
            assert await post("/sleep?level=2") == 200 and asked() == [["/sleep?level=2"]] * 2
            health = await (await client.get("/health")).json()
            assert health["status"] == "asleep"
            assert [each["status"] for each in health["replicas"]] == ["asleep", "asleep", "down"]
            one.status = "ok"  # it has started again
            await router._replicas[0].prepare()
            assert one.status == "asleep" and asked() == [["/sleep?level=2"], []]
            two.can = False
            assert await post("/wake_up") == 503 and one.status == two.status == "asleep"
            assert asked() == [["/wake_up", "/sleep?level=2"], ["/wake_up"]]
            two.can = True
            assert await post("/wake_up") == 200 and one.status == two.status == "ok"
            one.can = False
            assert await post("/sleep") == 503 and two.status == "ok"
            await router._replicas[1].prepare()
            assert two.status == "ok"
            with pytest.raises(ResourceError, match="/sleep"):
                router._sleeping._level = "1"
                await router._replicas[0].prepare()
        async with routed(folder, [None], keys=[b"k"], enable_sleep=True) as (client, _):
            assert (await client.post("/sleep", headers=key)).status == 503
        async with routed(folder, [first := Upstream(whole), Upstream(whole)]) as (client, _):
            assert (await client.post("/sleep")).status == 201 and len(first.asked) == 1

    run(test, tmp_path)
