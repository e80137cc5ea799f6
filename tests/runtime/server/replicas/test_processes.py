"""`serve --replicas`: processes behind one address, one of which is killed while it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qcompile.cli.replicas import cpu_shares, gpu_shares
from qcompile.errors import UsageError
from tests.runtime.server.test_server import Client

Build = Callable[[str], Path]
LONG = {"prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True, "n": 32}
"""It takes a replica longer than a busy machine takes to go on with the test: the context is 256 tokens."""


@pytest.fixture(scope="module")
def server(tiny_artifact: Build) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "qcompile", "serve", str(tiny_artifact("w4a8")), "--port", "0", "--json"]
    options = ["--replicas", "2", "--drain-seconds", "1", "--api-key", "k", "--enable-sleep"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        told = json.loads(process.stdout.readline())
        assert told["replicas"] == 2
        yield Client(int(told["url"].rpartition(":")[2]), None), process  # type: ignore[arg-type]
    finally:
        process.kill()
        process.wait()


def children(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a process has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def until(result: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (value := result()):
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)
    return value


def ready(client: Client, status: str = "ok") -> list[int]:
    """Numbers of the replicas that answer, or have another status."""
    return [one["replica"] for one in client.ask("/health")[1]["replicas"] if one["status"] == status]


def complete(client: Client, **more: Any) -> str:
    asked = {"prompt": "def main(", "max_tokens": 8, "temperature": 0} | more
    status, result = client.ask("/v1/completions", asked, Authorization="Bearer k")
    assert status == 200, result
    return result["choices"][0]["text"]


def test_a_killed_replica_costs_its_requests_alone_and_starts_again(
    server: tuple[Client, subprocess.Popen[str]],
) -> None:
    """If the others have fallen asleep meanwhile, it sleeps, too, and wakes with them."""
    client, process = server
    key = {"Authorization": "Bearer k"}
    until(lambda: len(ready(client)) == 2)
    assert client.ask("/v1/models")[0] == 401
    expected = complete(client)
    before = children(process)
    assert len(before) == 2
    streams = [client.open("/v1/completions", LONG, Authorization="Bearer k") for _ in range(2)]
    for stream in streams:
        assert stream.readline().startswith(b"data: ")
    os.kill(before[0], signal.SIGKILL)
    ends = [stream.read().decode().strip().split("\n")[-1] for stream in streams]
    assert sorted("send it again" in end for end in ends) == [False, True]
    assert "data: [DONE]" in ends
    assert all(complete(client) == expected for _ in range(4))
    assert client.ask("/sleep", b"", **key) == (200, {"is_sleeping": True})
    until(lambda: len(ready(client, "asleep")) == 2)
    assert "the model is asleep" in client.refused(503, {"prompt": "x"}, **key)
    assert client.ask("/wake_up", b"", **key) == (200, {"is_sleeping": False}) and len(ready(client)) == 2
    assert all(complete(client) == expected for _ in range(4))
    after = children(process)
    assert before[0] not in after and before[1] in after
    with client.open("/metrics") as metrics:
        text = metrics.read().decode()
    assert 'qcompile_lost_requests_total{model_name="tiny-w4a8",replica="0"} 1.0' in text
    assert 'qcompile_replica_restarts_total{model_name="tiny-w4a8",replica="0"} 1.0' in text
    for number in (0, 1):
        assert f'qcompile_running_samples{{model_name="tiny-w4a8",replica="{number}"}} 0.0' in text


@pytest.mark.exhaustive
def test_requests_of_a_stopped_replica_end_with_an_error(server: tuple[Client, subprocess.Popen[str]]) -> None:
    client, process = server
    until(lambda: len(ready(client)) == 2)
    expected, before = complete(client), children(process)
    streams = [client.open("/v1/completions", LONG, Authorization="Bearer k") for _ in range(2)]
    for stream in streams:
        assert stream.readline().startswith(b"data: ")
    os.kill(before[0], signal.SIGSTOP)
    ends = [stream.read().decode().strip().split("\n")[-1] for stream in streams]
    assert sorted("send it again" in end for end in ends) == [False, True]
    assert complete(client) == expected
    assert before[0] not in until(lambda: len(ready(client)) == 2 and children(process))


def test_sigterm_ends_all_in_order(server: tuple[Client, subprocess.Popen[str]]) -> None:
    """The last test of the file: streams get a second, and then the reason."""
    client, process = server
    until(lambda: len(ready(client)) == 2)
    pids = children(process)
    short = client.open("/v1/completions", LONG | {"max_tokens": 20}, Authorization="Bearer k")
    process.send_signal(signal.SIGTERM)
    assert short.read().decode().strip().endswith("data: [DONE]")
    assert process.wait(30) == 0
    said = process.communicate()[1].splitlines()
    assert said[-1] == "qcompile: ended by SIGTERM" and "replica 0 has ended (SIGKILL)" in "\n".join(said)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_replicas_end_with_their_parent_and_a_bad_artifact_is_told_once(tmp_path: Path, tiny_artifact: Build) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_artifact("w4a8").rglob("*"):
        if file.is_file():
            (broken / file.relative_to(tiny_artifact("w4a8"))).parent.mkdir(parents=True, exist_ok=True)
            (broken / file.relative_to(tiny_artifact("w4a8"))).write_bytes(file.read_bytes())
    next(broken.glob("*.safetensors")).write_bytes(b"x")
    command = [sys.executable, "-m", "qcompile", "serve", str(broken), "--port", "0", "--replicas", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert done.returncode == 6 and len(lines) == 2 and "the first replica has ended" in lines[1]


def test_cores_threads_and_gpus_are_divided() -> None:
    cores = [0, 1, 2, 4, 5]
    assert [share.cores for share in cpu_shares(cores, None, 2)] == [(0, 1), (2, 4, 5)]
    assert [share.cores for share in cpu_shares([3], None, 2)] == [(3,), (3,)]
    assert [share.threads for share in cpu_shares(cores, 5, 2)] == [2, 3]
    assert [share.threads for share in cpu_shares(cores, None, 2)] == [None, None]
    with pytest.raises(UsageError, match="give at least 2"):
        cpu_shares(cores, 1, 2)
    assert [share.gpus for share in gpu_shares(["0", "1", "2", "3"], 2, 2)] == ["0,1", "2,3"]
    with pytest.raises(UsageError, match="they need 4 GPUs, and this process may use 1 GPU"):
        gpu_shares(["0"], 2, 2)
