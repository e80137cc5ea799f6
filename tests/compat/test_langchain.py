"""langchain-openai against the server: chats, streams, tools, structured outputs, async, batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.runtime.server.test_tools import TEMPLATE, Say, say, serving_with
from tests.support.openai_probes import HELLO, REPLY

pytest.importorskip("langchain_openai")
import langchain_openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

__all__ = ["say"]


class Answer(BaseModel):
    """What is asked for."""

    a: Literal[1, 2]


@tool
def add(a: int) -> int:
    """Adds one."""
    return a + 1


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_with(TEMPLATE) as server:
        yield f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture(scope="module")
def options(url: str) -> dict[str, Any]:
    return {"model": "tiny", "base_url": url, "api_key": "none", "temperature": 0, "max_retries": 0, "max_tokens": 200}


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def model(options: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Over chat completions, and over responses."""
    return langchain_openai.ChatOpenAI(**options, use_responses_api=request.param, stream_usage=True)


def test_chats(model: Any, say: Say) -> None:
    say(HELLO)
    result = model.invoke([SystemMessage("Be brief."), HumanMessage("x")])
    assert result.text == HELLO and result.usage_metadata["output_tokens"] == len(HELLO) + 1
    pieces = list(model.stream("x"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.text == HELLO and whole.usage_metadata["output_tokens"] == len(HELLO) + 1
    assert [one.text for one in model.batch(["x", "y", "z"])] == [HELLO] * 3
    after = model.invoke([HumanMessage("x"), AIMessage(HELLO), HumanMessage("y")], stop=None)
    assert after.text == HELLO


def test_many_at_once(options: dict[str, Any], say: Say) -> None:
    async def ask() -> list[Any]:
        models = [langchain_openai.ChatOpenAI(**options, use_responses_api=each) for each in (False, True)]
        return await asyncio.gather(*(model.ainvoke("x") for model in models * 3))

    say(HELLO)
    assert [result.text for result in asyncio.run(ask())] == [HELLO] * 6


def test_tools(model: Any, say: Say) -> None:
    """Whole and streamed; the conversation goes on with the results."""
    say(REPLY)
    bound = model.bind_tools([add])
    outcome = bound.invoke("x")
    assert [(call["name"], call["args"]) for call in outcome.tool_calls] == [("add", {"a": 1})] * 2
    pieces = list(bound.stream("x"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("add", {"a": 1})] * 2
    results = [add.invoke(call) for call in outcome.tool_calls]
    assert all(isinstance(result, ToolMessage) and result.content == "2" for result in results)
    say(HELLO)
    assert bound.invoke([HumanMessage("x"), outcome, *results]).text == HELLO


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_outputs(model: Any, method: str) -> None:
    result = model.with_structured_output(Answer, method=method).invoke("x")
    assert isinstance(result, Answer)


def test_json_mode(options: dict[str, Any], say: Say) -> None:
    say('{"a": 2}')
    model = langchain_openai.ChatOpenAI(**options)
    assert model.with_structured_output(Answer, method="json_mode").invoke("Give JSON.") == Answer(a=2)


def test_completions(options: dict[str, Any], say: Say) -> None:
    say(HELLO)
    model = langchain_openai.OpenAI(**options)
    assert model.invoke("x") == HELLO and "".join(model.stream("x")) == HELLO
    assert model.generate(["x", "y"]).generations[1][0].text == HELLO


def test_log_probabilities(options: dict[str, Any]) -> None:
    model = langchain_openai.ChatOpenAI(**options | {"max_tokens": 3}, logprobs=True, top_logprobs=2)
    assert len(model.invoke("x").response_metadata["logprobs"]["content"]) == 3
