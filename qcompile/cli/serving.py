"""What the command `serve` and the processes of its replicas share: what the options of the command mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from qcompile.cli.options import Logging, Serving
from qcompile.errors import ResourceError

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.server.exchanges import Sink


def served_options(serving: Serving) -> dict[str, Any]:
    """What the options of the command say of a server, as arguments of `runtime.server.app.Served`."""
    return {
        "max_waiting": serving.max_waiting,
        "origins": serving.origins or (),
        "tool_parser": serving.tool_parser,
        "reasoning_parser": serving.reasoning_parser,
        "page": serving.page,
        "isolate_keys": serving.isolate_keys,
        "drain_seconds": serving.drain_seconds,
        "enable_sleep": serving.enable_sleep,
    }


def defaults_lines(llm: LLM) -> Iterator[str]:
    """What a server says when it begins to listen, beside its address."""
    if llm.sampling_defaults:
        settings = ", ".join(f"{option} {value}" for option, value in llm.sampling_defaults.items())
        yield f"defaults of generation_config.json: {settings} (--generation-config)"


def check_traces(logging: Logging) -> None:
    """Raise ResourceError if traces are wanted and a package for them is missing."""
    if logging.traces is None:
        return
    try:
        from qcompile.runtime.server import tracing  # noqa: F401 - whether it can be imported
    except ModuleNotFoundError as error:
        raise ResourceError(f"--otlp-endpoint needs {error.name}: pip install 'qcompile[otel]'") from error


@contextmanager
def sinks_of(logging: Logging) -> Iterator[Callable[[str], list[Sink]]]:
    """Gives what takes the records of requests to a model, by its name: the access log, and traces. Raises
    QCompileError."""
    from qcompile.runtime.server import logs

    if logging.traces is None:
        yield lambda model: logs.sinks()
        return
    check_traces(logging)
    from qcompile.runtime.server.tracing import Tracing

    tracing = Tracing(logging.traces)
    try:
        yield lambda model: [*logs.sinks(), partial(tracing.trace, model)]
    finally:
        tracing.close()


def url_of(address: Any) -> str:
    """The URL of a socket address (host, port, ...)."""
    host, port = address[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
