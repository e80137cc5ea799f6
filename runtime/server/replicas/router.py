"""The application that clients of several replicas see: it sends each request to one, and tells how they all are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse

from qcompile.errors import QCompileError, ResourceError
from qcompile.runtime.server.access import admits, key_of
from qcompile.runtime.server.asking import unless_gone
from qcompile.runtime.server.bodies import most_bytes
from qcompile.runtime.server.replicas.affinity import Affinity, blocks_of
from qcompile.runtime.server.replicas.application import application
from qcompile.runtime.server.replicas.forwarding import RESPONSES, Forwarding, LostError, UnreachableError, Watch
from qcompile.runtime.server.replicas.metrics import RouterMetrics
from qcompile.runtime.server.replicas.pulse import watch
from qcompile.runtime.server.replicas.replica import Replica
from qcompile.runtime.server.replicas.sleeping import SleepingReplicas

_POLL_SECONDS = 5.0
"""How long a replica may take to tell how it is."""
_PARSED_AT_ONCE = 32 << 10
"""Bytes of a body that are parsed at once; larger ones are parsed in a thread, so that other responses continue."""
_UNREAD_SECONDS = 1.0
"""A replica that ends within this time after it was sent a request counts as ended before it read the request: when a
replica is killed, its socket queues requests until the router knows."""
_MOST_IDS = 1 << 14
"""Most responses of which the router remembers the replica."""


@dataclass(frozen=True)
class Routed:
    """What the router needs to know of a server. name: the model's. keys: if any, clients must send one of them.

    isolate_keys: whether requests of different keys share no cached prefixes, and so need not go to the same replica.
    enable_sleep: whether clients with a key may let the replicas sleep.
    """

    name: str
    keys: Sequence[bytes] = ()
    isolate_keys: bool = False
    enable_sleep: bool = False


class Router:
    """Chooses replicas and forwards requests. Make it, and use it, on an event loop."""

    def __init__(self, routed: Routed, replicas: Sequence[Replica]) -> None:
        self.metrics = RouterMetrics(routed.name)
        self._routed, self._replicas = routed, replicas
        self._forwarding = [Forwarding(replica.launch.socket) for replica in replicas]
        self._affinity = Affinity[int]()
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._sleeping = SleepingReplicas(replicas, self._forwarding, routed.keys[0]) if routed.enable_sleep else None
        for replica in replicas:
            self._watch_restarts(replica)

    def _watch_restarts(self, replica: Replica) -> None:
        replica.ended = lambda: self._affinity.forget(replica.number)
        replica.restarted = lambda: self.metrics.restarted(replica.number)

    def watches(self, say: Callable[[str], None]) -> list[Coroutine[Any, Any, None]]:
        """What must run beside the router, so that replicas that are stopped or hang are noticed."""
        return [watch(replica, self._forwarding[replica.number], say) for replica in self._replicas]

    async def close(self) -> None:
        """Close all connections to replicas."""
        for one in self._forwarding:
            await one.close()

    def app(self) -> FastAPI:
        """The application. It takes bodies as large as a replica does."""
        facts = next((replica.facts for replica in self._replicas if replica.facts), {})
        posts = self._sleeping.routes if self._sleeping else {}
        return application(self, most_bytes(facts.get("context", 0)), self.metrics.responded, posts)

    async def health(self) -> JSONResponse:
        """Status 200 while one replica's engine runs or sleeps, and how each replica is."""
        texts = await self._texts("/health")
        states = {number: json.loads(text)["status"] for number, text in texts.items()}
        each = [{"replica": one.number, "status": states.get(one.number, "down")} for one in self._replicas]
        status = next((state for state in ("ok", "asleep") if state in states.values()), "down")
        return JSONResponse({"status": status, "replicas": each}, 200 if texts else 503)

    async def show_metrics(self) -> PlainTextResponse:
        """The metrics of all replicas in Prometheus' format."""
        for one in self._replicas:
            self.metrics.observe(one.number, one.ready, one.in_flight)
        text = self.metrics.text(await self._texts("/metrics"))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _texts(self, path: str) -> dict[int, str]:
        """What each replica that answers has at a path, by its number."""
        ready = [replica.number for replica in self._replicas if replica.ready]
        asked = [self._forwarding[number].text(path, _POLL_SECONDS) for number in ready]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {number: text for number, text in zip(ready, answers, strict=True) if isinstance(text, str)}

    async def forward(self, request: Request) -> Response:
        """Have a replica answer. Raises ResourceError if none does."""
        if not admits(self._routed.keys, key_of(request.headers)):
            body = b""  # it is not read: the replica refuses the request by its key
        else:
            body = await request.body()
        asked = await parsed(body)
        owner = key_of(request.headers).hex() if self._routed.isolate_keys else ""
        blocks = blocks_of(asked, owner)
        answer = await unless_gone(request, self._answer(request, body, asked, blocks))
        return answer if answer is not None else Response(status_code=499)

    async def _answer(self, request: Request, body: bytes, asked: Mapping[str, Any], blocks: Sequence[int]) -> Response:
        """The response of the replica that fits best; of another one if it takes no connections.

        A request is sent once more if a replica ends at once, and only once: it may be what ended the replica.
        """
        tried: set[int] = set()
        repeated = False
        while True:
            left = [one for one in self._replicas if one.ready and one.number not in tried]
            loads = {one.number: one.in_flight for one in left if not one.missed}
            loads = loads or {one.number: one.in_flight for one in left}
            if not loads:
                raise ResourceError("no process of the model answers now: try again later")
            keeper = self._ids.get(kept_response(request, asked), -1)
            number = keeper if keeper in loads else self._affinity.choose(blocks, loads)
            self._affinity.note(number, blocks)
            replica = self._replicas[number]
            replica.in_flight += 1
            sent = time.monotonic()
            try:
                return await self._forwarding[number].send(request, body, self._watch(replica))
            except UnreachableError:
                tried.add(number)
            except LostError:
                if repeated or time.monotonic() - sent > _UNREAD_SECONDS or loads.keys() == {number}:
                    self.metrics.lost(number)
                    raise
                tried.add(number)
                repeated = True

    def _watch(self, replica: Replica) -> Watch:
        def done() -> None:
            replica.in_flight -= 1

        def named(id: str) -> None:
            self._ids[id] = replica.number
            while len(self._ids) > _MOST_IDS:
                self._ids.popitem(last=False)

        return Watch(lambda: self.metrics.lost(replica.number), done, named)


def kept_response(request: Request, asked: Mapping[str, Any]) -> str:
    """The id of an earlier response that a request is about; empty without one."""
    if request.url.path.startswith(f"{RESPONSES}/"):
        return request.url.path.removeprefix(f"{RESPONSES}/").partition("/")[0]
    earlier = asked.get("previous_response_id")
    return earlier if isinstance(earlier, str) else ""


async def parsed(body: bytes) -> Mapping[str, Any]:
    """The body as JSON; empty if it is no JSON object, which the replica refuses."""
    with contextlib.suppress(ValueError, RecursionError, QCompileError):
        asked = json.loads(body) if len(body) <= _PARSED_AT_ONCE else await run_in_threadpool(json.loads, body)
        if isinstance(asked, dict):
            return asked
    return {}
