"""What the HTTP server reads of a client before its request is whole: sizes, times, and numbers of connections."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from qcompile.runtime.llm import LLM
from qcompile.runtime.server import connections
from qcompile.runtime.server.connections import ConnectionLimits
from tests.runtime.server.test_server import Client, serving
from tests.support.fake import byte_tokenizer, fake_llm

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with fake_llm(tokenizer=byte_tokenizer()) as llm, serving(llm) as opened:
        yield opened


@pytest.fixture
def llm() -> Iterator[LLM]:
    with fake_llm(tokenizer=byte_tokenizer()) as opened:
        yield opened


def connect(client: Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", client.port), timeout=20)


def ask(client: Client, request: bytes, most: int = 1 << 30) -> tuple[int, str]:
    """The status of the response to these bytes, and its message; 0 if the server closes without one.

    At most `most` bytes are sent, and none after the server has begun to respond.
    """
    with connect(client) as opened:
        return sent(opened, request[:most])


def sent(opened: socket.socket, request: bytes) -> tuple[int, str]:
    opened.settimeout(0.001)
    at = 0
    while at < len(request):
        try:
            at += opened.send(request[at : at + 65536], socket.MSG_NOSIGNAL)
        except TimeoutError:
            continue
        except OSError:
            break
    opened.settimeout(20)
    response = http.client.HTTPResponse(opened)
    try:
        response.begin()
    except (http.client.BadStatusLine, ConnectionError):
        return 0, ""
    result = json.loads(response.read())
    return response.status, result["error"]["message"] if "error" in result else ""


@pytest.mark.parametrize(
    ("request_bytes", "status", "message"),
    [
        (b"GET /" + b"a" * (50 << 20), 414, "longer than 16,384 bytes"),
        (b"GET /health?" + b"a" * 17000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "longer than 16,384 bytes"),
        (HEALTH + b"X: " + b"a" * (50 << 20), 431, "larger than 65,536 bytes"),
        (HEALTH + b"a" * (1 << 20), 431, "larger than 65,536 bytes"),
        (HEALTH + b"X: %s\r\n" % (b"a" * 30000) * 4, 431, "larger than 65,536 bytes"),
        (HEALTH + b"X: y\r\n" * 128 + b"\r\n", 431, "more than 128 header fields"),
        (b"\r\n" * 60000, 431, "larger than 65,536 bytes"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5;x=" + b"a" * (1 << 20), 431, "larger than 65,536 bytes"),
        (
            POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + b"X: y\r\n" * 200 + b"\r\n",
            431,
            "more than 128 header fields",
        ),
        (b"no HTTP\r\n\r\n", 400, "not HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not HTTP/1.1"),  # TLS
    ],
    ids=["line", "line2", "field", "name", "fields", "many", "lines", "chunk", "trailers", "text", "tls"],
)
def test_what_has_no_end_is_refused(client: Client, request_bytes: bytes, status: int, message: str) -> None:
    began = time.monotonic()
    got, told = ask(client, request_bytes)
    assert got == status and message in told
    assert client.ask("/health")[0] == 200 and time.monotonic() - began < 10


def test_what_is_just_small_enough_is_read(client: Client) -> None:
    assert ask(client, b"GET /health?" + b"a" * 16000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200
    assert ask(client, HEALTH + b"X: %s\r\n" % (b"a" * 60000) + b"\r\n")[0] == 200
    assert ask(client, HEALTH + b"X: y\r\n" * 127 + b"\r\n")[0] == 200


def test_a_body_in_many_chunks_is_read(client: Client) -> None:
    """The frames of its chunks are more bytes than a header may have."""
    text = BODY + b" " * 60000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    assert ask(client, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)[0] == 200


def test_requests_after_each_other_have_each_their_limits(client: Client) -> None:
    with connect(client) as opened:
        for _ in range(4):
            assert sent(opened, HEALTH + b"X: %s\r\n" % (b"a" * 50000) + b"\r\n")[0] == 200


def test_requests_that_wait_for_no_response_are_limited(client: Client) -> None:
    request = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with connect(client) as opened:
        opened.sendall(request * 10000, socket.MSG_NOSIGNAL)
        opened.settimeout(20)
        assert b"more than 16 requests came before their responses" in b"".join(iter(lambda: opened.recv(65536), b""))
    assert client.ask("/health")[0] == 200


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (b"", 0),
        (b"GET /hea", 408),
        (HEALTH, 408),
        (POST + b"Content-Length: 1000\r\n\r\n{", 408),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408),
        (HEALTH + b"\r\nGET", 200),
    ],
    ids=["nothing", "line", "field", "body", "chunk", "next"],
)
def test_a_request_that_does_not_arrive_is_refused(llm: LLM, part: bytes, status: int) -> None:
    with serving(llm, limits=ConnectionLimits(request_seconds=0.3)) as client, connect(client) as opened:
        began = time.monotonic()
        got, message = sent(opened, part)
        assert got == status and (status != 408 or "did not arrive within 0.3 seconds" in message)
        while opened.recv(65536):
            pass
        assert 0.2 < time.monotonic() - began < 10


def test_a_client_that_sends_now_and_then_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the start, and line ends before a request are part of it."""
    monkeypatch.setattr(connections, "_CLOSE_SECONDS", 0.1)
    for byte in (b"a", b"\r\n"):
        with serving(llm, limits=ConnectionLimits(request_seconds=0.4)) as client, connect(client) as opened:
            began = time.monotonic()
            with pytest.raises(OSError):
                while time.monotonic() - began < 10:
                    opened.sendall(byte, socket.MSG_NOSIGNAL)
                    time.sleep(0.05)
            assert time.monotonic() - began < 8


