"""The server under test: starts one for an artifact, and finds out what a running one offers."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from qcompile import sample_text
from qcompile.cli.load_test.answers import read
from qcompile.cli.load_test.client import Endpoint, authorization, reason, send
from qcompile.cli.load_test.workload import Material, Query
from qcompile.errors import ResourceError, UsageError

_END_SECONDS = 15
"""How long a server may take to end before it is killed."""

_PROBE_TOKENS = 8

_ACCEPTED = {
    "qcompile_drafted_tokens_total": "drafted",
    "qcompile_accepted_tokens_total": "accepted",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
"""Counters of drafted and accepted tokens, as servers name them."""


def root_of(url: str) -> str:
    """The root of a server, without a path /v1. Raises UsageError for what is no URL."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
        raise UsageError(f"{url}: write the URL of a server, as http://127.0.0.1:8000")
    return re.sub(r"(/v1)?/*$", "", url)


@contextmanager
def started(out: str, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A server of the artifact `out` in a process of its own: its url and model. `options` are those of `serve`.

    Raises ResourceError, or UsageError where the server refuses its options, with the last line it wrote.
    """
    from qcompile.system.python_process import module_command, module_environment

    command = module_command("qcompile", "serve", out, "--port", "0", "--json", *options)
    environment = {name: value for name, value in module_environment().items() if name != "QCOMPILE_API_KEY"}
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    assert server.stdout is not None and server.stderr is not None
    said: list[str] = []
    messages = server.stderr

    def listen() -> None:
        for line in messages:
            said[:] = [*said[-20:], line.rstrip("\n")]

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        line = server.stdout.readline()
        if not line:
            code = server.wait()
            listener.join(1)
            why = (said or ["no message"])[-1].removeprefix("qcompile: ")
            raise (UsageError if code == UsageError.exit_code else ResourceError)(f"the server did not start: {why}")
        yield json.loads(line)
    finally:
        server.terminate()
        try:
            server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@dataclass(frozen=True)
class Offer:
    """What a server offers: its model's name and context (None if it does not say), and whether it counts drafts."""

    endpoint: Endpoint
    context: int | None
    counts_drafts: bool


async def probe(session: aiohttp.ClientSession, root: str, model: str | None, key: str | None, chat: bool) -> Offer:
    """Find out the model and what fields requests may have, with a few short requests. Raises ResourceError if the
    server cannot be reached or does not answer them, UsageError if it wants another key or has several models."""
    listed = await _models(session, root, key)
    names = [str(entry.get("id")) for entry in listed]
    if model is None and len(names) != 1:
        raise UsageError(f"{root} serves {', '.join(names) or 'no model by name'}: choose one by --model")
    chosen = model or names[0]
    context = next((entry.get("max_model_len") for entry in listed if entry.get("id") == chosen), None)
    endpoint = await _accepted(session, Endpoint(root, chosen, key, chat))
    counts = bool(await drafts(session, endpoint))
    return Offer(endpoint, context if isinstance(context, int) else None, counts)


async def _models(session: aiohttp.ClientSession, root: str, key: str | None) -> list[dict[str, Any]]:
    """The models that a server lists."""
    url = f"{root}/v1/models"
    try:
        async with session.get(url, headers=authorization(key), allow_redirects=False) as response:
            status, body = response.status, await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise ResourceError(f"cannot reach {root}: {reason(error)}; does a server run there?") from None
    if status in (401, 403):
        raise UsageError(f"{root} wants {'another' if key else 'an'} API key: give it by --api-key")
    try:
        listed = json.loads(body)["data"] if status == 200 else None
    except (ValueError, KeyError, TypeError):
        listed = None
    if not isinstance(listed, list):
        raise ResourceError(f"{url} answers with HTTP {status} and no list of models: is it a server of OpenAI's API?")
    return [entry for entry in listed if isinstance(entry, dict)]


async def _accepted(session: aiohttp.ClientSession, endpoint: Endpoint) -> Endpoint:
    """The endpoint with all extra fields that its server accepts."""
    chosen = [(counts, eos) for eos in ("ignore_eos", "") for counts in ("counts", "usage", "")]
    why = ""
    for extras in chosen:
        tried = replace(endpoint, extras=tuple(filter(None, extras)))
        answer = read(await send(session, tried, Query("Once upon a time", _PROBE_TOKENS)))
        if answer.failure is None:
            return tried
        why = why or answer.failure
        if not why.startswith(("HTTP 400", "HTTP 422")):
            break
    raise ResourceError(f"{endpoint.url} does not answer: {why}")


async def material(session: aiohttp.ClientSession, endpoint: Endpoint) -> Material:
    """The package's text for prompts: in tokens if the server encodes texts and takes tokens, else in characters."""
    text = "\n\n".join(sample_text.documents())
    if not endpoint.chat and (tokens := await _encoded(session, endpoint, text)):
        answer = read(await send(session, endpoint, Query(tokens[:_PROBE_TOKENS], _PROBE_TOKENS)))
        if answer.failure is None:
            return Material(tokens)
    excerpt = text[:4000]
    answer = read(await send(session, endpoint, Query(excerpt, 1)))
    return Material(text, len(excerpt) / answer.input_tokens if answer.input_tokens else 4.0)


async def _encoded(session: aiohttp.ClientSession, endpoint: Endpoint, text: str) -> list[int]:
    """The tokens of a text by the server's /tokenize; empty if it has none."""
    asked = {"model": endpoint.model, "prompt": text, "add_special_tokens": False}
    try:
        async with session.post(f"{endpoint.root}/tokenize", json=asked, headers=endpoint.headers) as response:
            answer = json.loads(await response.read()) if response.status == 200 else {}
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return []
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else []


async def drafts(session: aiohttp.ClientSession, endpoint: Endpoint) -> dict[str, float]:
    """Tokens `drafted` and `accepted` since the server started, by its /metrics; empty if it does not count them."""
    try:
        async with session.get(f"{endpoint.root}/metrics", headers=endpoint.headers) as response:
            text = (await response.read()).decode(errors="replace") if response.status == 200 else ""
    except (TimeoutError, aiohttp.ClientError, OSError):
        return {}
    counts: dict[str, float] = {}
    for name, value in re.findall(r"^([\w:]+)(?:\{[^\n]*\})? ([0-9.eE+]+)(?: \d+)?$", text, re.MULTILINE):
        if (what := _ACCEPTED.get(name)) is not None:
            counts[what] = counts.get(what, 0.0) + float(value)
    return counts if len(counts) == 2 else {}
