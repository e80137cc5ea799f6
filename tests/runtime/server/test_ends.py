"""What clients get of a server that is told to end while it answers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import qcompile
from qcompile.runtime.server import app
from tests.runtime.server.test_server import Build, Client, slow_steps

LONG = {"prompt": "x", "max_tokens": 250, "temperature": 0.5, "logprobs": 1, "ignore_eos": True}


@pytest.mark.parametrize("impatient", [False, True])
def test_who_still_waits_is_told_that_the_server_is_closing(
    impatient: bool, tiny_artifact: Build, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stream, a whole answer, and a client that never sends all of its request; `impatient` asks twice."""
    made: list[Any] = []
    kind = app.Server
    monkeypatch.setattr(app, "Server", lambda *given: made.append(kind(*given)) or made[0])
    monkeypatch.setattr(app, "_LAST_SECONDS", 0.5)
    listening = app.bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    with (
        qcompile.load(tiny_artifact("w4a8"), threads=1) as llm,
        slow_steps(llm),
        ThreadPoolExecutor(3) as pool,
        socket.create_connection(("127.0.0.1", port)) as stalled,
    ):
        thread = threading.Thread(
            target=app.serve, args=(app.Served(llm, "tiny", drain_seconds=60 if impatient else 0.2), listening)
        )
        thread.start()
        client = Client(port, None)  # type: ignore[arg-type]
        stream = pool.submit(lambda: client.open("/v1/completions", LONG | {"stream": True}).read())
        whole = pool.submit(lambda: client.refused(503, LONG))
        while not made:
            time.sleep(0.01)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        stalled.sendall(head)
        while len(llm.engine.scheduler.running) < 2 or len(made[0].server_state.tasks) < 3:
            time.sleep(0.01)
        made[0].should_exit = True
        if impatient:
            while not made[0].servers or any(one.is_serving() for one in made[0].servers):
                time.sleep(0.01)
            made[0].force_exit = True
        *_, last, empty, end = stream.result(30).decode().split("\n")
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is closing"
        assert empty == end == "" and whole.result(30) == "the server is closing"
        thread.join(30)
        assert not thread.is_alive()
        stalled.settimeout(10)
        assert stalled.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        llm.engine.check()
        assert not llm.engine.busy
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_that_sigterm_ends_answers_its_streams_and_says_so(tiny_artifact: Build) -> None:
    command = [sys.executable, "-m", "qcompile", "serve", str(tiny_artifact("w4a8")), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = json.loads(process.stdout.readline())["url"]
        client = Client(int(url.rpartition(":")[2]), None)  # type: ignore[arg-type]
        streams = [client.open("/v1/completions", LONG | {"stream": True}) for _ in range(20)]
        process.send_signal(signal.SIGTERM)
        ends = [stream.read().decode().strip().split("\n")[-1] for stream in streams]
        assert all(end == "data: [DONE]" or json.loads(end[6:])["error"]["message"] for end in ends), ends
        assert process.wait(30) == 0
        assert process.communicate()[1].splitlines()[-1] == "qcompile: ended by SIGTERM"
    finally:
        process.kill()


SWALLOWED = """
import contextlib, os, signal, sys, time, uvicorn
from qcompile.__main__ import entry
from qcompile.runtime.server import app

def careless(make):
    def made(*given):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        return make(*given)
    return made

place = {"app": (app, "create_app"), "loop": (uvicorn.Config, "get_loop_factory")}[sys.argv[1]]
setattr(*place, careless(getattr(*place)))
sys.argv = ["qcompile", "serve", sys.argv[2], "--port", "0", "--json"]
entry()
"""


@pytest.mark.parametrize("place", ["app", "loop"])
def test_a_signal_that_is_swallowed_while_a_server_starts_ends_it(place: str, tiny_artifact: Build) -> None:
    """As by an object that ends: raised there, an exception is lost."""
    command = [sys.executable, "-c", SWALLOWED, place, str(tiny_artifact("w4a8"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    in_order = place == "loop"  # where the server was ready
    assert done.returncode == (0 if in_order else -signal.SIGTERM)
    assert done.stderr.splitlines()[-1] == "qcompile: ended by SIGTERM" and bool(done.stdout) == in_order