def test_a_response_may_take_longer_than_a_request(llm: LLM) -> None:
    """The limit does not end responses, nor connections that have had one."""
    with serving(llm, limits=ConnectionLimits(request_seconds=0.2)) as client:
        waiting = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
        for _ in range(2):
            waiting.request("GET", "/health")
            assert waiting.getresponse().read()
            time.sleep(0.5)
        response = client.open("/v1/completions", {"prompt": "x", "max_tokens": 200, "stream": True})
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_connections_are_limited(llm: LLM) -> None:
    """In all, and from one address; one that ends makes room."""
    for limits, message in (
        (ConnectionLimits(most=3), "the server has 3 connections"),
        (ConnectionLimits(most_per_address=3), "'127.0.0.1' has 3 connections here"),
    ):
        with serving(llm, limits=limits) as client, ExitStack() as opened:
            for _ in range(3):
                assert sent(opened.enter_context(connect(client)), HEALTH + b"\r\n")[0] == 200
            with connect(client) as one:
                status, told = sent(one, b"")
            assert status == 503 and message in told
            opened.close()
            for _ in range(100):
                if (status := ask(client, HEALTH + b"\r\n")[0]) == 200:
                    break
                time.sleep(0.05)
            assert status == 200


def test_connections_leave_files_for_other_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process may open too few, its limit is raised as far as it may be."""
    limit = (256, 1024)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limit)

    def setrlimit(which: int, wanted: tuple[int, int]) -> None:
        nonlocal limit
        limit = wanted

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert connections._files(100) == 100 and limit == (256, 1024)
    assert connections._files(500) == 500 and limit == (564, 1024)
    assert connections._files(4096) == 960 and limit == (1024, 1024)
    limit = (256, resource.RLIM_INFINITY)
    assert connections._files(4096) == 4096 and limit == (4160, resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\nX: ", POST + b"Content-Length: %d\r\n\r\n" % (100 << 20)], ids=["header", "body"]
)
def test_what_is_refused_is_not_read_for_long(client: Client, head: bytes) -> None:
    """It would take the processor time of other answers."""
    taken, piece = 0, b"z" * 65536
    with connect(client) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        opened.settimeout(0.3)
        opened.sendall(head)
        with pytest.raises(OSError):  # no more is taken, or the connection is cut
            while taken < 90 << 20:
                taken += opened.send(piece, socket.MSG_NOSIGNAL)
    most_in_sockets = 16 << 20
    assert connections._UNREAD < taken < connections._UNREAD + most_in_sockets
