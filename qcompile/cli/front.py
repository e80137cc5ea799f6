"""The process that answers clients of `serve`, while another process has the model and its engine.

    python -m qcompile.cli.front LISTENING ASKS TOLD

The numbers are descriptors: the socket that clients connect to, the one for what is asked of the engine's process, and
the one for what that tells. Its first message has the options of the command and facts of the model.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.cli.exits import guarded, leave
from qcompile.cli.options import Logging, Serving
from qcompile.cli.serving import served_options, sinks_of

if TYPE_CHECKING:
    from qcompile.runtime.server.apart.remote import RemoteService
    from qcompile.runtime.server.app import Served


def main() -> None:
    """Run the process."""

    def run() -> Any:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the other process
            signal.signal(number, signal.SIG_IGN)
        sys.exit(guarded(_serve, sys.argv[1:]))

    leave(run)


def _serve(arguments: Sequence[str]) -> None:
    from qcompile.runtime.server.apart.front import Asks, Told, serve_front

    listening, asking, telling = (socket.socket(fileno=int(number)) for number in arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    asks, told = Asks(asking), Told(telling)
    first = told.first()
    if first is None:
        return
    _, options, facts = first
    with _served(options, facts, asks.send) as (served, service):
        serve_front(served, service, listening, asks, told)


@contextmanager
def _served(
    options: dict[str, Any], facts: dict[str, Any], ask: Callable[[Sequence[Any]], None]
) -> Iterator[tuple[Served, RemoteService]]:
    """What is served, and the engine's service. options: those that `serve_model` gives."""
    from qcompile.runtime.chat import chat_template
    from qcompile.runtime.server import app, logs
    from qcompile.runtime.server.apart.model import RemoteModel
    from qcompile.runtime.server.apart.remote import RemoteService

    root, files, name = Path(options["artifact"]), options["files"], options["name"]
    serving, logging = Serving(**options["serving"]), Logging(**options["logging"])
    logs.configure(logging.level, logging.form)
    with sinks_of(logging) as sinks:
        llm = RemoteModel(root, files, facts, lambda tokens: ask(("end_at", tokens)))
        limits = app.ConnectionLimits(*options["limits"])
        more = {"sinks": sinks(name), "limits": limits, **served_options(serving)}
        served = app.Served(llm, name, chat_template(root, files), options["keys"], **more)
        yield served, RemoteService(llm, serving.max_waiting, ask)


if __name__ == "__main__":
    main()
