"""`serve --http-process`: two processes that end together, however one of them ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import gone, running

LONG = {"prompt": "x", "max_tokens": None, "n": 250, "logprobs": 5, "ignore_eos": True, "stream": True}


@contextmanager
def serving(artifact: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server and its port."""
    command = [sys.executable, "-m", "qcompile", "serve", str(artifact), "--port", "0", "--json", "--http-process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "--threads", "1", *options], **pipes)  # type: ignore[call-overload]
    try:
        yield process, int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
    finally:
        process.kill()
        process.wait()


def opened(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.connection = connection  # type: ignore[attr-defined]  # kept open while it is read
    return response


def rest_of(stream: http.client.HTTPResponse) -> str:
    """What a stream still has, until its end or that of its connection."""
    try:
        return stream.read().decode()
    except http.client.IncompleteRead as error:
        return error.partial.decode()
    except OSError:
        return ""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, -1)])
def test_a_signal_lets_streams_end_with_a_reason(
    sent: signal.Signals, code: int, tiny_artifact: Callable[[str], Path]
) -> None:
    with serving(tiny_artifact("w4a8"), "--drain-seconds", "0.1") as (process, port):
        front = running(process.pid, "qcompile.cli.front")
        stream = opened(port, LONG)
        assert stream.readline().startswith(b"data: {")
        for one in (process.pid, front):  # a service manager signals all processes of a service
            os.kill(one, sent)
        last = rest_of(stream).rstrip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["message"] == "the server is closing"
        assert process.wait(10) == code and gone(front)
        answers, ended = process.stderr.read().splitlines()
        assert "answers at" in answers
        assert ended == "qcompile: " + ("interrupted" if sent == signal.SIGINT else f"ended by {sent.name}")


def test_the_second_signal_does_not_wait(tiny_artifact: Callable[[str], Path]) -> None:
    with serving(tiny_artifact("w4a8"), "--drain-seconds", "60") as (process, port):
        stream = opened(port, LONG)
        assert stream.readline().startswith(b"data: {")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize("which", ["engine", "front"])
def test_if_one_process_is_killed_the_other_ends_and_clients_know(
    which: str, tiny_artifact: Callable[[str], Path]
) -> None:
    with serving(tiny_artifact("w4a8")) as (process, port), ThreadPoolExecutor(1) as pool:
        front = running(process.pid, "qcompile.cli.front")
        stream = opened(port, LONG)
        assert stream.readline().startswith(b"data: {")
        rest = pool.submit(rest_of, stream)
        os.kill(front if which == "front" else process.pid, signal.SIGKILL)
        text = rest.result(5)
        assert "[DONE]" not in text and (which == "front" or "the process of the engine has ended" in text)
        if which == "front":
            assert process.wait(5) == 5
        assert gone(front)
        process.wait(5)
        _, ended = process.stderr.read().splitlines()
        wanted = "process that answers clients has ended (signal 9)" if which == "front" else "process of the engine"
        assert wanted in ended
        with pytest.raises(OSError, match="refused"):
            opened(port, LONG)


@pytest.mark.exhaustive
def test_a_front_that_does_not_answer_is_killed(tiny_artifact: Callable[[str], Path]) -> None:
    with serving(tiny_artifact("w4a8"), "--drain-seconds", "0.1") as (process, _):
        front = running(process.pid, "qcompile.cli.front")
        os.kill(front, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0 and gone(front)


def test_a_failure_when_the_server_is_ready_ends_both(tiny_artifact: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "qcompile", "serve", str(tiny_artifact("w4a8")), "--http-process", "--port", "0"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*command, "--json"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert ended.returncode == 5
    assert ended.stderr == "qcompile: No space left on device: none is left, free some\n"
