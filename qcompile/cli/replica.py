"""The process of a replica: serves an artifact on a Unix socket, with the options that its parent sends.

    python -m qcompile.cli.replica < OPTIONS

The options are one line of JSON. When it is ready, the process prints its facts as a line of JSON. It ends on SIGTERM,
and when its standard input ends, as it does if its parent dies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qcompile.cli import console
from qcompile.cli.exits import guarded, leave
from qcompile.cli.options import Building, Logging, ServedLoading, Serving
from qcompile.errors import EXIT_SIGNAL

_CLIENTS = 4096
"""Connections of the router at once: more than it makes."""


def main() -> None:
    """Run the process."""

    def run() -> Any:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_SIGNAL + number))  # without a message
        sys.exit(guarded(_serve, [sys.stdin.readline()]))

    leave(run)


def _serve(arguments: Sequence[str]) -> None:
    options = json.loads(arguments[0])
    share, serving = options["share"], Serving(**options["serving"])
    if share["cores"]:
        os.sched_setaffinity(0, share["cores"])
    if share["gpus"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = share["gpus"]
    os.environ["FORWARDED_ALLOW_IPS"] = "*"  # uvicorn: the router tells the clients' addresses
    logging, loading = Logging(**options["logging"]), ServedLoading(**options["loading"])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _serve_on(
        options["socket"],
        Path(options["artifact"]),
        serving,
        logging,
        replace(loading, threads=share["threads"] or loading.threads),
        options["keys"],
        Building(rebuild=options["rebuild"]),
    )


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_on(
    path: str,
    artifact: Path,
    serving: Serving,
    logging: Logging,
    loading: ServedLoading,
    keys: Sequence[str],
    building: Building,
) -> None:
    """Serve the artifact at the path of a socket."""
    from qcompile.cli.models import opened
    from qcompile.cli.serve_model import ModelToServe, serve_model
    from qcompile.cli.serving import defaults_lines
    from qcompile.runtime.server import logs

    logs.configure(logging.level, logging.form)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
        opened(str(artifact), building, loading, max_batch=serving.max_batch) as (llm, artifact_used),
    ):
        listening.bind(path)

        def ready() -> None:
            console.print_json_line({"context": llm.context, "lines": list(defaults_lines(llm))})

        name = serving.name or artifact_used.name
        limits = serving.request_timeout, _CLIENTS, _CLIENTS
        serve_model(ModelToServe(llm, artifact_used.path, name, serving, logging, keys, limits, listening), ready)


if __name__ == "__main__":
    main()
