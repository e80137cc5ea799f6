"""The application that clients see, in front of replicas that a test makes: where requests go, and what clients get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from qcompile.deploy.exchange import Asked, Head, Wanted, respond
from qcompile.deploy.front import Front
from qcompile.errors import BusyError
from qcompile.runtime.server.replicas.forwarding import LOST, LostError

JSON, EVENTS = ((b"content-type", b"application/json"),), ((b"content-type", b"text/event-stream"),)
METRICS = '# HELP n_total Of them.\n# TYPE n_total counter\nn_total{model_name="m"} 2.0\n'


class Fake:
    """One replica of a model that answers with `items`; an error among them is raised."""

    def __init__(self, name: str, *items: Head | bytes | Exception, keys: Sequence[bytes] = ()) -> None:
        self.names, self.keys, self.isolate_keys = (name,), keys, False
        self.items, self.asked, self.closed = items, list[tuple[Asked, Wanted]](), 0
        self.up = True

    async def answer(self, asked: Asked, wanted: Wanted) -> AsyncGenerator[str | Head | bytes, None]:
        self.asked.append((asked, wanted))
        try:
            yield f"{self.names[0]}-1"
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1

    async def texts(self, path: str) -> Mapping[str, str]:
        return {f"{self.names[0]}-1": METRICS} if self.up else {}


def ask(front: Front, path: str, fields: Mapping[str, Any] | None = None, **headers: str) -> tuple[int, str]:
    """The status and the whole response."""

    async def answer() -> tuple[int, str]:
        sent = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
        body = b"" if fields is None else json.dumps(fields).encode()
        asked = Asked("GET" if fields is None else "POST", path.encode(), b"", (*JSON, *sent), body, ("6.6.6.6", 1))
        head, *pieces = [item async for item in respond(front.app(), asked)]
        assert isinstance(head, Head)
        return head.status, b"".join(piece for piece in pieces if isinstance(piece, bytes)).decode()

    return asyncio.run(asyncio.wait_for(answer(), 20))


def test_a_request_and_its_response_are_passed_on() -> None:
    one = Fake("m", Head(201, (*JSON, (b"x-own", b"a"))), b'{"id": ', b'"1"}')
    assert ask(Front([one], 1000), "/v1/a%2Fb", {"prompt": "x" * 600}) == (201, '{"id": "1"}')
    asked, wanted = one.asked[0]
    assert (asked.method, asked.path, asked.client) == ("POST", b"/v1/a%2Fb", ("6.6.6.6", 1))
    assert json.loads(asked.body) == {"prompt": "x" * 600} and len(wanted.blocks) == 2
    assert one.closed == 1
    assert ask(Front([one], 10), "/v1/a", {"prompt": "x"})[0] == 413


def test_a_replica_that_ends_is_an_error_and_is_counted() -> None:
    lost = LostError(LOST)
    front = Front([one := Fake("m", lost)], 1000)
    status, text = ask(front, "/v1/completions", {"prompt": "x"})
    assert status == 503 and json.loads(text)["error"]["message"] == LOST
    one.items = (Head(200, EVENTS), b"data: 1\n\n", lost)
    status, text = ask(front, "/v1/completions", {"prompt": "x", "stream": True})
    first, last, end = text.split("\n\n")
    assert (status, first, end) == (200, "data: 1", "") and LOST in last
    assert 'qcompile_lost_requests_total{model_name="m"} 2.0' in ask(front, "/metrics")[1]
    one.items = (BusyError("full"),)
    assert ask(front, "/v1/completions", {"prompt": "x"})[0] == 429


def test_requests_go_to_the_model_they_name() -> None:
    def models(name: str) -> bytes:
        return json.dumps({"object": "list", "data": [{"id": name}]}).encode()

    both = [Fake(name, Head(200, JSON), models(name)) for name in ("a", "b")]
    front = Front(both, 1000)
    for fields, counts in (({"model": "b"}, [0, 1]), ({"model": "a"}, [1, 1]), ({}, [2, 1])):
        assert ask(front, "/v1/completions", fields)[0] == 200
        assert [len(one.asked) for one in both] == counts
    status, text = ask(front, "/v1/completions", {"model": "c"})
    assert status == 404 and "the models are a, b" in text
    assert ask(front, "/v1/models/b")[0] == 200 and len(both[1].asked) == 2
    assert json.loads(ask(front, "/v1/models")[1])["data"] == [{"id": "a"}, {"id": "b"}]
    both[1].items = (Head(401, JSON), b"{}")
    assert ask(front, "/v1/models") == (401, "{}")


def test_a_request_about_an_earlier_response_wants_its_replica() -> None:
    one = Fake("m", Head(200, EVENTS), b'event: x\ndata: {"response": {"id": "resp_1"}}\n\n')
    front = Front([one], 1000)
    ask(front, "/v1/responses", {"input": "x", "stream": True})
    ask(front, "/v1/responses", {"input": "y", "previous_response_id": "resp_1"})
    ask(front, "/v1/responses/resp_1")
    ask(front, "/v1/responses", {"input": "y", "previous_response_id": "resp_2"})
    assert [wanted.replica for _, wanted in one.asked] == ["", "m-1", "m-1", ""]


def test_health_needs_a_replica_of_each_model_and_metrics_name_replicas() -> None:
    both = [Fake("a"), Fake("b")]
    front = Front(both, 1000)
    each = [{"model": "a", "replicas": 1}, {"model": "b", "replicas": 1}]
    assert json.loads(ask(front, "/health")[1]) == {"status": "ok", "models": each}
    assert 'n_total{model_name="m",replica="b-1"} 2.0' in ask(front, "/metrics")[1]
    both[1].up = False
    assert ask(front, "/health")[0] == 503


def test_the_body_of_a_request_with_a_wrong_key_is_not_passed_on() -> None:
    one = Fake("m", Head(401, JSON), b"{}", keys=[b"right"])
    for key in ("wrong", "right"):
        ask(Front([one], 1000), "/v1/completions", {"prompt": "x"}, Authorization=f"Bearer {key}")
    assert [asked.body for asked, _ in one.asked] == [b"", b'{"prompt": "x"}']


def test_a_response_that_is_left_early_cancels_its_request() -> None:
    async def test() -> None:
        cancelled = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["body"] == b"x"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"1", "more_body": True})
            try:
                await receive()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        items = respond(app, Asked("POST", b"/", body=b"x"))
        assert [await anext(items), await anext(items)] == [Head(200, ()), b"1"]
        await items.aclose()  # type: ignore[attr-defined]
        assert cancelled.is_set()

    asyncio.run(asyncio.wait_for(test(), 20))
