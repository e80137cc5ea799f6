"""An HTTP server in front of a model: OpenAI's completions and chat completions, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from qcompile.errors import LongPromptError, OverflowedError, QCompileError, ResourceError, UsageError, shown
from qcompile.runtime import api
from qcompile.runtime.chat import Render
from qcompile.runtime.llm import LLM, Prompt
from qcompile.runtime.metrics import Metrics
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.replies import ChatReply, CompletionReply, Reply
from qcompile.runtime.sampling import SamplingParams
from qcompile.runtime.service import Answer, BusyError, Service

MOST_BYTES, MOST_BYTES_A_TOKEN = 2 << 20, 16
"""Of a request's body, and for each token of the context where that is more: to parse it, all others' answers wait."""
_DRAIN_SECONDS = 5  # that open answers may take after the server was told to end
_LAST_SECONDS = 1  # that may then pass until everybody has been told
_IDLE_SECONDS = 75  # longer than proxies keep connections: one that the server closes may have a request under way
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_READ = ["GET", "HEAD"]


@dataclass(frozen=True)
class Served:
    """What a server offers. name: what clients call the model. api_key: None lets everybody in."""

    llm: LLM
    name: str
    template: Render | None = None
    api_key: str | None = None
    max_waiting: int = 256


def serve(served: Served, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Answer requests on a bound socket until SIGINT or SIGTERM. Raises what ended the engine, if it failed."""
    service = Service(served.llm, served.max_waiting)
    config = uvicorn.Config(
        create_app(served, service),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS + _LAST_SECONDS,
    )
    server = _Server(config, service)

    def failed(error: BaseException) -> None:
        server.should_exit = True

    service.failed = failed
    ready()
    try:
        server.run(sockets=[listening])
    finally:
        service.close()
    if service.failure:
        raise service.failure


class _Server(uvicorn.Server):
    """Told to end, it lets open answers go on for a while; who still waits then is told why nothing more comes."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self._service.end)
        await super().shutdown(sockets)
        self._service.end()  # told a second time, it does not wait for answers
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_SECONDS)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ResourceError, UsageError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ResourceError(f"cannot listen on port {port} of {host}: {error.strerror}; take another") from error
    except UnicodeError as error:  # what names of hosts cannot be spelled with, or an empty or long part of one
        raise UsageError(f"{shown(host)} cannot be the name of a host: give another (--host)") from error


def create_app(served: Served, service: Service) -> FastAPI:
    """The application. `service` owns `served.llm`."""
    app = FastAPI(title="qcompile", docs_url=None, redoc_url=None, openapi_url=None)
    front = _Front(served, service)
    most = max(MOST_BYTES, MOST_BYTES_A_TOKEN * served.llm.context)
    app.add_middleware(_Outer, metrics=front.metrics, most=most)
    app.api_route("/health", methods=_READ)(front.health)
    app.api_route("/metrics", methods=_READ)(front.show_metrics)
    guarded = APIRouter(route_class=_guarded(front.authorize))
    guarded.api_route("/v1/models", methods=_READ)(front.models)
    guarded.api_route("/v1/models/{name:path}", methods=_READ)(front.model)
    guarded.post("/v1/completions")(front.complete)
    guarded.post("/v1/chat/completions")(front.chat)
    app.include_router(guarded)
    app.add_exception_handler(QCompileError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


def _guarded(authorize: Callable[[Request], None]) -> type[APIRoute]:
    """A kind of route that asks for the key before a request is read, as a dependency would not."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                authorize(request)
                return await handle(request)

            return guarded

    return Guarded


class _UnknownModelError(UsageError):
    """A request names another model than the one there is."""


