"""The command `serve`."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

from qcompile.cli import console, launching, replicas
from qcompile.cli.models import artifact_to_load, opened
from qcompile.cli.options import Building, Json, Logging, ServedLoading, Serving, Source, command
from qcompile.cli.serving import check_traces, defaults_lines, url_of
from qcompile.errors import ResourceError, UsageError


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
        from qcompile.cli.serve_model import ModelToServe, serve_model
        from qcompile.runtime.parsers.formats import check_parsers
        from qcompile.runtime.server import app, logs
    except ModuleNotFoundError as error:
        raise ResourceError(f"serving needs {error.name}: pip install 'qcompile[serve]'") from error

    keys = _api_keys(serving)
    _check_sleep(serving, keys)
    check_parsers(serving.tool_parser, serving.reasoning_parser)
    logs.configure(logging.level, logging.form)
    check_traces(logging)
    say = logs.tell if logging.form == "json" else lambda text: console.log(f"qcompile: {text}")
    limits = app.ConnectionLimits(*serving.limits)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a client that hangs up ends its answer, not the server
    if serving.replicas > 1:
        launching.check_alone(f"--replicas {serving.replicas}", loading.tensor_parallel_size)
        with app.bind(serving.host, serving.port) as listening:
            artifact = artifact_to_load(out, building, loading)
            named = replace(serving, name=serving.name or artifact.name)
            given_replicas = replicas.Given(artifact.path, named, logging, loading, keys, artifact.foreign)
            if replicas.serve(given_replicas, listening, url_of(listening.getsockname()), limits, say, json):
                say("ended by SIGTERM")
        return
    with (  # a port that is taken is refused before anything is built
        app.bind(serving.host, serving.port) as listening,
        opened(out, building, loading, max_batch=serving.max_batch) as (llm, artifact),
    ):
        name, url = serving.name or artifact.name, url_of(listening.getsockname())

        def ready() -> None:
            console.heed_interrupts()
            if json:
                facts = {"context": llm.context, "max_batch": serving.max_batch}
                console.print_json_line({"url": url, "model": name, **facts})
            for line in (*defaults_lines(llm), f"{name} answers at {url} (Ctrl-C ends)"):
                say(line)

        given = ModelToServe(llm, artifact.path, name, serving, logging, keys, serving.limits, listening)
        if serve_model(given, ready):
            say("ended by SIGTERM")


def _check_sleep(serving: Serving, keys: list[str]) -> None:
    """Raise UsageError if the model may sleep but no key guards that."""
    from qcompile.runtime.server.access import as_bytes, check_sleep

    if serving.enable_sleep:
        check_sleep(as_bytes(keys))


def _api_keys(serving: Serving) -> list[str]:
    """The keys of which clients must send one. Raises UsageError if one is empty."""
    keys = serving.api_keys or []
    stated = keys or [os.environ.get("QCOMPILE_API_KEY", "none")]  # typer drops an empty variable
    if not all(key.strip() for key in stated):
        raise UsageError("the API key is empty: give one, or unset --api-key and QCOMPILE_API_KEY to let everybody in")
    return keys
