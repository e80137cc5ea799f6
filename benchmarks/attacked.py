"""A server that is attacked while it serves: what good clients notice, and how much memory it takes.

    python benchmarks/attacked.py [--seconds 30] [--model samples/pycode-1m] [--out FILE]

Good clients ask for greedy completions one after the other, first alone, then during the attack, and alone again. Each
answer is compared with the first one of its prompt. The attack, again and again: connections that send a byte of their
header each second, conversations at which the model's chat template needs gigabytes or hours, bodies of 100 MB, and
headers of 50 MB. Attackers take processor time of the same machine, so latencies mean something only where cores are
left for them. Exit code 4 if an answer is wrong or lost, or the memory grows by more than 300 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile.cli.load_test.server import started
from qcompile.errors import QualityError

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-1m"
SLOW, BOMBS, CLIENTS = 200, 5, 4
BODY, HEADER, PIECE = 100 << 20, 50 << 20, 1 << 16
MOST_GROWTH = 300 << 20
PROMPTS = ["def main(", "import os\n", "class Reader:\n    def ", "for i in range(10):\n    ", "x = [", "# "]
TEMPLATE = """{%- set bomb = messages[0]['content'] -%}
{%- if bomb == '0' -%}{{ 'A' * 4000000000 }}
{%- elif bomb == '1' -%}{{ 9 ** (9 ** 9) }}
{%- elif bomb == '2' -%}{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}
{%- elif bomb == '3' -%}{{ (['B' * 100000] * 100000) | join('C') }}
{%- elif bomb == '4' -%}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- else -%}{{ bomb }}{%- endif -%}"""
"""A chat template that is as malicious as its conversations ask for."""


@dataclass
class Good:
    """What good clients saw in one phase: seconds of each request, and how many answers were wrong or missing."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0

    def told(self) -> dict[str, Any]:
        """Figures for the result file."""
        times = sorted(self.seconds)
        at = [round(times[int(share * (len(times) - 1))], 4) for share in (0.5, 0.99)] if times else [None, None]
        return {"requests": len(times), "p50": at[0], "p99": at[1], "wrong": self.wrong, "lost": self.lost}


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the server, which is cut in the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """The status and body of the response to a request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    async with connected(port) as (reader, writer):
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.read()
    top, _, rest = answer.partition(b"\r\n\r\n")
    return int(top.split(b" ", 2)[1]), rest


async def ask(port: int, known: dict[str, str], good: Good, until: float) -> None:
    """One good client."""
    while time.monotonic() < until:
        for prompt in PROMPTS:
            start = time.monotonic()
            try:
                status, body = await post(
                    port, "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0}
                )
            except (OSError, IndexError, ValueError):
                good.lost += 1
                continue
            good.seconds.append(time.monotonic() - start)
            text = json.loads(body)["choices"][0]["text"] if status == 200 else f"status {status}"
            good.wrong += known.setdefault(prompt, text) != text


# ---- attackers -----------------------------------------------------------------------------------------


async def slow(port: int) -> None:
    """A header that comes a byte a second."""
    async with connected(port) as (_, writer):
        for byte in b"GET /v1/models HTTP/1.1\r\nX: " + b"y" * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1)


async def bomb(port: int, number: int) -> None:
    """A conversation that the chat template cannot render."""
    status, _ = await post(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": str(number)}]})
    assert 400 <= status < 500, status


async def flood(port: int, head: bytes, size: int) -> None:
    """A request of which `size` bytes follow `head`, sent as fast as the server takes them."""
    async with connected(port) as (_, writer):
        writer.write(head)
        for _ in range(size // PIECE):
            writer.write(b"z" * PIECE)
            await writer.drain()


async def again(attack: Callable[[], Awaitable[None]], until: float) -> None:
    """Repeat an attack. What the server does to the attacker is right."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError, IndexError, ValueError):
            await attack()
        await asyncio.sleep(0.05)


def attackers(port: int, until: float) -> list[Awaitable[None]]:
    """All attacks at once."""
    body = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % BODY
    attacks: list[Callable[[], Awaitable[None]]] = [lambda: slow(port) for _ in range(SLOW)]
    attacks += [lambda number=number: bomb(port, number) for number in range(BOMBS)]  # type: ignore[misc]
    attacks += [lambda: flood(port, body, BODY), lambda: flood(port, b"GET / HTTP/1.1\r\nX: ", HEADER)]
    return [again(attack, until) for attack in attacks]


# ---- phases --------------------------------------------------------------------------------------------


def memory(process: int) -> int:
    """Bytes of memory of the server and its processes."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(folder.name) == process or int(fields[1]) == process:
                total += int(fields[21]) * 4096
    return total


async def watch(process: int, result: list[int]) -> None:
    """Note the memory of the server a few times a second."""
    while True:
        result.append(memory(process))
        await asyncio.sleep(0.2)


async def phase(port: int, process: int, known: dict[str, str], seconds: float, attacked: bool) -> tuple[Good, int]:
    """Good clients, with or without attackers; and the most memory that the server took."""
    good, until, sizes = Good(), time.monotonic() + seconds, list[int]()
    watcher = asyncio.ensure_future(watch(process, sizes))
    attacks = [asyncio.ensure_future(each) for each in (attackers(port, until) if attacked else [])]
    await asyncio.gather(*(ask(port, known, good, until) for _ in range(CLIENTS)))
    for task in (watcher, *attacks):
        task.cancel()
    await asyncio.gather(watcher, *attacks, return_exceptions=True)
    return good, max(sizes)


def listener(port: int) -> int:
    """The process that listens on a port: a child of this one."""
    children = Path(f"/proc/self/task/{Path('/proc/thread-self').resolve().name}/children").read_text().split()
    assert len(children) == 1, (port, children)
    return int(children[0])


def main() -> int:
    """Serve, and attack; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of three phases")
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--out", type=Path, default=RESULTS / "attacked.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, artifact = Path(folder) / "model", Path(folder) / "artifact"
        shutil.copytree(options.model, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        qcompile.build(str(model), artifact, recipe="w4a8")
        with started(str(artifact), []) as server:
            port = int(server["url"].rpartition(":")[2])
            process, known, phases, sizes = listener(port), dict[str, str](), {}, {}
            for name in ("before", "attack", "after"):
                good, sizes[name] = asyncio.run(phase(port, process, known, options.seconds, name == "attack"))
                phases[name] = good.told()
                print(name, phases[name], f"{sizes[name]:,} bytes", flush=True)
    growth = max(sizes.values()) - sizes["before"]
    attack = {"slow connections": SLOW, "template bombs": BOMBS, "body bytes": BODY, "header bytes": HEADER}
    write_result(options.out, {"attack": attack, "phases": phases, "memory_growth_bytes": growth})
    harmed = any(one["wrong"] or one["lost"] for one in phases.values())
    return QualityError.exit_code if harmed or growth > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
