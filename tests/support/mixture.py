"""Requests of many kinds to one server, each with the answer that it must have, and what came of them.

All are greedy or drawn with a seed, so that a request has one right answer, whatever runs beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

TEMPLATE = """{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}
{% endfor %}assistant:"""
"""A chat template for checkpoints without one."""
BEGINNINGS = [
    "def main(",
    "import os\n",
    "class Reader:\n    def ",
    "for i in range(10):\n    ",
    "x = [",
    "# ",
    "try:",
    "a = {",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
PATTERN = "[a-z]{2,6}(_[a-z]{2,6}){1,3}"
_COUNTED = {"include_usage": True}
CUT_AFTER = 2
"""Pieces after which a client of the kind `cut` goes away."""
_SECONDS = 120.0
"""Longest time that a client waits: far more than a queue of the largest loads takes."""


@dataclass(frozen=True)
class Case:
    """A request: its kind, the fields, and the path. cut: the client leaves in the middle of the answer."""

    kind: str
    body: dict[str, Any]
    path: str = "/v1/completions"
    cut: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a request. text: of the answer, or of what came before the client left. problem: why there is no
    whole answer, empty if there is. status: of HTTP, 0 without a response. tokens: of the answer, if it is whole."""

    text: str
    problem: str
    status: int
    tokens: int
    seconds: float


def completion(prompt: str, tokens: int, stream: bool) -> Case:
    """A greedy completion of `tokens` tokens, whole or in a stream with counts."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return Case("completion", body | ({"stream": True, "stream_options": _COUNTED} if stream else {}))


def cases(tokens: int, long_tokens: int, adapter: str) -> list[Case]:
    """A mixture of all kinds. tokens: of an answer. long_tokens: of a long prompt. adapter: name of one."""
    result = []
    for number, text in enumerate(BEGINNINGS):
        plain = {"prompt": text, "max_tokens": tokens, "temperature": 0}
        shape = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
        long = [1 + (number + 7 * at) % 250 for at in range(long_tokens)]
        result += [
            Case("plain", plain),
            Case("stream", plain | {"stream": True, "max_tokens": 2 * tokens, "ignore_eos": True}),
            Case("cut", plain | {"stream": True, "max_tokens": 4 * tokens, "ignore_eos": True}, cut=True),
            Case("drawn", plain | {"temperature": 0.8, "seed": number}),
            Case("schema", plain | {"response_format": shape, "max_tokens": 2 * tokens}),
            Case("pattern", plain | {"guided_regex": PATTERN}),
            Case("adapter", plain | {"model": adapter}),
            Case("long", plain | {"prompt": long, "max_tokens": max(1, tokens // 4)}),
            Case("chat", chat, "/v1/chat/completions"),
        ]
    return result


def session() -> aiohttp.ClientSession:
    """Connections without a limit of their number."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_SECONDS))


async def ask(clients: aiohttp.ClientSession, root: str, case: Case) -> Outcome:
    """Send a request, and read its answer to the end, or to where the client leaves."""
    loop = asyncio.get_running_loop()
    start, status, read = loop.time(), 0, b""
    try:
        async with clients.post(root + case.path, json=case.body) as response:
            status = response.status
            pieces = 0
            async for piece in response.content.iter_any():
                read, pieces = read + piece, pieces + 1
                if case.cut and pieces == CUT_AFTER:
                    response.close()
                    break
        text, tokens, problem = _streamed(read) if case.body.get("stream") else _whole(read)
        if case.cut and status == 200:
            problem = ""
    except TimeoutError:
        text, tokens, problem = "", 0, f"no answer within {_SECONDS:g} s"
    except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
        text, tokens, problem = "", 0, f"{type(error).__name__}: {error}"
    if status not in (0, 200):
        problem = f"status {status}"
    return Outcome(text, problem, status, tokens, loop.time() - start)


def _whole(read: bytes) -> tuple[str, int, str]:
    answer = json.loads(read)
    if "choices" not in answer:
        return "", 0, str(answer)[:200]
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text or "", answer["usage"]["completion_tokens"], ""


def _streamed(read: bytes) -> tuple[str, int, str]:
    """The text of a stream, which must end once."""
    lines = [line[6:] for line in read.decode(errors="replace").split("\n") if line.startswith("data: ")]
    events = []
    for line in lines:
        if line != "[DONE]":
            try:
                events.append(json.loads(line))
            except ValueError:
                break  # the client has left within an event
    choices = list(itertools.chain.from_iterable(event.get("choices") or [] for event in events))
    text = "".join(choice.get("text") or "" for choice in choices)
    ends = sum(choice.get("finish_reason") is not None for choice in choices)
    if ends != 1 or lines.count("[DONE]") != 1:
        return text, 0, f"the stream ends {ends} times"
    counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    return text, counts[-1] if counts else len(choices), ""


async def references(clients: aiohttp.ClientSession, root: str, asked: Sequence[Case]) -> list[str]:
    """The answers to requests, each alone, and whole for those that will be cut."""
    result = []
    for case in asked:
        outcome = await ask(clients, root, Case(case.kind, case.body, case.path))
        if outcome.problem:
            raise RuntimeError(f"{case.kind}: {outcome.problem}")
        result.append(outcome.text)
    return result


def fits(case: Case, outcome: Outcome, reference: str) -> bool:
    """Whether an answer is the right one; what came before a client left must be its beginning."""
    return reference.startswith(outcome.text) if case.cut else outcome.text == reference
