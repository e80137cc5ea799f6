"""litellm against the server: completions, chats, streams, tools, structured outputs, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.server.test_tools import TEMPLATE, Say, say, serving_with
from tests.support.openai_probes import HELLO, REPLY, SCHEMA, TOOLS, USER, conforms

litellm = pytest.importorskip("litellm")
__all__ = ["say"]


@pytest.fixture(scope="module")
def asked() -> Iterator[dict[str, Any]]:
    """Arguments of every call."""
    with serving_with(TEMPLATE) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        yield {"model": "openai/tiny", "api_base": url, "api_key": "none", "max_retries": 0, "temperature": 0}


@pytest.fixture
def chat(asked: dict[str, Any]) -> dict[str, Any]:
    return asked | {"messages": [USER], "max_tokens": 200}


def test_chats(chat: dict[str, Any], say: Say) -> None:
    say(HELLO)
    result = litellm.completion(**chat, seed=1, user="u")
    assert result.choices[0].message.content == HELLO and result.choices[0].finish_reason == "stop"
    assert result.usage.completion_tokens == len(HELLO) + 1 and result.model.endswith("tiny")
    pieces = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    assert litellm.stream_chunk_builder(pieces).choices[0].message.content == HELLO
    assert pieces[-1].usage.completion_tokens == len(HELLO) + 1
    cut = litellm.completion(**chat | {"max_tokens": 3}, n=2)
    assert [choice.message.content for choice in cut.choices] == ["Hel", "Hel"]
    assert cut.choices[0].finish_reason == "length"


def test_completions(asked: dict[str, Any], say: Say) -> None:
    say(HELLO)
    asked = asked | {"model": "text-completion-openai/tiny", "max_tokens": 50}
    assert litellm.text_completion(prompt="x", **asked).choices[0].text == HELLO
    pieces = litellm.text_completion(prompt="x", stream=True, **asked)
    assert "".join(piece.choices[0].text or "" for piece in pieces) == HELLO


def test_many_at_once(chat: dict[str, Any], say: Say) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(**chat) for _ in range(5)))

    say(HELLO)
    assert {result.choices[0].message.content for result in asyncio.run(ask())} == {HELLO}


def test_tools(chat: dict[str, Any], say: Say) -> None:
    """Whole and streamed; the conversation goes on with the result."""
    say(REPLY)
    message = litellm.completion(**chat, **TOOLS).choices[0].message
    assert message.content == "Sure." and message.reasoning_content == "Let me see."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [("add", {"a": 1})] * 2
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**chat, **TOOLS, stream=True))).choices[0]
    assert [call.function.arguments for call in streamed.message.tool_calls] == ['{"a": 1}'] * 2
    assert streamed.finish_reason == "tool_calls"
    say(HELLO)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
    after = litellm.completion(**chat | {"messages": [USER, message, *results]}, **TOOLS)
    assert after.choices[0].message.content == HELLO


def test_structured_outputs(chat: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    assert conforms(litellm.completion(**chat, response_format=form).choices[0].message.content)
    forced = litellm.completion(**chat, **TOOLS, tool_choice={"type": "function", "function": {"name": "add"}})
    assert conforms(forced.choices[0].message.tool_calls[0].function.arguments)


def test_errors(asked: dict[str, Any], chat: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="verbosity: is not supported"):
        litellm.completion(**chat, verbosity="low", allowed_openai_params=["verbosity"])
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.text_completion(**asked | {"model": "text-completion-openai/tiny"}, prompt=[[1] * 2000])
    with pytest.raises(litellm.NotFoundError, match="there is no model 'other'"):
        litellm.completion(**chat | {"model": "openai/other"})
