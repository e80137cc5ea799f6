"""Ray Serve with two replicas of pycode-1m on this machine: one is killed under load, then all are replaced under load.

    python benchmarks/ray_serve.py [--requests 400] [--model samples/pycode-1m] [--recipe w4a8] [--out FILE]

Clients ask for completions, half of them as streams, and compare each text with the one that its prompt gets of a model
that runs alone. A request that was in flight on the killed replica may end with an error; no other may, and none may be
wrong. Exit code 4 if one is. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, build, write_result
from qcompile.errors import QualityError

ROOT = Path(__file__).parents[1]
CLIENTS, TOKENS = 16, 48
APPLICATION, MODEL = "qcompile", "pycode-1m"
_WAIT_SECONDS = 120.0


@dataclass
class Asking:
    """One request. status: of its response. error: its message, or that of its stream. began, ended: seconds."""

    prompt: str
    began: float = 0.0
    ended: float = 0.0
    status: int = 0
    text: str = ""
    error: str = ""


@dataclass
class Outcome:
    """What became of requests. lost: those that ended with an error though no replica was killed meanwhile."""

    requests: int = 0
    right: int = 0
    wrong: int = 0
    in_flight_errors: int = 0
    lost: int = 0
    seconds: float = 0.0
    median_ms: float = 0.0
    messages: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, asked: Sequence[Asking], expected: Mapping[str, str], killed: float | None) -> Outcome:
        """The outcome of requests. killed: when a replica was killed, if one was."""
        result = cls(len(asked))
        result.seconds = round(max(one.ended for one in asked) - min(one.began for one in asked), 2)
        result.median_ms = round(1e3 * statistics.median(one.ended - one.began for one in asked), 1)
        for one in asked:
            if not one.error:
                result.right += one.text == expected[one.prompt]
                result.wrong += one.text != expected[one.prompt]
            elif killed is not None and one.began < killed < one.ended:
                result.in_flight_errors += 1
            else:
                result.lost += 1
        result.messages = sorted({one.error for one in asked if one.error})
        return result


def prompts() -> list[str]:
    """Beginnings of Python files, of one to three blocks of the router."""
    lines = [json.loads(line) for line in (ROOT / "samples" / "prompts.jsonl").read_text().splitlines()]
    texts = [next(value for value in line.values() if isinstance(value, str)) for line in lines]
    return [f"# file {at}\n" + (texts[at % len(texts)] * 20)[: 250 * (1 + at % 3)] for at in range(24)]


def alone(artifact: Path, texts: Sequence[str]) -> dict[str, str]:
    """The completion of each prompt by a model that has one at a time."""
    with qcompile.load(artifact, max_batch=1, prefix_caching=False, threads=1) as llm:
        params = qcompile.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        return {text: llm.generate([text], params)[0].outputs[0].text for text in texts}


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """A cluster of Ray on this machine with Ray Serve; the URL of its proxy."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(artifact: Path, **more: Any) -> None:
    """Have the cluster serve an artifact by two replicas. more: further settings of the model."""
    from ray import serve

    from qcompile.deploy.ray_serve import app

    model = {"artifact": str(artifact), "name": MODEL, "replicas": 2} | more
    serve.run(app({"models": [model]}), name=APPLICATION)


