"""What the server tells of its requests: the access log, and how long they waited."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from qcompile.errors import UsageError
from qcompile.runtime.llm import LLM
from qcompile.runtime.server import logs
from qcompile.runtime.server.exchanges import Exchange
from tests.runtime.server.test_server import serving
from tests.support.fake import byte_tokenizer, fake_llm

Logged = Callable[[], list[str]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with fake_llm(tokenizer=byte_tokenizer()) as opened:
        yield opened


@contextmanager
def logged(level: str, form: str = "text") -> Iterator[Logged]:
    """The lines that are logged inside; the loggers are as before afterwards."""
    names = ("qcompile.server", "uvicorn", "opentelemetry")
    loggers = [logging.getLogger(name) for name in names]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    stream = io.StringIO()
    logs.configure(level, form, stream)
    try:
        yield lambda: stream.getvalue().splitlines()
    finally:
        for each, (handlers, propagate, number) in zip(loggers, before, strict=True):
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(number)


def soon(lines: Logged, count: int) -> list[str]:
    """The first `count` lines. A client may have its response before the line about it is written."""
    for _ in range(500):
        if len(lines()) >= count:
            break
        time.sleep(0.01)
    assert len(lines()) == count, lines()
    return lines()


def test_each_response_is_a_line(llm: LLM) -> None:
    asked = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "n": 2}
    with logged("info") as lines, serving(llm, sinks=logs.sinks(), api_key="geheim") as client:
        key = {"Authorization": "Bearer geheim"}
        client.ask("/v1/completions?x=1", asked, **key, **{"X-Request-Id": "a\xe9"})
        client.open("/v1/completions", asked | {"stream": True}, **key).read()
        client.ask("/v1/models")
        client.ask("/a%0Ab%22" + "c" * 5000)
        for _ in range(2):
            client.ask("/health")
        client.open("/metrics").read()
        whole, streamed, refused, unknown = soon(lines, 4)
    assert '127.0.0.1 "POST /v1/completions" 200 ' in whole and whole.endswith(' s, 3 + 10 tokens, id "a\\u00e9"')
    assert streamed.endswith(" s, 3 + 10 tokens") and " info " in streamed
    assert '"GET /v1/models" 401 ' in refused and "tokens" not in refused
    assert r'"GET /a\nb\"ccc' in unknown and 'c" 404 ' in unknown and len(unknown) < 400
    assert "geheim" not in "".join(lines())


def test_lines_of_json(llm: LLM) -> None:
    with logged("debug", "json") as lines, serving(llm, sinks=logs.sinks()) as client:
        logs.tell("it begins")
        client.ask("/health")
        client.complete("abc", max_tokens=5)
        begun, health, answered = (json.loads(line) for line in soon(lines, 3))
    assert (begun["message"], begun["level"]) == ("it begins", "info")
    assert (health["path"], health["level"]) == ("/health", "debug")
    assert answered.pop("time").endswith("Z") and 0 < answered.pop("seconds") < 60 and answered.pop("message")
    about = {"client": "127.0.0.1", "method": "POST", "path": "/v1/completions", "status": 200}
    counts = {"prompt_tokens": 3, "completion_tokens": 5}
    assert answered == {"level": "info", "logger": "qcompile.server"} | about | counts


def test_errors_are_lines_of_the_format(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the framework, too, with their traceback."""

    def broken(*given: object) -> None:
        raise ZeroDivisionError("planned")

    with logged("warning", "json") as lines, serving(llm, sinks=logs.sinks()) as client:
        client.complete("abc", max_tokens=5)
        monkeypatch.setattr("qcompile.runtime.server.app._Handlers._entry", broken)
        assert client.ask("/v1/models")[0] == 500
        (line,) = soon(lines, 1)
    told = json.loads(line)
    assert told["level"] == "error" and told["exception"].endswith("ZeroDivisionError: planned")


def test_who_hangs_up_is_told(llm: LLM) -> None:
    ended: list[Exchange] = []
    with logged("info") as lines, serving(llm, sinks=(*logs.sinks(), ended.append)) as client:
        asked = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True, "stream": True}
        response = client.open("/v1/completions", asked)
        response.readline()
        response.connection.close()  # type: ignore[attr-defined]
        response.close()
        (line,) = soon(lines, 1)
    assert line.endswith(" s, not sent to its end")
    assert ended[0].started <= ended[0].first_byte <= ended[0].ended and ended[0].route == "/v1/completions"


@pytest.mark.parametrize("level, form", [("loud", "text"), ("info", "xml")])
def test_unknown_names_are_refused(level: str, form: str) -> None:
    with pytest.raises(UsageError, match="take one of"):
        logs.configure(level, form)


def test_requests_that_wait_are_timed(llm: LLM) -> None:
    """The second of two where one runs at a time waits for the first."""
    with fake_llm(tokenizer=byte_tokenizer(), max_batch=1) as narrow, serving(narrow) as client:
        client.complete(["abc", "abd"], max_tokens=200)
        lines = client.open("/metrics").read().decode().splitlines()
    result = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{model_name="tiny"}'
    assert result[f"qcompile_queue_seconds_count{label}"] == "2.0"
    waited, total = (float(result[f"qcompile_{name}_seconds_sum{label}"]) for name in ("queue", "request"))
    assert total / 5 < waited < total
    assert all('model_name="tiny"' in name for name in result)
