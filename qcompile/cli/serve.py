"""The command `serve`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from qcompile.cli import console
from qcompile.cli.models import opened
from qcompile.cli.options import Building, Json, Logging, ServedLoading, Serving, Source, command
from qcompile.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.server.exchanges import Sink


@command
def serve(
    out: Source,
    serving: Serving,
    logging: Logging,
    building: Building,
    loading: ServedLoading,
    json: Json = False,
) -> None:
    """Serve an OpenAI-compatible HTTP API: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /health,
    /metrics and others.

    \b
    Example:
      qcompile serve samples/pycode-26m
      qcompile serve out/pycode --port 8000
      curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def main("}'
    """
    try:
        from qcompile.runtime.server import app, logs
    except ModuleNotFoundError as error:
        raise ResourceError(f"serving needs {error.name}: pip install 'qcompile[serve]'") from error
    from qcompile.runtime.chat import chat_template

    keys = _api_keys(serving)
    logs.configure(logging.level, logging.form)
    say = logs.tell if logging.form == "json" else lambda text: console.log(f"qcompile: {text}")
    with (  # a port that is taken is refused before anything is built
        app.bind(serving.host, serving.port) as listening,
        _traces(logging.traces) as traces,
        opened(out, building, loading, max_batch=serving.max_batch) as (llm, artifact),
    ):
        name, url = serving.name or artifact.name, _url(listening.getsockname())

        def ready() -> None:
            console.heed_interrupts()
            if json:
                facts = {"context": llm.context, "max_batch": serving.max_batch}
                console.print_json_line({"url": url, "model": name, **facts})
            for line in _first_lines(llm, name, url):
                say(line)

        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a client that hangs up ends its answer, not the server
        template = chat_template(artifact.path, llm.manifest["files"])
        served = app.Served(
            llm,
            name,
            template,
            keys,
            serving.max_waiting,
            serving.origins or (),
            serving.tool_parser,
            serving.reasoning_parser,
            [*logs.sinks(), *traces(name)],
            limits=app.ConnectionLimits(*serving.limits),
            page=serving.page,
            isolate_keys=serving.isolate_keys,
        )
        if app.serve(served, listening, ready):
            say("ended by SIGTERM")


def _api_keys(serving: Serving) -> list[str]:
    """The keys of which clients must send one. Raises UsageError if one is empty."""
    keys = serving.api_keys or []
    stated = keys or [os.environ.get("QCOMPILE_API_KEY", "none")]  # typer drops an empty variable
    if not all(key.strip() for key in stated):
        raise UsageError("the API key is empty: give one, or unset --api-key and QCOMPILE_API_KEY to let everybody in")
    return keys


def _first_lines(llm: LLM, name: str, url: str) -> Iterator[str]:
    """What a server says when it begins to listen."""
    if llm.sampling_defaults:
        found = ", ".join(f"{option} {value}" for option, value in llm.sampling_defaults.items())
        yield f"defaults of generation_config.json: {found} (--generation-config)"
    yield f"{name} answers at {url} (Ctrl-C ends)"


@contextmanager
def _traces(endpoint: str | None) -> Iterator[Callable[[str], list[Sink]]]:
    """Gives what sends traces of a model, by its name, to a collector; nothing without one. Raises QCompileError."""
    if endpoint is None:
        yield lambda model: []
        return
    try:
        from qcompile.runtime.server.tracing import Tracing
    except ModuleNotFoundError as error:
        raise ResourceError(f"--otlp-endpoint needs {error.name}: pip install 'qcompile[otel]'") from error
    tracing = Tracing(endpoint)
    try:
        yield lambda model: [partial(tracing.trace, model)]
    finally:
        tracing.close()


def _url(address: Any) -> str:
    """The URL of a socket address (host, port, ...)."""
    host, port = address[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
