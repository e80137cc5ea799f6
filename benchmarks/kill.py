"""SIGKILL of a build and of each process of servers at random moments: what is left, and what clients see.

    python benchmarks/kill.py [--rounds 20] [--kinds build,server,replica,rank,apart] [--model samples/pycode-1m]
        [--out FILE]

A killed build must leave the artifact that was there, or none, and the next build removes what it left beside it. The
clients of a killed server must see an end within 5 seconds, and a server starts again on its port and gives the same
answers. The clients of a killed replica get their answer or an error within 5 seconds, and it starts again. Of a model
that two processes compute (`rank`), and of a server with a process for clients (`apart`), either process is killed:
clients see an end within 5 seconds, no process is left, and the model starts again. Exit code 4 if anything of this
fails.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from qcompile.artifact.reader import verify
from qcompile.errors import QualityError

COMMAND = [sys.executable, "-m", "qcompile"]
CLIENTS = 4
PATIENCE = 5.0
"""Seconds within which a client must see the end."""
ASKED = {"prompt": "def main(", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}


@dataclass
class Seen:
    """What the kills of one kind led to. slowest: the longest time from a kill to the end that a client saw."""

    kills: int = 0
    faults: list[str] = field(default_factory=list)
    clients: int = 0
    answered: int = 0
    slowest: float = 0.0

    def told(self) -> dict[str, Any]:
        """Figures for the result file."""
        return vars(self) | {"slowest": round(self.slowest, 3)}


# ---- builds --------------------------------------------------------------------------------------------


def builds(model: Path, folder: Path, rounds: int, chance: random.Random) -> Seen:
    """Kill builds; from the middle on, each is to replace an artifact."""
    seen, out = Seen(), folder / "artifact"
    command = [*COMMAND, "build", str(model), "-o", str(out), "--recipe", "w4a8", "-q"]
    start = time.monotonic()
    _run(command)
    lasts, present = time.monotonic() - start, False
    shutil.rmtree(out)
    for number in range(rounds):
        if number == rounds // 2:
            _run(command)
            present = True
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, 1.1 * lasts))
        process.kill()
        process.wait()
        seen.kills += 1
        had, present = present, out.exists()
        if had and not present:
            seen.faults.append("the artifact that was there is gone")
        seen.faults += verify(out) if present else []
    _run(command)
    seen.faults += verify(out) + [f"left over: {path.name}" for path in folder.iterdir() if path != out]
    return seen


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# ---- servers -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(artifact: Path, port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A server that may not answer yet."""
    command = [*COMMAND, "serve", str(artifact), "--port", str(port), "--json", "-q", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def port_of(process: subprocess.Popen[str]) -> int:
    """The port of a server, once it answers."""
    assert process.stdout
    return int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])


