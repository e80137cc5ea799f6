"""The application that clients see: it finds the model of a request, has one of its replicas answer, and tells how all
are. It knows replicas by what `ServedModel` says of them alone."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest

from qcompile.deploy.exchange import Asked, Head, Wanted
from qcompile.runtime.server.access import admits, key_of
from qcompile.runtime.server.asking import unless_gone
from qcompile.runtime.server.errors import UnknownModelError
from qcompile.runtime.server.replicas.affinity import blocks_of
from qcompile.runtime.server.replicas.application import application
from qcompile.runtime.server.replicas.forwarding import LostError, failure_event, response_id
from qcompile.runtime.server.replicas.metrics import merged
from qcompile.runtime.server.replicas.router import kept_response, parsed

_MOST_KEPT = 1 << 14
"""Most responses of which the front remembers the replica."""
_MODELS = "/v1/models"


class ServedModel(Protocol):
    """The replicas of one model."""

    names: Sequence[str]
    """The model's name, then those of its adapters."""
    keys: Sequence[bytes]
    """If any, clients must send one of them."""
    isolate_keys: bool

    def answer(self, asked: Asked, wanted: Wanted) -> AsyncGenerator[str | Head | bytes, None]:
        """The response of a replica: the replica's name, then as `exchange.respond`. Raises LostError if the replica
        ends meanwhile, other errors of qcompile if there is none."""

    async def texts(self, path: str) -> Mapping[str, str]:
        """What each replica that answers has at a path, by its name."""


class Front:
    """Chooses a model's replicas and passes on requests. most_bytes: largest body of a request."""

    def __init__(self, models: Sequence[ServedModel], most_bytes: int) -> None:
        self._models, self._most_bytes = models, most_bytes
        self._by_name = {name: model for model in models for name in model.names}
        self._kept: OrderedDict[str, tuple[ServedModel, str]] = OrderedDict()
        self._registry = CollectorRegistry()
        labels = ["model_name"]
        self._lost = Counter("qcompile_lost_requests", "In flight as it ended.", labels, registry=self._registry)
        for model in models:
            self._lost.labels(model.names[0])

    def app(self) -> FastAPI:
        """The application."""
        return application(self, self._most_bytes)

    async def health(self) -> JSONResponse:
        """Status 200 while each model has a replica that answers, and how many there are."""
        each = [{"model": one.names[0], "replicas": len(await one.texts("/health"))} for one in self._models]
        ok = all(one["replicas"] for one in each)
        return JSONResponse({"status": "ok" if ok else "down", "models": each}, 200 if ok else 503)

    async def show_metrics(self) -> PlainTextResponse:
        """The metrics of all replicas in Prometheus' format."""
        texts = {name: text for one in self._models for name, text in (await one.texts("/metrics")).items()}
        text = merged(texts) + generate_latest(self._registry)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def forward(self, request: Request) -> Response:
        """Have a replica answer. Raises LostError if it ends before it has begun, UnknownModelError."""
        key = key_of(request.headers)
        admitted = any(admits(one.keys, key) for one in self._models)
        body = await request.body() if admitted else b""  # else unread: a replica refuses the request by its key
        fields = await parsed(body)
        kept = self._kept.get(kept_response(request, fields))
        model, replica = kept or (self._model_of(request, fields), "")
        wanted = Wanted(tuple(blocks_of(fields, key.hex() if model.isolate_keys else "")), replica)
        answer = await unless_gone(request, self._answer(request, _asked(request, body), model, wanted))
        return answer if answer is not None else Response(status_code=499)

    def _model_of(self, request: Request, fields: Mapping[str, Any]) -> ServedModel:
        """The replicas of the model that a request names; those of the first model if it names none."""
        path = _path(request).decode("latin-1")
        named = path.removeprefix(f"{_MODELS}/") if path.startswith(f"{_MODELS}/") else fields.get("model")
        if len(self._models) == 1 or not isinstance(named, str):
            return self._models[0]
        if named not in self._by_name:
            raise UnknownModelError(f"there is no model {named!r}: the models are {', '.join(self._by_name)}")
        return self._by_name[named]

    async def _answer(self, request: Request, asked: Asked, model: ServedModel, wanted: Wanted) -> Response:
        if request.url.path == _MODELS and len(self._models) > 1:
            return await self._all_models(asked)
        items = model.answer(asked, wanted)
        streams = False
        try:
            replica = await anext(items)
            head = await anext(items)
            assert isinstance(replica, str) and isinstance(head, Head)
            streams = head.streams
            if streams:
                events = self._events(request.url.path, items, model, replica)
                answer: Response = StreamingResponse(events, head.status)
            else:
                content = b"".join([piece async for piece in items if isinstance(piece, bytes)])
                self._keep(request.url.path, content, model, replica)
                answer = Response(content, head.status)
            answer.raw_headers = list(head.headers)
            return answer
        except LostError:
            self._lost.labels(model.names[0]).inc()
            raise
        finally:
            if not streams:
                await items.aclose()

    async def _all_models(self, asked: Asked) -> Response:
        """The lists of all models as one; the response of a model that refuses the request."""
        entries: list[Any] = []
        for model in self._models:
            async with aclosing(model.answer(asked, Wanted())) as items:
                received = [item async for item in items]
            head, content = received[1], b"".join(piece for piece in received if isinstance(piece, bytes))
            assert isinstance(head, Head)
            if head.status != 200:
                return Response(content, head.status, media_type="application/json")
            entries += json.loads(content or b"{}").get("data", [])
        return JSONResponse({"object": "list", "data": entries})

    async def _events(
        self, path: str, items: AsyncGenerator[str | Head | bytes, None], model: ServedModel, replica: str
    ) -> AsyncIterator[bytes]:
        """The events of a stream; if the replica ends, one with the error, in the format of the path's API."""
        try:
            first = True
            async for piece in items:
                assert isinstance(piece, bytes)
                if first:
                    self._keep(path, piece, model, replica)
                first = False
                yield piece
        except LostError:
            self._lost.labels(model.names[0]).inc()
            yield failure_event(path).encode()
        finally:
            await items.aclose()

    def _keep(self, path: str, content: bytes, model: ServedModel, replica: str) -> None:
        """Remember the replica of a response that later requests can name."""
        if id := response_id(path, content):
            self._kept[id] = model, replica
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)


def _asked(request: Request, body: bytes) -> Asked:
    client = None if request.client is None else (request.client.host, request.client.port)
    query = request.scope.get("query_string", b"")
    return Asked(request.method, _path(request), query, tuple(request.headers.raw), body, client)


def _path(request: Request) -> bytes:
    """The path of a request below that of the application."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return raw.removeprefix(request.scope.get("root_path", "").encode())
