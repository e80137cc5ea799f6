"""HTTP server of a model: OpenAI's completions and chat completions, health, and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import math
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from qcompile import __version__
from qcompile.errors import ResourceError, UsageError, shown
from qcompile.runtime.arguments import Prompt
from qcompile.runtime.chat import Render, closing_tokens
from qcompile.runtime.dialogue import DialogueFormat
from qcompile.runtime.infill import infill_tokens
from qcompile.runtime.llm import LLM
from qcompile.runtime.parsers.formats import check_parsers
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server import answers, api
from qcompile.runtime.server.access import admits, as_bytes, check_sleep, key_of
from qcompile.runtime.server.asking import Asker, owner
from qcompile.runtime.server.bodies import Bounded, most_bytes
from qcompile.runtime.server.chat_api import ChatRequest
from qcompile.runtime.server.chat_replies import ChatReply
from qcompile.runtime.server.connections import DEFAULT_LIMITS, ConnectionLimits, limited_protocol
from qcompile.runtime.server.embeddings import EmbeddingsRoute
from qcompile.runtime.server.errors import add_error_handlers
from qcompile.runtime.server.exchanges import ExchangeRecorder, Sink
from qcompile.runtime.server.interpreter import python_of_a_server
from qcompile.runtime.server.messages.routes import MessagesRoutes
from qcompile.runtime.server.metrics import Metrics
from qcompile.runtime.server.page import add_page, page_facts
from qcompile.runtime.server.replies import CompletionReply, Echo, Reply
from qcompile.runtime.server.responses.routes import ResponsesRoutes
from qcompile.runtime.server.schema import add_schema, answered
from qcompile.runtime.server.served import AnsweringModel, EngineService
from qcompile.runtime.server.service import Service
from qcompile.runtime.server.signals import SignalledServer
from qcompile.runtime.server.sleeping import SleepRoutes
from qcompile.runtime.server.structured import structure_field
from qcompile.runtime.server.tokenization import DetokenizeRequest, TokenizeRequest

DRAIN_SECONDS = 5.0
"""For open responses to complete after the signal to end, by default."""
_LAST_SECONDS = 1  # then, to send all remaining clients the reason
_IDLE_SECONDS = 75  # longer than proxies keep connections: a server that closes first may lose a request
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_READ = ["GET", "HEAD"]
_LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


@dataclass(frozen=True)
class Served:
    """What a server offers. name: the model's name for clients. api_key: one key, or several; None requires none.

    origins: web pages with scripts that may read responses, as `https://example.org`; `*` stands for all. Scripts of
    this machine's pages always may. tool_parser, reasoning_parser: formats of replies by name; None for those that the
    template shows. sinks: what takes the records of all requests. limits: those of connections. page: whether `/` is a
    page to chat with the model. isolate_keys: whether only requests with the same key share cached prefixes.
    drain_seconds: how long open responses may continue after the signal to end. enable_sleep: whether clients with a
    key may let the model sleep, and wake it.
    """

    llm: AnsweringModel
    name: str
    template: Render | None = None
    api_key: str | Sequence[str] | None = None
    max_waiting: int = 256
    origins: Sequence[str] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    sinks: Sequence[Sink] = ()
    limits: ConnectionLimits = DEFAULT_LIMITS
    page: bool = False
    isolate_keys: bool = False
    drain_seconds: float = DRAIN_SECONDS
    enable_sleep: bool = False

    @property
    def keys(self) -> list[bytes]:
        """The keys of which clients must send one; none lets everybody in."""
        return as_bytes(self.api_key)

    def __post_init__(self) -> None:
        if self.name in self.llm.engine.adapters:
            raise UsageError(f"adapter {self.name} has the model's name: give one of them another (--name, --lora)")
        if self.enable_sleep:
            check_sleep(self.keys)
            self.llm.engine.sleep.check_possible(1)

    def dialogues(self) -> DialogueFormat | None:
        """How conversations are written and read; None without a template. Raises UsageError for unknown parsers."""
        if self.template is None:
            check_parsers(self.tool_parser, self.reasoning_parser)
            return None
        return DialogueFormat(self.template, self.llm.tokenizer, self.tool_parser, self.reasoning_parser)


def serve(served: Served, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> bool:
    """Serve requests on a bound socket. Returns whether SIGTERM ended it.

    SIGINT is raised again when the server has ended. If the engine fails, raises its exception.

    `ready` is called once the server listens and a signal ends it in order.
    """
    served.dialogues()  # an unknown parser is refused before the model is lent
    assert isinstance(served.llm, LLM)
    service = Service(served.llm, served.max_waiting)
    try:
        return serve_by(served, service, listening, ready)
    finally:
        service.close()


def serve_by(
    served: Served,
    service: EngineService,
    listening: socket.socket,
    ready: Callable[[], None],
    server_class: type[Server] | None = None,
) -> bool:
    """`serve` by a service of the model. server_class: how signals and others end the server."""
    drain = served.drain_seconds
    config = server_config(served, service, math.ceil(drain + _LAST_SECONDS))
    server = (server_class or Server)(config, service, ready, drain)

    def failed(error: BaseException) -> None:
        server.should_exit = True

    service.failed = failed
    # Before `run`: if asyncio calls other handlers while it starts, what they raise may be lost.
    with python_of_a_server(), server.capture_signals():
        server.run(sockets=[listening])
    if service.failure:
        raise service.failure
    return server.terminated


def server_config(served: Served, service: EngineService, drain_seconds: int) -> uvicorn.Config:
    """How uvicorn serves the application of `create_app`.

    drain_seconds: how long open responses may continue after the signal to end.
    """
    return uvicorn.Config(
        create_app(served, service),
        http=limited_protocol(served.limits),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
    )


class Server(SignalledServer):
    """On shutdown, lets open responses continue for a while, then sends the remaining clients the reason of the end."""

    def __init__(
        self, config: uvicorn.Config, service: EngineService, ready: Callable[[], None], drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._service, self._ready, self._drain_seconds = service, ready, drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._drain_seconds, self._service.end)
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


def create_app(served: Served, service: EngineService) -> FastAPI:
    """Create the application. `service` owns `served.llm`."""
    app = FastAPI(
        title="qcompile", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    handlers = _Handlers(served, service)
    most = most_bytes(served.llm.context)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=served.origins,
        allow_origin_regex=_LOCAL_PAGES,
        allow_methods=[*_READ, "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )
    app.add_middleware(Bounded, responded=handlers.metrics.responded, most=most)
    if served.sinks:
        app.add_middleware(ExchangeRecorder, sinks=served.sinks)
    guarded = APIRouter(route_class=_guarded(handlers.authorize))
    # Routes are tried in this order, which takes a tenth of the time of a short request if all stand before its own.
    guarded.post("/v1/chat/completions", **answered(answers.ChatAnswer, streams=True))(handlers.chat)
    guarded.post("/v1/completions", **answered(answers.CompletionAnswer, streams=True))(handlers.complete)
    ResponsesRoutes(handlers.asker).add_to(guarded)
    MessagesRoutes(handlers.asker).add_to(guarded)
    EmbeddingsRoute(handlers.asker, service, served.llm.engine.executor).add_to(guarded)
    guarded.post("/tokenize", **answered(answers.TokenizeAnswer))(handlers.tokenize)
    guarded.post("/detokenize", **answered(answers.DetokenizeAnswer))(handlers.detokenize)
    _readable(guarded, "/v1/models", handlers.models, answered(answers.ModelsAnswer))
    _readable(guarded, "/v1/models/{name:path}", handlers.model, answered(answers.ModelEntry))
    _readable(guarded, "/version", handlers.version, answered(answers.VersionAnswer))
    if served.enable_sleep:
        SleepRoutes(service).add_to(guarded)
    app.include_router(guarded)
    _readable(app.router, "/health", handlers.health, answered(answers.HealthAnswer))
    _readable(app.router, "/metrics", handlers.show_metrics, answered(None, text="text/plain"))
    if served.page:
        llm = served.llm
        facts = page_facts(served.name, llm.context, served.template is not None, llm.sampling_defaults)
        add_page(app, facts, handlers.authorize)
    add_schema(app)
    add_error_handlers(app)
    return app


def _readable(router: APIRouter, path: str, handler: Callable[..., Any], told: dict[str, Any]) -> None:
    """Add a route for GET and HEAD, of which the schema has one."""
    router.get(path, **told)(handler)
    router.head(path, include_in_schema=False)(handler)


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


class _Handlers:
    """The handlers of all routes."""

    def __init__(self, served: Served, service: EngineService) -> None:
        self._served, self._service, self._llm = served, service, served.llm
        self._started = int(time.time())
        self.metrics = Metrics(service, served.name)
        self.asker = Asker(
            *(served.name, served.llm, service, self.metrics),
            *(served.dialogues(), served.llm.engine.adapters),
        )
        service.cancelled = self.metrics.cancelled
        if served.template:
            self._llm.end_at(closing_tokens(served.template, self._llm.tokenizer))

    def authorize(self, request: Request) -> None:
        """Raise HTTPException if an API key is required and the request has another or none.

        With `isolate_keys`, the key's holder owns the request.
        """
        sent = key_of(request.headers)
        if not admits(self._served.keys, sent):
            asked = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "wrong or missing API key: send `Authorization: Bearer KEY`", asked)
        if self._served.isolate_keys:
            owner.set(hashlib.sha256(sent).hexdigest())

    async def health(self) -> JSONResponse:
        """Status 200 while the engine runs or sleeps."""
        self._service.check()
        return JSONResponse({"status": "asleep" if self._service.asleep else "ok"})

    async def show_metrics(self) -> PlainTextResponse:
        """The metrics in Prometheus' format."""
        await self._service.refresh()
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> JSONResponse:
        """List the model that is served, and its adapters."""
        names = (None, *self.asker.adapters)
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in names]})

    async def model(self, name: str) -> JSONResponse:
        """Describe the model that is served or an adapter, if one has this name."""
        self.asker.check_model(name)
        return JSONResponse(self._entry(name))

    async def version(self) -> JSONResponse:
        """The version of qcompile."""
        return JSONResponse({"version": __version__})

    async def tokenize(self, asked: TokenizeRequest) -> JSONResponse:
        """The tokens of a text or a conversation."""
        self.asker.check_model(asked.model)
        dialogue = asked.dialogue()

        def tokens() -> dict[str, Any]:
            text = asked.prompt or "" if dialogue is None else self.asker.templates.turn(dialogue).prompt
            return asked.reply(self._llm, text)

        return JSONResponse(await run_in_threadpool(tokens))

    async def detokenize(self, asked: DetokenizeRequest) -> JSONResponse:
        """The text of tokens."""
        self.asker.check_model(asked.model)
        return JSONResponse(await run_in_threadpool(asked.reply, self._llm))

    def _entry(self, name: str | None = None) -> dict[str, Any]:
        of = {"created": self._started, "owned_by": "qcompile", "max_model_len": self._llm.context}
        parent = {"parent": self.asker.name} if name in self.asker.adapters else {}
        return {"id": self.asker.named(name), "object": "model", **of, **parent}

    async def complete(self, asked: api.CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        params = asked.params(self._llm.sampling_defaults)
        prompts = asked.prompts()
        if asked.suffix:
            prompts = list(await run_in_threadpool(infill_tokens, self._llm.tokenizer, prompts, asked.suffix))
        echo = Echo(prompts, self._llm.decode, params.truncate_prompt_tokens is not None) if asked.echo else None
        told = asked.prompt_logprobs is not None
        reply = CompletionReply(self.asker.named(asked.model), params.n, self._llm.token_bytes, echo, told)
        return await self._answer(request, asked, prompts, params, reply)

    async def chat(self, asked: ChatRequest, request: Request) -> Response:
        """Reply to a conversation."""
        templates = self.asker.templates
        given = asked.params(self._llm.sampling_defaults)
        turn = await run_in_threadpool(templates.turn, asked.dialogue(given.structure is not None))
        params = turn.params(given)
        reply = ChatReply(self.asker.named(asked.model), params.n, self._llm.token_bytes, asked.top_logprobs or 0, turn)
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
        self.asker.check_model(asked.model)
        if asked.stream:
            params.check_streamed()
            if asked.prompt_logprobs is not None:
                raise UsageError("prompt_logprobs are not possible in streams")
        how = asked.stream, special, structure_field(asked), asked.model
        answer = await self.asker.submit(prompts, params, *how)
        if asked.stream:
            events = reply.events(answer, self.metrics.finished, asked.usage_options)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        outputs = await self.asker.outputs(request, answer)
        if outputs is None:
            return Response(status_code=499)  # nobody reads it; proxies log this status for it
        return JSONResponse(reply.whole(outputs))
