"""HTTP server of a model: OpenAI's completions and chat completions, health, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from qcompile import __version__
from qcompile.errors import LongPromptError, OverflowedError, QCompileError, ResourceError, UsageError, shown
from qcompile.runtime.arguments import Prompt
from qcompile.runtime.chat import Render, closing_tokens
from qcompile.runtime.dialogue import DialogueFormat
from qcompile.runtime.infill import infill_tokens
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import named_as
from qcompile.runtime.server import api
from qcompile.runtime.server.chat_api import ChatRequest
from qcompile.runtime.server.chat_replies import ChatReply
from qcompile.runtime.server.exchanges import ExchangeRecorder, Sink
from qcompile.runtime.server.metrics import Metrics
from qcompile.runtime.server.replies import CompletionReply, Echo, Reply
from qcompile.runtime.server.service import Answer, BusyError, Service
from qcompile.runtime.server.structured import structure_field
from qcompile.runtime.server.tokenization import DetokenizeRequest, TokenizeRequest

MOST_BYTES, MOST_BYTES_A_TOKEN = 2 << 20, 16
"""Largest request body: bytes, or bytes per token of the context if that is more. While a body is parsed, all other
responses wait."""
_DRAIN_SECONDS = 5  # for open responses to complete after the signal to end
_LAST_SECONDS = 1  # then, to send all remaining clients the reason
_ENCODED_AT_ONCE, _FOR_A_PROMPT = 2000, 100
"""Most characters, or tokens, that are encoded at once: a thread would cost more time. Each prompt counts as the second
number of characters in addition."""
_SWITCH_SECONDS = 1e-3
"""How long a thread may keep Python's lock while another thread waits for it. A request's thread releases the lock for
several system calls, and would wait 5 ms (Python's default) for the engine's thread after each."""
_IDLE_SECONDS = 75  # longer than proxies keep connections: a server that closes first may lose a request
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_READ = ["GET", "HEAD"]
_LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


@dataclass(frozen=True)
class Served:
    """What a server offers. name: the model's name for clients. api_key: None requires no key.

    origins: web pages whose scripts may read responses, as `https://example.org`; `*` stands for all. Pages of this
    machine may in any case. tool_parser, reasoning_parser: formats of replies by name; None for those that the template
    shows. sinks: what takes the records of all requests.
    """

    llm: LLM
    name: str
    template: Render | None = None
    api_key: str | None = None
    max_waiting: int = 256
    origins: Sequence[str] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    sinks: Sequence[Sink] = ()

    def dialogues(self) -> DialogueFormat | None:
        """How conversations are written and read; None without a template. Raises UsageError for unknown parsers."""
        if self.template is None:
            return None
        return DialogueFormat(self.template, self.llm.tokenizer, self.tool_parser, self.reasoning_parser)


def serve(served: Served, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve requests on a bound socket until SIGINT or SIGTERM. If the engine fails, raises its exception.

    `ready` is called once the server listens and a signal ends it in order.
    """
    served.dialogues()  # an unknown parser is refused before the model is lent
    service = Service(served.llm, served.max_waiting)
    config = uvicorn.Config(
        create_app(served, service),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS + _LAST_SECONDS,
    )
    server = _Server(config, service, ready)

    def failed(error: BaseException) -> None:
        server.should_exit = True

    service.failed = failed
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        # Before `run`: if asyncio calls other handlers while it starts, what they raise may be lost.
        with server.capture_signals():
            server.run(sockets=[listening])
    finally:
        sys.setswitchinterval(interval)
        service.close()
    if service.failure:
        raise service.failure


class _Server(uvicorn.Server):
    """On shutdown, lets open responses continue for a while, then sends the remaining clients the reason of the end."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self._service.end)
        await super().shutdown(sockets)
        self._service.end()  # after a second signal, uvicorn does not wait for responses
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_SECONDS)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free port. Raises ResourceError, UsageError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ResourceError(f"cannot listen on port {port} of {host}: {error.strerror}; take another") from error
    except UnicodeError as error:  # invalid characters, or a label of the name is empty or too long
        raise UsageError(f"{shown(host)} cannot be the name of a host: give another (--host)") from error
    # Connections inherit this; asyncio sets it for sockets that name their protocol only. Without it a response of
    # two writes waits 40 ms for the client to acknowledge the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def create_app(served: Served, service: Service) -> FastAPI:
    """Create the application. `service` owns `served.llm`."""
    app = FastAPI(title="qcompile", docs_url=None, redoc_url=None, openapi_url=None)
    handlers = _Handlers(served, service)
    most = max(MOST_BYTES, MOST_BYTES_A_TOKEN * served.llm.context)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=served.origins,
        allow_origin_regex=_LOCAL_PAGES,
        allow_methods=[*_READ, "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )
    app.add_middleware(_Middleware, metrics=handlers.metrics, most=most)
    if served.sinks:
        app.add_middleware(ExchangeRecorder, sinks=served.sinks)
    app.api_route("/health", methods=_READ)(handlers.health)
    app.api_route("/metrics", methods=_READ)(handlers.show_metrics)
    guarded = APIRouter(route_class=_guarded(handlers.authorize))
    guarded.api_route("/v1/models", methods=_READ)(handlers.models)
    guarded.api_route("/v1/models/{name:path}", methods=_READ)(handlers.model)
    guarded.api_route("/version", methods=_READ)(handlers.version)
    guarded.post("/tokenize")(handlers.tokenize)
    guarded.post("/detokenize")(handlers.detokenize)
    guarded.post("/v1/completions")(handlers.complete)
    guarded.post("/v1/chat/completions")(handlers.chat)
    app.include_router(guarded)
    app.add_exception_handler(QCompileError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


def _guarded(authorize: Callable[[Request], None]) -> type[APIRoute]:
    """A route class that checks the API key before the request's body is read; a dependency would do so after."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                authorize(request)
                return await handle(request)

            return guarded

    return Guarded


class _UnknownModelError(UsageError):
    """A request names another model than the one served."""


class _Handlers:
    """The handlers of all routes."""

    def __init__(self, served: Served, service: Service) -> None:
        self._served, self._service, self._llm = served, service, served.llm
        self._started = int(time.time())
        self._dialogues = served.dialogues()
        self.metrics = Metrics(service, served.name)
        service.cancelled = self.metrics.cancelled
        if served.template:
            self._llm.end_at(closing_tokens(served.template, self._llm.tokenizer))

    def authorize(self, request: Request) -> None:
        """Raise HTTPException if an API key is required and the request has another or none."""
        key = self._served.api_key
        given = request.headers.get("authorization", "")
        if given[:7].lower() == "bearer ":  # scheme names are case-insensitive
            given = given[7:].strip()
        # The framework decodes headers as Latin-1, but keys are UTF-8.
        if key is not None and not secrets.compare_digest(given.encode("latin-1"), key.encode()):
            asked = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "wrong or missing API key: send `Authorization: Bearer KEY`", asked)

    async def health(self) -> JSONResponse:
        """Status 200 while the engine runs."""
        self._service.check()
        return JSONResponse({"status": "ok"})

    async def show_metrics(self) -> PlainTextResponse:
        """The metrics in Prometheus' format."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> JSONResponse:
        """List the one model that is served."""
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, name: str) -> JSONResponse:
        """Describe the model that is served, if it has this name."""
        self._known(name)
        return JSONResponse(self._entry())

    async def version(self) -> JSONResponse:
        """The version of qcompile."""
        return JSONResponse({"version": __version__})

    async def tokenize(self, asked: TokenizeRequest) -> JSONResponse:
        """POST /tokenize."""
        self._check_model(asked.model)
        dialogue = asked.dialogue()

        def tokens() -> dict[str, Any]:
            text = asked.prompt or "" if dialogue is None else self._templates.turn(dialogue).prompt
            return asked.reply(self._llm, text)

        return JSONResponse(await run_in_threadpool(tokens))

    async def detokenize(self, asked: DetokenizeRequest) -> JSONResponse:
        """POST /detokenize."""
        self._check_model(asked.model)
        return JSONResponse(await run_in_threadpool(asked.reply, self._llm))

    @property
    def _templates(self) -> DialogueFormat:
        """How conversations are written. Raises UsageError without a chat template."""
        if self._dialogues is None:
            raise UsageError(f"{self._served.name} has no chat template: use /v1/completions")
        return self._dialogues

    def _entry(self) -> dict[str, Any]:
        name, most = self._served.name, self._llm.context
        return {"id": name, "object": "model", "created": self._started, "owned_by": "qcompile", "max_model_len": most}

    def _check_model(self, name: str | None) -> None:
        """Raise UsageError for a request that names another model than the one served."""
        if name is not None:
            self._known(name)

    def _known(self, name: str) -> None:
        if name != self._served.name:
            raise _UnknownModelError(f"there is no model {name!r} here, only {self._served.name!r}")

    async def complete(self, asked: api.CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        params = asked.params(self._llm.sampling_defaults)
        prompts = asked.prompts()
        if asked.suffix:
            prompts = list(await run_in_threadpool(infill_tokens, self._llm.tokenizer, prompts, asked.suffix))
        echo = Echo(prompts, self._llm.decode, params.truncate_prompt_tokens is not None) if asked.echo else None
        told = asked.prompt_logprobs is not None
        reply = CompletionReply(self._served.name, params.n, self._llm.token_bytes, echo, told)
        return await self._answer(request, asked, prompts, params, reply)

    async def chat(self, asked: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        templates = self._templates
        given = asked.params(self._llm.sampling_defaults)
        turn = await run_in_threadpool(templates.turn, asked.dialogue(given.structure is not None))
        params = turn.params(given)
        reply = ChatReply(self._served.name, params.n, self._llm.token_bytes, asked.top_logprobs or 0, turn)
        reply.tells_prompt = asked.prompt_logprobs is not None
        return await self._answer(request, asked, [turn.prompt], params, reply, special=False)

    async def _answer(
        self,
        request: Request,
        asked: api.Common,
        prompts: list[Prompt],
        params: SamplingParams,
        reply: Reply,
        special: bool = True,
    ) -> Response:
        self._check_model(asked.model)
        if asked.stream:
            params.check_streamed()
            if asked.prompt_logprobs is not None:
                raise UsageError("prompt_logprobs are not possible in streams")
        self._service.admit(len(prompts) * params.generated.n, params)
        tokens = await self._encoded(prompts, special, params)
        # Compiled in a thread, as it may take longer than other responses should wait.
        grammars = self._llm.engine.grammars
        with named_as(structure_field(asked)):
            grammar = await run_in_threadpool(grammars.compile, params.structure) if params.structure else None
        answer = self._service.submit(tokens, params, asked.stream, grammar)
        if asked.stream:
            events = reply.events(answer, self.metrics.finished, asked.usage_options)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        outputs = await _unless_gone(request, self._collect(answer))
        if outputs is None:
            return Response(status_code=499)  # nobody reads it; proxies log this status for it
        return JSONResponse(reply.whole(outputs))

    async def _encoded(self, prompts: list[Prompt], special: bool, params: SamplingParams) -> list[list[int]]:
        """The prompts' tokens. Long texts are encoded in a thread, so that other responses continue."""

        def encode() -> list[list[int]]:
            return [self._llm.encode(prompt, special=special, params=params) for prompt in prompts]

        texts = [prompt for prompt in prompts if isinstance(prompt, str | list)]  # anything else is refused
        size = _FOR_A_PROMPT * len(prompts) + sum(map(len, texts))
        return encode() if size <= _ENCODED_AT_ONCE else await run_in_threadpool(encode)

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
    """The result of `work`; if the client disconnects first, cancels `work` and returns None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError, QCompileError):
            await task


async def _disconnected(request: Request) -> None:
    """Return when the client of a request disconnects. The body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """The response to an error of qcompile."""
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
    """Report one error of a malformed request with its position: an unknown field, or else the first error."""
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
    """The response to an unknown path, a wrong method, or a wrong API key."""
    assert isinstance(error, HTTPException)
    message, path = str(error.detail), shown(request.url.path)
    if isinstance(error.__cause__, RecursionError):
        message = "the body: its JSON is nested too deeply"
    if error.status_code == 404:
        message = f"there is nothing at {path}: use /v1/completions or /v1/chat/completions"
    if error.status_code == 405:
        message = f"{path} does not take {request.method}: use {(error.headers or {}).get('Allow')}"
    code = {401: "invalid_api_key", 404: "not_found"}.get(error.status_code)
    content = api.failure(message, "invalid_request_error", code)
    return JSONResponse(content, error.status_code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """The response to an unexpected exception. Its traceback is written to stderr."""
    return JSONResponse(api.failure(f"unexpected {type(error).__name__}, see the server's log", "server_error"), 500)


class _Middleware:
    """Middleware that counts responses, and refuses bodies of more than `most` bytes before they are held in memory."""

    def __init__(self, app: Callable[..., Awaitable[None]], metrics: Metrics, most: int) -> None:
        self._app, self._metrics, self._most = app, metrics, most

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")[:18]
        length = int(announced) if announced.isdigit() else 0
        read, started = 0, False

        async def bounded() -> dict[str, Any]:
            nonlocal read
            if length <= self._most:  # a larger announced body is refused unread
                message = await receive()
                read += len(message.get("body", b""))
            if max(length, read) > self._most:
                raise HTTPException(413, f"the request is larger than {self._most:,} bytes")
            return message

        async def counted(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                route = scope.get("route")
                path = route.path if route else "other"  # arbitrary paths must not become labels
                self._metrics.responded(path, message["status"])
            await send(message)

        try:
            await self._app(scope, bounded, counted)
        except asyncio.CancelledError:  # shutdown, while the client still sends or reads
            if not started:
                refusal = await _refused(Request(scope), ResourceError("the server is closing"))
                await refusal(scope, receive, counted)
