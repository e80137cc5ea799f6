"""Requests of every field of litellm's functions; most fields are those of OpenAI's and Anthropic's own clients."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anthropic
import openai
from anthropic.types import Message

from tests.support.anthropic_probes import MESSAGES
from tests.support.compatibility import Api, Probe, RefusedRequest
from tests.support.openai_probes import CHATS, COMPLETIONS, EMBEDDINGS, RESPONSES, USER

_PREFIX = re.compile(r"^(litellm\.\w+: |\w+Error: |[\w-]+Exception - |Error code: \d+ - )*")
"""What litellm writes before a server's line."""
_OWN = frozenset(
    {
        *("api_base", "api_key", "api_type", "api_version", "base_url", "custom_llm_provider", "deployment_id"),
        *("model_list", "timeout", "extra_headers", "extra_query", "extra_body", "shared_session", "caching"),
        *(
            "litellm_call_id",
            "logger_fn",
            "client",
            "text_format",
            "allowed_openai_params",
            "enable_json_schema_validation",
        ),
    }
)
"""Fields that choose the server or the form of a request, or that litellm uses itself."""
Probes = Mapping[str, Sequence[Probe]]


def _refusal(error: Exception) -> RefusedRequest:
    """The status and the server's line in an exception of litellm's; no status if no request was sent."""
    import litellm

    message = _PREFIX.sub("", str(error)).strip()
    if isinstance(error, litellm.UnsupportedParamsError):
        return RefusedRequest(None, message.splitlines()[0].partition(". To drop")[0])
    if message.startswith("{"):
        message = json.loads(message)["error"]["message"]
    return RefusedRequest(getattr(error, "status_code", None), message)


def _asked(function: Callable[..., Any], prefix: str) -> Callable[[Any, dict[str, Any]], Any]:
    """How litellm's function is called; `client` is its arguments for the server."""

    def call(client: Mapping[str, Any], request: dict[str, Any]) -> Any:
        try:
            return function(**client, **request | {"model": f"{prefix}/{request['model']}"})
        except (openai.APIError, anthropic.APIError) as error:
            return _refusal(error)
        except ModuleNotFoundError as error:  # of litellm's own, which it imports to stream messages
            return RefusedRequest(None, f"{error}")

    return call


def _messages(**request: Any) -> Any:
    """A message, or the bytes of its stream."""
    import litellm

    async def ask() -> Any:
        reply = await litellm.anthropic.messages.acreate(**request)
        return [piece async for piece in reply] if request.get("stream") else Message.model_validate(reply)

    return _LOOP.run_until_complete(ask())


_LOOP = asyncio.new_event_loop()
"""One for all requests: litellm's logging goes on in it."""


def _api(name: str, function: Any, call: Callable[..., Any], of: Api, prefix: str, more: Probes) -> Api:
    """The table of a function that sends the requests of another table. more: fields with other requests."""
    result = replace(of, path=name, params=function, call=_asked(call, prefix), own=_OWN)
    known = {**of.probes, **more}
    return replace(result, probes={each: known[each] for each in result.fields if each in known})


def _more_of(allowed: str, *probes: Probe) -> list[Probe]:
    """Requests with a field that litellm sends only if it is told to."""
    return [replace(probe, along={**probe.along, "allowed_openai_params": [allowed]}) for probe in probes]


def _text(pieces: Any) -> str:
    return "".join(piece.choices[0].text or "" for piece in pieces)


CHAT: Probes = {
    "verbosity": [Probe("medium"), *_more_of("verbosity", Probe("medium"), Probe("low"))],
    "include_server_side_tool_invocations": [Probe(True)],
    "thinking": [Probe({"type": "enabled", "budget_tokens": 1024})],
}
COMPLETION: Probes = {"stream": [Probe(True, lambda pieces, plain: _text(pieces) == plain.choices[0].text)]}
RESPONSE: Probes = {
    "max_output_tokens": [
        Probe(20, lambda reply, plain: reply.usage.output_tokens == 20),
        Probe(3, lambda reply, plain: reply.usage.output_tokens == 16),
    ],
    "stream": [Probe(True, lambda pieces, plain: pieces[-1].type == "response.completed")],
}
EMBEDDING: Probes = {
    "dimensions": [
        Probe(7),
        *_more_of(
            "dimensions",
            Probe(7, lambda reply, plain: len(reply.data[0]["embedding"]) == 7),
            Probe(1 << 20),
        ),
    ],
    "encoding_format": [
        Probe("float", lambda reply, plain: reply.data[0]["embedding"] == plain.data[0]["embedding"]),
        Probe("base64", lambda reply, plain: isinstance(reply.data[0]["embedding"], str)),
    ],
}
ANTHROPIC: Probes = {
    "stream": [Probe(True, lambda pieces, plain: b"message_stop" in b"".join(pieces))],
    "temperature": [Probe(0.0, lambda reply, plain: reply.content == plain.content)],
    "top_k": [Probe(1, lambda reply, plain: reply.content == plain.content, {"temperature": 1.0})],
    "top_p": [Probe(0.0, lambda reply, plain: reply.content == plain.content, {"temperature": 1.0})],
}


def tables() -> list[Api]:
    """The tables of litellm's functions."""
    import litellm

    create = litellm.anthropic.messages.create
    greedy = replace(MESSAGES, base={"model": "tiny", "messages": [USER], "max_tokens": 24, "temperature": 0.0})
    return [
        _api("litellm.completion", litellm.completion, litellm.completion, CHATS, "openai", CHAT),
        _api(
            "litellm.text_completion",
            *(litellm.text_completion, litellm.text_completion, COMPLETIONS, "text-completion-openai", COMPLETION),
        ),
        _api("litellm.responses", litellm.responses, litellm.responses, RESPONSES, "openai", RESPONSE),
        _api("litellm.anthropic.messages.create", create, _messages, greedy, "anthropic", ANTHROPIC),
        _api("litellm.embedding", litellm.embedding, litellm.embedding, EMBEDDINGS, "openai", EMBEDDING),
    ]