class _Front:
    """What answers requests."""

    def __init__(self, served: Served, service: Service) -> None:
        self._served, self._service, self._llm = served, service, served.llm
        self._started = int(time.time())
        self.metrics = Metrics(service)

    def authorize(self, request: Request) -> None:
        """Raises HTTPException where a key is asked for and another is given."""
        key = self._served.api_key
        given = request.headers.get("authorization", "")
        if given[:7].lower() == "bearer ":  # names of schemes may be written either way
            given = given[7:].strip()
        # Headers are bytes, which the framework reads as Latin-1; people's keys are UTF-8.
        if key is not None and not secrets.compare_digest(given.encode("latin-1"), key.encode()):
            asked = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "wrong or missing API key: send `Authorization: Bearer KEY`", asked)

    async def health(self) -> JSONResponse:
        """200 while the engine runs."""
        self._service.check()
        return JSONResponse({"status": "ok"})

    async def show_metrics(self) -> PlainTextResponse:
        """In Prometheus' format."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> JSONResponse:
        """The one there is, in a list."""
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, name: str) -> JSONResponse:
        """The one there is, by its name."""
        self._known(name)
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        name, most = self._served.name, self._llm.context
        return {"id": name, "object": "model", "created": self._started, "owned_by": "qcompile", "max_model_len": most}

    def _known(self, name: str) -> None:
        if name != self._served.name:
            raise _UnknownModelError(f"there is no model {name!r} here, only {self._served.name!r}")

    async def complete(self, asked: api.CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        params = asked.params()
        reply = CompletionReply(self._served.name, params.n)
        return await self._answer(request, asked, asked.prompts(), params, reply)

    async def chat(self, asked: api.ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        if self._served.template is None:
            raise UsageError(f"{self._served.name} has no chat template: use /v1/completions")
        messages = [message.plain() for message in asked.messages]
        prompt = await run_in_threadpool(self._served.template, messages)
        params = asked.params()
        reply = ChatReply(self._served.name, params.n, asked.top_logprobs or 0)
        return await self._answer(request, asked, [prompt], params, reply, special=False)

    async def _answer(
        self,
        request: Request,
        asked: api.Common,
        prompts: list[Prompt],
        params: SamplingParams,
        reply: Reply,
        special: bool = True,
    ) -> Response:
        if asked.model is not None:
            self._known(asked.model)
        self._service.admit(len(prompts) * params.n, params)
        tokens = await run_in_threadpool(lambda: [self._llm.encode(prompt, special=special) for prompt in prompts])
        answer = self._service.submit(tokens, params, partial=asked.stream)
        if asked.stream:
            events = reply.events(answer, self.metrics.finished, asked.wants_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        outputs = await _unless_gone(request, self._collect(answer))
        if outputs is None:
            return Response(status_code=499)  # nobody reads it; the number is what logs of proxies have for that
        return JSONResponse(reply.whole(outputs))

    async def _collect(self, answer: Answer) -> list[RequestOutput]:
        outputs = []
        try:
            async for output in answer:
                self.metrics.finished(output)
                outputs.append(output)
        finally:
            answer.cancel()
        return outputs


async def _unless_gone(request: Request, work: Coroutine[Any, Any, list[RequestOutput]]) -> list[RequestOutput] | None:
    """What `work` gives; None, and `work` cancelled, when the client hangs up first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError, QCompileError):
            await task


async def _hung_up(request: Request) -> None:
    """Returns when the client of a request, whose body was read, does."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """An error of ours as its status."""
    if isinstance(error, _UnknownModelError):
        return JSONResponse(api.failure(str(error), "invalid_request_error", "model_not_found", "model"), 404)
    if isinstance(error, UsageError):
        code = "context_length_exceeded" if isinstance(error, LongPromptError) else None
        return JSONResponse(api.failure(str(error), "invalid_request_error", code), 400)
    if isinstance(error, BusyError):
        return JSONResponse(api.failure(str(error), "rate_limit_error"), 429, {"Retry-After": "1"})
    status = 500 if isinstance(error, OverflowedError) else 503
    return JSONResponse(api.failure(str(error), "server_error"), status)


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    """One thing that is wrong with a request, by its place in it: a field that is none, or else the first."""
    assert isinstance(error, RequestValidationError)
    wrong = error.errors()
    unknown = [one for one in wrong if one["type"] == "extra_forbidden"]
    first = (unknown or wrong)[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    what = "is not supported" if unknown else first["msg"]
    if first["type"] == "json_invalid":
        place, what = "", f"not JSON at character {place}: {first.get('ctx', {}).get('error', 'malformed')}"
    elif not place and "json" not in request.headers.get("content-type", ""):
        what = "send JSON, with the header `Content-Type: application/json`"
    message = f"{place or 'the body'}: {what}"
    return JSONResponse(api.failure(message, "invalid_request_error", param=place or None), 400)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """No such path or method, no right key."""
    assert isinstance(error, HTTPException)
    told, path = str(error.detail), shown(request.url.path)
    if error.status_code == 404:
        told = f"there is nothing at {path}: use /v1/completions or /v1/chat/completions"
    if error.status_code == 405:
        told = f"{path} does not take {request.method}: use {(error.headers or {}).get('Allow')}"
    code = {401: "invalid_api_key", 404: "not_found"}.get(error.status_code)
    content = api.failure(told, "invalid_request_error", code)
    return JSONResponse(content, error.status_code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """A bug of ours, whose traceback goes to stderr."""
    return JSONResponse(api.failure(f"unexpected {type(error).__name__}, see the server's log", "server_error"), 500)


class _Outer:
    """Around the application: counts responses, refuses bodies of more than `most` bytes before they are held."""

    def __init__(self, app: Callable[..., Awaitable[None]], metrics: Metrics, most: int) -> None:
        self._app, self._metrics, self._most = app, metrics, most

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")[:18]
        length = int(announced) if announced.isdigit() else 0
        read, begun = 0, False

        async def bounded() -> dict[str, Any]:
            nonlocal read
            if length <= self._most:  # who sends more is refused before any of it comes
                message = await receive()
                read += len(message.get("body", b""))
            if max(length, read) > self._most:
                raise HTTPException(413, f"the request is larger than {self._most:,} bytes")
            return message

        async def counted(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                route = scope.get("route")
                path = route.path if route else "other"  # what clients make up must not become labels
                self._metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        try:
            await self._app(scope, bounded, counted)
        except asyncio.CancelledError:  # the server ends, and the client has not sent or read all it should
            if not begun:
                refusal = await _refused(Request(scope), ResourceError("the server is closing"))
                await refusal(scope, receive, counted)