def replica_processes() -> list[int]:
    """The processes of the model's replicas."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if command.startswith(f"ray::ServeReplica:{APPLICATION}:{MODEL}".encode()):
                processes.append(int(folder.name))
    return sorted(processes)


async def ask(client: aiohttp.ClientSession, asking: Asking, stream: bool) -> Asking:
    """Ask for one completion, whole or as a stream."""
    fields: dict[str, Any] = {"prompt": asking.prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    asking.began = time.monotonic()
    try:
        async with client.post("/v1/completions", json=fields | {"stream": stream}) as response:
            asking.status = response.status
            content = await response.text()
        _read(asking, content, stream)
    except (aiohttp.ClientError, ValueError, KeyError) as error:
        asking.error = f"{type(error).__name__}: {error}"
    asking.ended = time.monotonic()
    return asking


def _read(asking: Asking, content: str, stream: bool) -> None:
    """The text of a response, or its error."""
    if not (stream and asking.status == 200):
        answer = json.loads(content)
        asking.error = answer["error"]["message"] if "error" in answer else ""
        asking.text = "" if asking.error else answer["choices"][0]["text"]
        return
    events = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
    pieces = [json.loads(event) for event in events if event != "[DONE]"]
    asking.error = next((piece["error"]["message"] for piece in pieces if "error" in piece), "")
    if not asking.error and events[-1:] != ["[DONE]"]:
        asking.error = "the stream has no end"
    asking.text = "".join(piece["choices"][0]["text"] for piece in pieces if piece.get("choices"))


async def load(url: str, count: int, texts: Sequence[str], meanwhile: Callable[[], Awaitable[Any]]) -> list[Asking]:
    """`count` requests by CLIENTS clients, and something else once a third of them have ended."""
    draw = random.Random(1)
    left = [(Asking(draw.choice(texts)), bool(at % 2)) for at in range(count)]
    done: list[Asking] = []
    third = asyncio.Event()

    async def one(client: aiohttp.ClientSession) -> None:
        while left:
            done.append(await ask(client, *left.pop()))
            if len(done) >= count // 3:
                third.set()

    async def other() -> None:
        await third.wait()
        await meanwhile()

    async with aiohttp.ClientSession(url) as client:
        await asyncio.gather(other(), *(one(client) for _ in range(CLIENTS)))
    return done


async def metric(url: str, name: str) -> float:
    """The sum of a metric over all replicas."""
    async with aiohttp.ClientSession(url) as client, client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def both_answer(url: str, gone: Sequence[int] = ()) -> None:
    """Wait until two replicas answer, none of them a process of `gone`."""
    end = time.monotonic() + _WAIT_SECONDS
    async with aiohttp.ClientSession(url) as client:
        while True:
            health = await (await client.get("/health")).json()
            if sum(one["replicas"] for one in health.get("models", [])) == 2 and not {*gone} & {*replica_processes()}:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"after {_WAIT_SECONDS:g} s: {health}")
            await asyncio.sleep(0.2)


async def killed_under_load(url: str, count: int, expected: Mapping[str, str]) -> Outcome:
    """Requests while one of two replicas is killed."""
    await both_answer(url)
    before = replica_processes()
    moment: list[float] = []

    async def kill() -> None:
        os.kill(before[0], signal.SIGKILL)
        moment.append(time.monotonic())

    asked = await load(url, count, list(expected), kill)
    result = Outcome.of(asked, expected, moment[0])
    await both_answer(url, before[:1])
    return result


async def replaced_under_load(url: str, count: int, expected: Mapping[str, str], artifact: Path) -> Outcome:
    """Requests while both replicas are replaced by ones with other settings."""
    await both_answer(url)
    before = replica_processes()

    async def replace() -> None:
        await asyncio.to_thread(deploy, artifact, options={"max-batch": 8})

    asked = await load(url, count, list(expected), replace)
    await both_answer(url, before)
    return Outcome.of(asked, expected, None)


def main() -> int:
    """Run both; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--model", type=Path, default=ROOT / "samples" / "pycode-1m")
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--out", type=Path, default=RESULTS / "ray_serve.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = build(options.model, [options.recipe], Path(folder))[options.recipe]
        expected = alone(artifact, prompts())
        with cluster() as url:
            deploy(artifact)
            killed = asyncio.run(killed_under_load(url, options.requests, expected))
            counted = asyncio.run(metric(url, "qcompile_lost_requests_total"))
            replaced = asyncio.run(replaced_under_load(url, options.requests, expected, artifact))
    told: dict[str, Any] = {"ray": version("ray"), "model": options.model.name, "recipe": options.recipe, "replicas": 2}
    told |= {"clients": CLIENTS, "tokens": TOKENS, "one killed": asdict(killed), "counted by the front": counted}
    told |= {"both replaced": asdict(replaced)}
    print(json.dumps(told, indent=1))
    write_result(options.out, told)
    bad = killed.wrong + killed.lost + replaced.wrong + replaced.lost + replaced.in_flight_errors
    return QualityError.exit_code if bad else 0


if __name__ == "__main__":
    sys.exit(main())
