"""Serves a loaded model, with its HTTP server in the same process or in one of its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qcompile.cli.options import Logging, Serving
from qcompile.cli.serving import served_options, sinks_of

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM


@dataclass(frozen=True)
class ModelToServe:
    """A loaded model, and how it is served. artifact: its folder. name: for clients. limits: the fields of
    ConnectionLimits. listening: the socket that clients connect to."""

    llm: LLM
    artifact: Path
    name: str
    serving: Serving
    logging: Logging
    keys: Sequence[str]
    limits: tuple[float, int, int]
    listening: socket.socket


def serve_model(given: ModelToServe, ready: Callable[[], None]) -> bool:
    """Serve a model until a signal, with its HTTP server in this process or in one of its own.

    Returns whether the signal was SIGTERM; SIGINT is raised again. ready: called when the server listens. Raises
    QCompileError.
    """
    from qcompile.runtime.chat import chat_template
    from qcompile.runtime.server import app

    llm, serving, limits = given.llm, given.serving, app.ConnectionLimits(*given.limits)
    files = llm.manifest["files"]
    served = app.Served(
        llm, given.name, chat_template(given.artifact, files), given.keys, limits=limits, **served_options(serving)
    )
    apart = not llm.threads if serving.http_process is None else serving.http_process
    if not apart:
        with sinks_of(given.logging) as sinks:
            return app.serve(replace(served, sinks=sinks(given.name)), given.listening, ready)
    from qcompile.runtime.server.apart.host import EngineHost
    from qcompile.runtime.server.apart.process import FrontProcess, serve_apart

    served.dialogues()  # an unknown parser is refused before the model is lent
    options = {
        "artifact": os.fsdecode(given.artifact.resolve()),
        "files": files,
        "name": given.name,
        "serving": asdict(replace(serving, api_keys=None)),
        "logging": asdict(given.logging),
        "limits": given.limits,
        "keys": list(given.keys),
    }
    front = FrontProcess("qcompile.cli.front", given.listening)
    with contextlib.closing(front):
        host = EngineHost(llm, serving.max_waiting, front.tell)
        return serve_apart(host, front, options, serving.drain_seconds, ready)
