"""Traces, as a collector gets them."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from qcompile.errors import UsageError
from qcompile.runtime.server.exchanges import Exchange
from qcompile.runtime.server.tracing import Tracing, traces_url
from tests.runtime.server.test_server import serving
from tests.support.fake import byte_tokenizer, fake_llm


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's URL, and the spans that it got, with the attributes of their service."""
    spans: list[Any] = []

    class Collecting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = {each.key: each.value.string_value for each in resource.resource.attributes}
                spans.extend((service, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collecting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_request_is_traced_with_its_parts() -> None:
    began = time.time_ns()
    with collector() as (url, spans), fake_llm(tokenizer=byte_tokenizer()) as llm:
        tracing = Tracing(url)
        with serving(llm, sinks=[partial(tracing.trace, "tiny")]) as client:
            client.ask("/v1/models", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
            client.ask("/health")
            client.complete(["abc", "de"], max_tokens=5)
            client.ask("/nothing")
        left = Exchange("PUT", "/left", None, {})
        left.ended = time.monotonic()
        tracing.trace("tiny", left)
        tracing.close()
    ended = time.time_ns()
    named: dict[str, list[Any]] = {}
    for service, span in spans:
        assert service["service.name"] == "qcompile"
        assert began <= span.start_time_unix_nano <= span.end_time_unix_nano <= ended
        named.setdefault(span.name, []).append(span)
    counts = {name: len(result) for name, result in named.items()}
    parts = {"queue": 2, "prefill": 2, "decode": 2}
    assert counts == parts | {"GET /v1/models": 1, "POST /v1/completions": 1, "GET": 1, "PUT": 1}
    (models,), (whole,) = named["GET /v1/models"], named["POST /v1/completions"]
    assert models.trace_id.hex() == "ab" * 16 and models.parent_span_id.hex() == "cd" * 8
    told = attributes(whole)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (5, 10)
    assert (told["http.route"], told["http.response.status_code"]) == ("/v1/completions", 200)
    assert attributes(named["GET"][0])["http.response.status_code"] == 404
    assert named["PUT"][0].status.code == 2 and whole.status.code == 0  # 2 is an error
    for name in parts:
        assert {span.parent_span_id for span in named[name]} == {whole.span_id}
    about = [attributes(span) for span in (*named["prefill"], *named["decode"])]
    assert sorted(each.get("qcompile.prompt_tokens", 0) for each in about) == [0, 0, 2, 3]
    assert [each.get("qcompile.generated_tokens") for each in about[2:]] == [5, 5]


def test_a_collector_that_is_away_delays_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with fake_llm(tokenizer=byte_tokenizer()) as llm:
        tracing = Tracing("http://127.0.0.1:9")  # the port of the discard service, where nothing listens
        with serving(llm, sinks=[partial(tracing.trace, "tiny")]) as client:
            assert client.complete("abc", max_tokens=5)
        begun = time.monotonic()
        tracing.close()
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize("given", ["localhost:4318", "ftp://x", "http://", "http://x:y", "http://x:0", ""])
def test_a_url_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="--otlp-endpoint"):
        traces_url(given)


def test_the_path_may_be_given() -> None:
    for given in ("http://x:4318", "http://x:4318/", "http://x:4318/v1/traces"):
        assert traces_url(given) == "http://x:4318/v1/traces"
    assert traces_url("https://x/otlp") == "https://x/otlp/v1/traces"