def answer(port: int) -> str:
    """The text of a stream; empty if it does not end as it should."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(ASKED), {"Content-Type": "application/json"})
        lines = connection.getresponse().read().decode().split("\n\n")
        if "data: [DONE]" not in lines:
            return ""
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    finally:
        connection.close()


class Clients:
    """Clients that ask at once, in threads. `wait` notes in `seen` what they saw after a kill."""

    def __init__(self, port: int, right: str) -> None:
        self._port, self._right = port, right
        self._ended: list[tuple[float, str]] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        text = answer(self._port)
        self._ended.append((time.monotonic(), text))

    def wait(self, seen: Seen, killed: float, cut: bool) -> None:
        """cut: whether an answer that goes on after the kill cannot end well."""
        for thread in self._threads:
            thread.join()
        for ended, text in self._ended:
            seen.clients += 1
            seen.answered += bool(text)
            if not text or cut:
                seen.slowest = max(seen.slowest, ended - killed)
                seen.faults += ["a client waited longer than 5 s"] * (ended - killed > PATIENCE)
            seen.faults += ["an answer is wrong"] * (text not in ("", self._right))


def servers(artifact: Path, rounds: int, chance: random.Random) -> Seen:
    """Kill servers while they start and while they answer; each starts on the port of the one before."""
    seen = Seen()
    with serving(artifact, 0) as process:
        start = time.monotonic()
        port = port_of(process)
        right, starts = answer(port), time.monotonic() - start
    for number in range(rounds):
        with serving(artifact, port) as process:
            if number % 4 == 0:  # while it starts
                time.sleep(chance.uniform(0, starts))
                process.kill()
            else:
                assert port_of(process) == port
                clients = Clients(port, right)
                time.sleep(chance.uniform(0, 0.5))
                killed = time.monotonic()
                process.kill()
                clients.wait(seen, killed, True)
            seen.kills += 1
    with serving(artifact, port) as process:
        seen.faults += ["after all kills, a server gives another answer"] * (answer(port_of(process)) != right)
    return seen


def replicas(artifact: Path, rounds: int, chance: random.Random) -> Seen:
    """Kill one of two replicas, again and again."""
    seen = Seen()
    with serving(artifact, 0, "--replicas", "2", "--threads", "2") as process:
        port = port_of(process)
        right = answer(port)
        for _ in range(rounds):
            pids = _both(process, port)
            clients = Clients(port, right)
            time.sleep(chance.uniform(0, 0.5))
            killed = time.monotonic()
            os.kill(chance.choice(pids), signal.SIGKILL)
            clients.wait(seen, killed, False)
            seen.kills += 1
        _both(process, port)
        seen.faults += ["after all kills, a replica gives another answer"] * (answer(port) != right)
    return seen


def _both(process: subprocess.Popen[str], port: int) -> list[int]:
    """The processes of both replicas, once they answer."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        told = json.loads(connection.getresponse().read())
        connection.close()
        if all(one["status"] == "ok" for one in told["replicas"]):
            return _children(process)
        time.sleep(0.1)


def _children(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a process has started."""
    of_threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(pid) for file in of_threads for pid in file.read_text(encoding="ascii").split()]


def pairs(artifact: Path, rounds: int, chance: random.Random, *options: str) -> Seen:
    """Kill one of two processes while they answer: the server's, or the one that it has started."""
    seen, port, right = Seen(), 0, ""
    for number in range(rounds + 1):
        with serving(artifact, port, "--threads", "1", *options) as process:
            port = port_of(process)
            follower = _children(process)[0]
            told = answer(port)
            right = right or told
            seen.faults += ["after a kill, they give another answer"] * (told != right or not told)
            if number == rounds:
                return seen
            clients = Clients(port, right)
            time.sleep(chance.uniform(0, 0.5))
            killed = time.monotonic()
            os.kill(chance.choice([process.pid, follower]), signal.SIGKILL)
            clients.wait(seen, killed, True)
            seen.kills += 1
            seen.faults += ["a process was left"] * (not _ends(process, follower))
    return seen


def _ends(process: subprocess.Popen[str], follower: int) -> bool:
    """Whether the server's process and the one that it has started end within seconds."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None and not Path(f"/proc/{follower}").exists():
            return True
        time.sleep(0.05)
    return False


def main() -> int:
    """Kill, and write the result file. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kinds", default="build,server,replica,rank,apart")
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "samples" / "pycode-1m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kill.json")
    given = parser.parse_args()
    from benchmarks.common import write_result

    chance, result, kinds = random.Random(given.seed), {}, given.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "served" / "artifact"
        _run([*COMMAND, "build", str(given.model), "-o", str(artifact), "-q"])
        if "build" in kinds:
            (Path(folder) / "built").mkdir()
            result["build"] = builds(given.model, Path(folder) / "built", given.rounds, chance).told()
        if "server" in kinds:
            result["server"] = servers(artifact, given.rounds, chance).told()
        if "replica" in kinds:
            result["replica"] = replicas(artifact, given.rounds, chance).told()
        if "rank" in kinds:
            divided = Path(folder) / "divided"
            recipe = ["--recipe", "bf16"]  # groups of inputs need not divide over ranks
            _run(
                [*COMMAND, "build", str(given.model), "-o", str(divided), "-q", *recipe, "--tensor-parallel-size", "2"]
            )
            result["rank"] = pairs(divided, given.rounds, chance).told()
        if "apart" in kinds:
            result["apart"] = pairs(artifact, given.rounds, chance, "--http-process").told()
    write_result(given.out, {"model": given.model.name, "seed": given.seed, **result})
    return QualityError.exit_code if any(kind["faults"] for kind in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
