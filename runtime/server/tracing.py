"""Traces of requests, which are sent to an OpenTelemetry collector: where the time of each request went."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from qcompile import __version__
from qcompile.errors import UsageError, shown
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.server.exchanges import POLLED, Exchange

_PATH = "/v1/traces"
_SEND_SECONDS = 5
"""How long one transfer to the collector may take, and thus how long an unreachable one may delay the server's end."""
Attributes = Mapping[str, str | int | bool]


class Tracing:
    """Sends a trace of each request: its span, and below it the spans of each prompt: queue, prefill and decode.

    endpoint: the collector's URL for OTLP over HTTP, without or with `/v1/traces`. Raises UsageError for a URL that is
    none.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "qcompile"), "service.version": __version__}
        )
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_SEND_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("qcompile", __version__)
        self._contexts = TraceContextTextMapPropagator()

    def trace(self, model: str, exchange: Exchange) -> None:
        """Send the trace of an exchange that has ended, as a part of its client's trace if the client told of one.

        model: the name of the model that is served.
        """
        if exchange.path in POLLED:
            return
        epoch = time.time() - time.monotonic()
        told = {name: value for name in ("traceparent", "tracestate") if (value := exchange.header(name))}
        name = f"{exchange.method} {exchange.route}" if exchange.route else exchange.method
        span = self._tracer.start_span(
            name,
            self._contexts.extract(told),
            SpanKind.SERVER,
            _attributes(exchange, model),
            start_time=_nanoseconds(epoch + exchange.started),
        )
        if exchange.status >= 500 or not exchange.whole:
            span.set_status(StatusCode.ERROR, "" if exchange.whole else "the response was not sent to its end")
        inside = set_span_in_context(span)
        for output in exchange.outputs:
            self._trace_prompt(output, inside, epoch)
        span.end(_nanoseconds(epoch + exchange.ended))

    def _trace_prompt(self, output: RequestOutput, inside: Context, epoch: float) -> None:
        times = output.metrics
        marks = (times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time)
        for name, begin, end in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            if begin and end:
                about = _PARTS[name](output)
                part = self._tracer.start_span(name, inside, attributes=about, start_time=_nanoseconds(epoch + begin))
                part.end(_nanoseconds(epoch + end))

    def close(self) -> None:
        """Send what was not sent yet, and end."""
        self._provider.shutdown()


def traces_url(endpoint: str) -> str:
    """The URL that takes traces. Raises UsageError for a URL that is none."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"--otlp-endpoint {shown(endpoint)}: give a URL as http://localhost:4318")
    bare = endpoint.rstrip("/")
    return bare if bare.endswith(_PATH) else bare + _PATH


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(exchange: Exchange, model: str) -> Attributes:
    """What a request's span tells, by the names of OpenTelemetry's conventions."""
    attributes: dict[str, str | int | bool] = {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "http.response.status_code": exchange.status,
        "gen_ai.request.model": model,
    }
    if exchange.route:
        attributes["http.route"] = exchange.route
    if exchange.client:
        attributes["client.address"] = exchange.client
    if exchange.outputs:
        attributes["gen_ai.usage.input_tokens"] = exchange.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = exchange.generated_tokens
    return attributes


def _drafts(output: RequestOutput) -> Attributes:
    attributes = {"qcompile.generated_tokens": output.generated_tokens}
    if output.speculation:
        attributes["qcompile.drafted_tokens"] = sum(output.speculation.drafted)
        attributes["qcompile.accepted_tokens"] = sum(output.speculation.accepted)
    return attributes


def _prompt(output: RequestOutput) -> Attributes:
    cached = output.metrics.cached_tokens
    return {"qcompile.prompt_tokens": len(output.prompt_token_ids), "qcompile.cached_tokens": cached}


_PARTS = {"queue": lambda output: {}, "prefill": _prompt, "decode": _drafts}
"""The parts of a prompt's time, and what the span of each tells."""
